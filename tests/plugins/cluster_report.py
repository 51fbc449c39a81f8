"""What the control plane's tests leave for people: measurements, stories, a failure's logs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lingcluster.fault_table import FaultTable
from lingcluster.story import Story

_LOG_TAIL = 20_000
_LATENCIES = pytest.StashKey[dict[str, float]]()
_STORIES = pytest.StashKey[list[Path]]()
_FAULTS = pytest.StashKey[FaultTable]()


@pytest.fixture
def story(tmp_path: Path, request: pytest.FixtureRequest) -> Story:
    """The test's story; it lies beside the operator's log, and the summary says where."""
    story = Story(tmp_path / f"{request.node.originalname}.log")
    request.config.stash.setdefault(_STORIES, []).append(story.path)
    return story


@pytest.fixture
def faults(pytestconfig: pytest.Config) -> FaultTable:
    """Rows of docs/faults.md as measured, printed in the summary."""
    return pytestconfig.stash.setdefault(_FAULTS, FaultTable())


@pytest.fixture
def halt_latencies(pytestconfig: pytest.Config) -> dict[str, float]:
    """Seconds from NaN to Halted by path, printed in the summary."""
    return pytestconfig.stash.setdefault(_LATENCIES, {})


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say what was measured, and where the stories lie."""
    for path, seconds in config.stash.get(_LATENCIES, {}).items():
        terminalreporter.write_line(f"from NaN to Halted: {seconds:5.2f} s {path}")
    for fault in config.stash.get(_FAULTS, FaultTable()).rows:
        terminalreporter.write_line(fault.row())
    for path in config.stash.get(_STORIES, []):
        terminalreporter.write_line(f"what was seen and when: {path}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Add the pods and what they printed to a failed test's report."""
    report = yield
    arguments = getattr(item, "funcargs", {})
    has_pods = {"control_plane", "namespace", "kubelet"} <= arguments.keys()
    if has_pods and call.when == "call" and report.failed:
        plane, space = arguments["control_plane"], arguments["namespace"]
        pods = plane.kubectl("get", "jobsets,jobs,pods", "-o", "wide", "-n", space)
        report.sections.append((f"objects in {space}", pods))
        report.sections.append(("logs of the control plane", str(plane.directory)))
        report.sections.append((f"pods' output in {space}", arguments["kubelet"].logs(space)))
        for log in sorted(arguments.get("tmp_path", Path(os.devnull)).glob("operator-*.log")):
            report.sections.append((str(log), log.read_text()[-_LOG_TAIL:]))
    return report
