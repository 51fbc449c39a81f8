"""What is read of a run's pods, and where."""

from dataclasses import dataclass

from ling_operator.reflector import Key
from ling_operator.scrape import ScrapeTarget
from ling_operator.views import PodView


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrapeJob:
    """One pod of a run whose metrics can be read now.

    Attributes:
      host: name of its node, else of the pod.
      container: of the trainer's on that host, from 0.
    """

    key: Key
    interval_seconds: float
    target: ScrapeTarget
    host: str
    container: int = 0


def build_scrape_job(
    key: Key, pod: PodView, *, interval_seconds: float, port: int, container: int = 0
) -> ScrapeJob | None:
    """Return the job of a pod's container; None while the pod has no address, or no port.

    Args:
      key: of the run.
      pod: one of its.
      interval_seconds: from one read to the next.
      port: of the pod's first container; 0 without one. The others' follow.
      container: whose, from 0.
    """
    if pod.ip is None or not port:
        return None
    target = ScrapeTarget(
        ip=pod.ip,
        port=port + container,
        pod_uid=pod.uid,
        host_network=pod.host_network,
    )
    return ScrapeJob(
        key=key,
        interval_seconds=interval_seconds,
        target=target,
        host=pod.host or pod.name,
        container=container,
    )
