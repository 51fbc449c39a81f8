"""The control plane's programs as a fixture: built before the first test that needs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

import pytest

from lingcluster import container
from lingcluster.build import Builder, Programs, ProgramsUnavailableError

_PROGRAMS = pytest.StashKey[Programs | str]()
_SKIPPED = pytest.StashKey[str]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build the programs before the first test, where no time limit of a test counts."""
    needed = any("programs" in getattr(item, "fixturenames", ()) for item in session.items)
    if not needed or session.config.option.collectonly:
        return
    session.config.stash[_PROGRAMS] = _build(session.config)


def _build(config: pytest.Config) -> Programs | str:
    """Return the programs, or why there are none."""
    if problem := _namespace_problem():
        return problem
    capture: Any = config.pluginmanager.getplugin("capturemanager")

    def report(line: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"[control plane] {line}", flush=True)

    try:
        return Builder(report=report).ensure()
    except ProgramsUnavailableError as error:
        return str(error)


def _namespace_problem() -> str | None:
    """Return why this user cannot start a container, None when it can."""
    spec = {
        "argv": ["true"],
        "environment": {"PATH": os.defpath},
        "working_directory": "/",
        "hostname": "probe",
        "device_directory": tempfile.gettempdir(),
        "mounts": [],
    }
    done = subprocess.run(
        [sys.executable, "-I", "-S", container.__file__],
        input=json.dumps(spec),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return None
    reason = (done.stdout + done.stderr).strip()[-500:]
    return f"this user may not make namespaces; run the tests as root ({reason})"


@pytest.fixture(scope="session")
def programs(request: pytest.FixtureRequest) -> Programs:
    """The built programs. Without them: skipped, said loudly once; with CI=true a failure."""
    found = request.config.stash[_PROGRAMS]
    if isinstance(found, Programs):
        return found
    if os.environ.get("CI") == "true":
        pytest.fail(f"the control plane cannot run: {found}")
    request.config.stash[_SKIPPED] = found
    pytest.skip("the control plane cannot run; the summary says why")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say once, and not in passing, what was not tested."""
    if reason := config.stash.get(_SKIPPED, None):
        terminalreporter.write_line(
            "NOT TESTED: nothing ran against a real Kubernetes API server, scheduler or JobSet "
            f"controller (all of tests/cluster): {' | '.join(reason.splitlines())}",
            red=True,
            bold=True,
        )
