"""The helm binary: rendering without a cluster, and releases in one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import yaml

from lingcluster.client import Manifest

CHART = Path(__file__).parents[3] / "charts" / "ling-operator"


class HelmError(Exception):
    """Helm refused; the message is what it printed."""


class Helm:
    """Helm with settings of its own, so that nothing of the user's home is read or written.

    Args:
      binary: the program.
      home: folder for its state.
      kubeconfig: for commands that need a cluster.
    """

    def __init__(self, binary: Path, *, home: Path, kubeconfig: Path | None = None) -> None:
        self._binary = binary
        self._environment = {
            "PATH": os.environ.get("PATH", ""),
            "HOME": str(home),
            "KUBECONFIG": str(kubeconfig or os.devnull),
        }

    def __call__(self, *arguments: str | Path) -> str:
        """Run helm; return what it printed to both streams.

        Raises:
          HelmError: a non-zero exit.
        """
        done = self._run(*arguments, stderr=subprocess.STDOUT)
        if done.returncode:
            raise HelmError(done.stdout.strip())
        return done.stdout

    def template(
        self,
        *arguments: str | Path,
        release: str = "ling-operator",
        namespace: str = "ling-system",
        chart: Path = CHART,
    ) -> list[Manifest]:
        """Render a chart; return its objects.

        Raises:
          HelmError: a value is refused.
        """
        command = ("template", release, chart, "--namespace", namespace, *arguments)
        done = self._run(*command, stderr=subprocess.PIPE)
        if done.returncode:
            raise HelmError(done.stderr.strip())
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        return [each for each in yaml.load_all(done.stdout, Loader=loader) if each]

    def _run(self, *arguments: str | Path, stderr: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self._binary, *arguments],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            timeout=180,
            check=False,
            env=self._environment,
        )


def of_kind(objects: Sequence[Manifest], kind: str) -> list[Manifest]:
    """Return the objects of a kind."""
    return [each for each in objects if each["kind"] == kind]
