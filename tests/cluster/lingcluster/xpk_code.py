"""xpk's own code, from its wheel: asked for its table of shapes, and run against the API server.

    python tests/cluster/lingcluster/xpk_code.py DIRECTORY > tests/golden/xpk/shapes.txt

Its dependencies are not installed: what it uses here of them is nothing but their names.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

VERSION = "1.16.0"
SHA256 = "28aaa77721007885e51f4fcb10a52d917c81716f41e8d58d925a0847a0b9a386"
_LABELS = {
    "tpu-v4-podslice": "v4",
    "tpu-v5-lite-podslice": "v5litepod",
    "tpu-v5p-slice": "v5p",
    "tpu-v6e-slice": "v6e",
    "tpu7x": "tpu7x",
}


class XpkUnavailableError(Exception):
    """The wheel cannot be had here."""


def fetch(folder: Path) -> Path:
    """Return the folder with xpk's code, downloaded on first use and checked.

    Args:
      folder: where it is kept.

    Raises:
      XpkUnavailableError: it cannot be downloaded, or is another file than it was.
    """
    code = folder / f"xpk-{VERSION}"
    if (code / "xpk").is_dir():
        return code
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download"]
    wheel = folder / f"xpk-{VERSION}-py3-none-any.whl"
    folder.mkdir(parents=True, exist_ok=True)
    command = [*pip, "--no-deps", "--timeout=15", "--retries=1", f"--dest={folder}"]
    done = subprocess.run(
        [*command, f"xpk=={VERSION}"], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise XpkUnavailableError(f"xpk {VERSION} cannot be downloaded: {done.stderr[-300:]}")
    if (found := hashlib.sha256(wheel.read_bytes()).hexdigest()) != SHA256:
        raise XpkUnavailableError(f"{wheel} has sha256 {found}, not {SHA256}")
    partial = folder / f"xpk-{VERSION}.{os.getpid()}"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(partial)
    with contextlib.suppress(OSError):  # somebody else was quicker
        partial.rename(code)
    return code


@dataclass(frozen=True)
class Called:
    """What became of a call.

    Attributes:
      result: what the function returned, or its exit code.
      commands: of the shell, in order.
      printed: all that it said.
    """

    result: Any
    commands: list[str]
    printed: str


def call(
    code: Path, function: str, *arguments: Any, environment: Mapping[str, str] | None = None
) -> Called:
    """Call one of xpk's functions, in a process of its own; only kubectl's commands are run.

    Args:
      code: see `fetch`.
      function: dotted, such as xpk.core.workload.get_workload_list.
      arguments: of the function; a mapping is what the command line was parsed to.
      environment: of the process, beside this one's.

    Raises:
      RuntimeError: it ended otherwise than by returning or exiting.
    """
    program = [sys.executable, __file__, str(code), "--call", function]
    done = subprocess.run(
        program,
        input=json.dumps(arguments),
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(program)}: {done.stderr[-2000:]}")
    return Called(**json.loads(done.stdout), printed=done.stderr)


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for whatever of xpk's dependencies is not installed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] in {"xpk", *sys.stdlib_module_names}:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        stub = mock.MagicMock(name=spec.name)
        stub.__path__ = []
        stub.get_version.return_value = VERSION  # setuptools_scm's, which it compares
        return stub

    def exec_module(self, module: ModuleType) -> None:
        pass


def _load(code: Path, module: str) -> Any:
    if str(code) not in sys.path:
        sys.path.insert(0, str(code))
        sys.meta_path.insert(0, _Stubs())
    return importlib.import_module(module)


def shapes(code: Path) -> Iterator[str]:
    """Yield a line for each slice: GKE's label, topology, hosts, chips, containers; and types."""
    table = _load(code, "xpk.core.system_characteristics").UserFacingNameToSystemCharacteristics
    for name, system in table.items():
        if system.gke_accelerator not in _LABELS:
            continue
        if name == f"{_LABELS[system.gke_accelerator]}-{system.topology}":
            numbers = system.vms_per_slice, system.chips_per_vm, system.parallel_containers
            yield " ".join(("slice", system.gke_accelerator, system.topology, *map(str, numbers)))
        else:
            yield f"type {name} {system.topology}"


def _call(code: Path, function: str) -> None:
    """Call a function; a command without kubectl is not run but taken to have said nothing."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what it prints, and what its commands print, is no answer
    arguments = [
        argparse.Namespace(**each) if isinstance(each, dict) else each
        for each in json.load(sys.stdin)
    ]
    ran: list[str] = []
    popen = subprocess.Popen

    def start(command: Any, *args: Any, **options: Any) -> Any:
        text = command if isinstance(command, str) else shlex.join(command)
        ran.append(text)
        return popen(command if "kubectl" in text else "true", *args, **options)

    module, name = function.rsplit(".", 1)
    with mock.patch.object(subprocess, "Popen", side_effect=start):
        try:
            result = getattr(_load(code, module), name)(*arguments)
        except SystemExit as ended:
            result = ended.code
    json.dump({"result": result, "commands": ran}, answer)
    answer.close()


def main() -> None:
    """Print the table of shapes, or call a function."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="the wheel's content")
    parser.add_argument("--call", help="a function; its arguments are read as JSON from stdin")
    arguments = parser.parse_args()
    if arguments.call:
        _call(arguments.directory, arguments.call)
    else:
        print("\n".join(shapes(arguments.directory)))


if __name__ == "__main__":
    main()
