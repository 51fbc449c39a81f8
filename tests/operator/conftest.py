"""Builders for the operator's tests: objects as the API server returns them, views, `ling`."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli_server import Server
from ling_operator.api import API_VERSION, KIND, TrainingRun, TrainingRunStatus
from ling_operator.cli import main
from ling_operator.plan import Observed, Plan
from ling_operator.reconcile import reconcile
from ling_operator.verdict import HealthSample
from ling_operator.views import JobSetView, Owner, PodView, Termination
from story import Story

RUN_UID = "run-uid"
RUN_SETTINGS = {
    "preset": "ling2_tiny",
    "baseOutputDirectory": "runs",
    "data": {"datasetPath": "data/corpus"},
}


class Scene:
    """One run called `ling2` and the cluster around it, at a fixed time."""

    now = datetime(2026, 11, 30, 9, 0, tzinfo=UTC)
    settings = RUN_SETTINGS

    def at(self, seconds: float) -> datetime:
        """Return the time so many seconds after the scene's."""
        return self.now + timedelta(seconds=seconds)

    def manifest(self, name: str = "ling2", **spec: Any) -> dict[str, Any]:
        """Return an object as a user writes it; a key of spec that is None is left out."""
        whole = {"image": "trainer:1", "cpu": {"processes": 2}, "run": RUN_SETTINGS, **spec}
        return {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": name, "namespace": "team", "uid": RUN_UID, "generation": 1},
            "spec": {key: value for key, value in whole.items() if value is not None},
        }

    def run(self, status: TrainingRunStatus | None = None, **spec: Any) -> TrainingRun:
        """Return the run with this status."""
        run = TrainingRun.parse(self.manifest(**spec))
        return run if status is None else run.model_copy(update={"status": status})

    def jobset(self, **changes: Any) -> JobSetView:
        """Return the running JobSet of attempt 1."""
        view = JobSetView(
            name="ling2",
            uid="js-1",
            owner=Owner(api_version=API_VERSION, kind=KIND, name="ling2", uid=RUN_UID),
            attempt=1,
            suspended=False,
            terminal="",
            failure_reason="",
            failure="",
            restarts=0,
            restarting=False,
            deleting=False,
        )
        return replace(view, **changes)

    def pod(self, index: int = 0, **changes: Any) -> PodView:
        """Return a running pod of attempt 1."""
        view = PodView(
            name=f"ling2-slice-job-0-{index}-abcde",
            uid=f"pod-{index}",
            job_set="ling2",
            job_set_uid="js-1",
            attempt=1,
            job_index=0,
            completion_index=index,
            restart_attempt=0,
            ip=f"10.0.0.{index + 1}",
            host=f"node-{index}",
            host_network=False,
            metrics_port=9464,
            phase="Running",
            ready=True,
            exit_code=None,
            termination=None,
            deleting=False,
        )
        return replace(view, **changes)

    def pods(self, **changes: Any) -> tuple[PodView, ...]:
        """Return both pods of the run."""
        return self.pod(0, **changes), self.pod(1, **changes)

    def exited(self, code: int, index: int = 0, **words: Any) -> PodView:
        """Return a pod whose trainer ended with a code and, given any, last words."""
        return self.pod(
            index,
            phase="Succeeded" if code == 0 else "Failed",
            ready=False,
            exit_code=code,
            termination=Termination(**words) if words else None,
        )

    def sample(self, step: int, seconds: float = 0, **changes: Any) -> HealthSample:
        """Return a healthy page of process 0 at a step."""
        page = HealthSample(
            time=self.at(seconds),
            pod_uid="pod-0",
            page_pod_uid="pod-0",
            step=step,
            target_steps=200,
            loss=3.25,
            lm_loss=3.0,
            raw_grad_norm=1.0,
            num_zeros=600.0,
            num_grad_elements=1000.0,
            total_weights=4096.0,
            heartbeat=self.at(seconds),
            nonfinite_steps=((("nan", "NonFiniteLoss"), 0), (("inf", "NonFiniteGradient"), 0)),
            consecutive_max=0,
            last_finite_step=step,
            last_nonfinite_step=0,
            tokens_per_second=1000.0,
        )
        return replace(page, **changes)

    def nan_sample(self, step: int, seconds: float = 0, **changes: Any) -> HealthSample:
        """Return process 0's page right after a first NaN at a step."""
        bad: dict[str, Any] = {
            "loss": float("nan"),
            "lm_loss": float("nan"),
            "is_nan": True,
            "nonfinite_steps": ((("nan", "NonFiniteLoss"), 1),),
            "consecutive_max": 1,
            "last_finite_step": step - 1,
            "last_nonfinite_step": step,
        }
        return self.sample(step, seconds, **(bad | changes))

    def observed(self, run: TrainingRun, **rest: Any) -> Observed:
        """Return an observation at the scene's time."""
        return Observed(**{"run": run, "now": self.now, **rest})

    def running(self, seconds: float = -60, **spec: Any) -> TrainingRun:
        """Return the run as it is after two passes: created, its pods running."""
        run = self.run(**spec)
        plan = self.reconcile(self.observed(run, now=self.at(seconds)))
        world = {"jobset": self.jobset(), "pods": self.pods()}
        run = self.after(run, plan)
        return self.after(run, self.reconcile(self.observed(run, now=self.at(seconds), **world)))

    def after(self, run: TrainingRun, plan: Plan) -> TrainingRun:
        """Return the run with the plan's status, as read back from the API server."""
        written = plan.status.model_dump_json(by_alias=True, exclude_none=True)
        status = TrainingRunStatus.model_validate_json(written, strict=True)
        assert status == plan.status, "the status does not survive being stored"
        return run.model_copy(update={"status": status})

    def reconcile(self, observed: Observed) -> Plan:
        """Reconcile, and check what holds of every plan: applied twice is applied once."""
        plan = reconcile(observed)
        assert len(plan.actions) <= 1
        run = observed.run.model_copy(update={"status": plan.status})
        again = reconcile(replace(observed, run=run))
        assert again.status == plan.status
        assert len(again.actions) <= len(plan.actions)
        return plan


@pytest.fixture(scope="session")
def scene() -> Scene:
    """Builders of runs, views, samples and observations."""
    return Scene()


@pytest.fixture
def story(scene: Scene) -> Story:
    """The run, its JobSet and its pods running."""
    return Story(scene)


@pytest.fixture
def halted(scene: Scene) -> Story:
    """The run after a NaN at step 12, its JobSet seen suspended."""
    story = Story(scene)
    story.see(0, sample=scene.nan_sample(12))
    story.see(1, jobset=scene.jobset(suspended=True), pods=())
    return story


@pytest.fixture
def server() -> Iterator[Server]:
    """An API server that answers as it is told."""
    server = Server()
    yield server
    server.server.shutdown()
    server.server.server_close()


@pytest.fixture
def kubeconfig(server: Server, tmp_path: Path) -> Path:
    """File that leads to `server`, and by the context `other` to a server that is not there."""
    address = f"http://127.0.0.1:{server.server.server_address[1]}"
    contexts = [
        {"name": "c", "context": {"cluster": "c", "user": "c", "namespace": "team"}},
        {"name": "other", "context": {"cluster": "dead", "user": "c", "namespace": "far"}},
    ]
    path = tmp_path / "kubeconfig"
    path.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "c",
                "clusters": [
                    {"name": "c", "cluster": {"server": address}},
                    {"name": "dead", "cluster": {"server": "http://127.0.0.1:1"}},
                ],
                "users": [{"name": "c", "user": {}}],
                "contexts": contexts,
            }
        )
    )
    return path


@pytest.fixture
def ling(
    kubeconfig: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Call `ling` on `server`; return its exit code, its output and its errors."""

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--kubeconfig", str(kubeconfig)])
        out, err = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, out, err

    return call
