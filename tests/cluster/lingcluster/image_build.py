"""This project's images, built for real and without a registry: `make images` with buildah.

The base is Debian's own bootstrap, which is what debian:trixie-slim is made of. Everything lies
in one folder of the user's cache, which buildah keeps by content: a second build is quick, and
the user's own images are not touched. Takes root and Debian's packages
(scripts/install_node_packages.sh).
"""

from __future__ import annotations

import configparser
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lingcluster.build import cache_root

SUITE = "trixie"
_PROGRAMS = ("buildah", "runc", "debootstrap", "ip")
_FILES = ("/usr/lib/cni/bridge", "/usr/share/keyrings/debian-archive-keyring.gpg")
_RECIPE = ("Dockerfile", "requirements/image.txt", "requirements/operator.txt",
           "requirements/trainer.txt")  # fmt: skip
_BUILD_SECONDS = 900.0
# What of pip's configuration says where packages come from.
_PIP_KEYS = ("index-url", "extra-index-url", "trusted-host", "proxy", "timeout")


class ImagesUnavailableError(Exception):
    """Images cannot be built on this machine; the message says what is missing."""


class CommandError(Exception):
    """A program failed; the message holds the end of what it printed."""


def problem() -> str | None:
    """Return why no image can be built or run here, None when it can."""
    if os.geteuid() != 0:
        return "building and running images takes root; run the tests as root"
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_path()) is None]
    missing += [path for path in _FILES if not Path(path).exists()]
    if missing:
        return f"{', '.join(missing)} missing; run scripts/install_node_packages.sh"
    return None


@dataclass(frozen=True)
class BuiltImage:
    """An image in the store.

    Attributes:
      name: with its tag.
      digest: of its content.
      size: bytes of all its layers, uncompressed.
      config: the OCI image's: Entrypoint, Env, User, WorkingDir, Labels.
    """

    name: str
    digest: str
    size: int
    config: dict[str, Any]


class ImageStore:
    """Buildah's storage in the user's cache.

    Args:
      repository: the folder that holds the Dockerfile.
      report: called with a line of progress.

    Raises:
      ImagesUnavailableError: see `problem`.
    """

    def __init__(self, repository: Path, *, report: Callable[[str], None]) -> None:
        if found := problem():
            raise ImagesUnavailableError(found)
        self.repository = repository
        self.folder = cache_root().parent / "images"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._report = report
        storage = ("--root", str(self.folder / "storage"), "--runroot", "/run/ling-tpu-images")
        self._command = ("buildah", *storage)
        self._environment = {
            **os.environ,
            "PATH": _path(),
            "BUILDAH_ISOLATION": "chroot",
            "BUILDAH_LAYERS": "true",
        }

    def base(self) -> BuiltImage:
        """Return a plain Debian, bootstrapped once.

        Raises:
          ImagesUnavailableError: Debian's mirror cannot be reached.
        """
        name = f"localhost/ling-base:{SUITE}"
        with self._lock():
            if not self._exists(name):
                self._bootstrap(name)
        return self._inspect(name)

    def build(self, target: str) -> BuiltImage:
        """Run `make images` for one target, the trainer's for CPUs.

        Raises:
          CommandError: the build failed.
        """
        base = self.base()
        tag = "test"
        with self._lock():
            self._forget_old_recipes()
            started = time.monotonic()
            environment = {
                **self._environment,
                "BUILDER": " ".join(self._command),
                "BUILD_FLAGS": " ".join(["--quiet", "--network", "host", *self._mirror_flags()]),
                "BASE": base.name,
                "REPOSITORY": "localhost/",
                "TARGETS": target,
                "EXTRA": "",
                "TAG": tag,
            }
            _check(["make", "images"], cwd=self.repository, environment=environment)
            self._report(f"{target} in {time.monotonic() - started:.0f} s")
        return self._inspect(f"localhost/ling-{target}:{tag}")

    def sandbox(self) -> BuiltImage:
        """Return what holds a pod's namespaces on a real node: a program that does nothing."""
        name = "localhost/ling-sandbox:test"
        base = self.base()
        with self._lock():
            if not self._exists(name):
                container = self.buildah("from", "--pull-never", base.name)
                self.buildah("config", "--entrypoint", '["/usr/bin/sleep", "infinity"]', container)
                self.buildah("commit", "--quiet", "--rm", container, name)
        return self._inspect(name)

    def export(self, image: BuiltImage, path: Path, *, name: str) -> None:
        """Write an image as a Docker archive, in which it is called `name`."""
        # Docker's, since buildah compresses OCI's: half a minute of a processor for a gigabyte.
        self.buildah("push", "--quiet", image.name, f"docker-archive:{path}:{name}")

    @contextlib.contextmanager
    def root_filesystem(self, image: BuiltImage) -> Iterator[Path]:
        """Mount a container of the image; its folder is gone afterwards."""
        container = self.buildah("from", "--pull-never", image.name)
        try:
            yield Path(self.buildah("mount", container))
        finally:
            self.buildah("rm", container)

    def buildah(self, *arguments: str) -> str:
        """Run buildah on the store and return its output."""
        return _check([*self._command, *arguments], environment=self._environment).strip()

    def _bootstrap(self, name: str) -> None:
        self._report(f"bootstrapping Debian {SUITE}, once ...")
        root = self.folder / "bootstrap"
        shutil.rmtree(root, ignore_errors=True)
        command = ["debootstrap", "--variant=minbase", SUITE, str(root), *_debian_mirror()]
        try:
            _check(command, environment=self._environment)
        except CommandError as error:
            raise ImagesUnavailableError(str(error)) from error
        # As Debian's own images are: without what apt fetched.
        for pattern in (
            "var/cache/apt/*.bin",
            "var/cache/apt/archives/*.deb",
            "var/lib/apt/lists/*_*",
        ):
            for file in root.glob(pattern):
                file.unlink()
        container = self.buildah("from", "scratch")
        self.buildah("add", "--quiet", container, str(root), "/")
        self.buildah("commit", "--quiet", "--rm", container, name)
        shutil.rmtree(root)

    def _forget_old_recipes(self) -> None:
        """Drop the layers of another Dockerfile or lock: a gigabyte each."""
        digest = hashlib.sha256()
        for name in _RECIPE:
            digest.update((self.repository / name).read_bytes())
        stamp = self.folder / "recipe"
        if stamp.exists() and stamp.read_text() == digest.hexdigest():
            return
        self.buildah("rm", "--all")
        self.buildah("rmi", "--prune", "--force")
        stamp.write_text(digest.hexdigest())

    def _mirror_flags(self) -> list[str]:
        """Let the build's pip find packages where this machine's does."""
        settings = _pip_settings()
        authorities = _certificate_authorities()
        if authorities is not None:
            settings["cert"] = "/etc/pip-ca.crt"
        file = self.folder / "pip.conf"
        lines = "".join(f"{key} = {value}\n" for key, value in settings.items())
        file.write_text(f"[global]\n{lines}")
        flags = ["-v", f"{file}:/etc/pip.conf:ro"]
        if authorities is not None:
            flags += ["-v", f"{authorities}:/etc/pip-ca.crt:ro"]
        return flags

    def _exists(self, name: str) -> bool:
        return name in self.buildah("images", "--format", "{{.Name}}:{{.Tag}}").split()

    def _inspect(self, name: str) -> BuiltImage:
        found = json.loads(self.buildah("inspect", "--type", "image", name))
        (listed,) = json.loads(self.buildah("images", "--json", name))
        return BuiltImage(
            name=name,
            digest=found["FromImageDigest"],
            size=_bytes(listed["size"]),
            config=found["OCIv1"]["config"],
        )

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        with (self.folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _check(command: list[str], *, environment: dict[str, str], cwd: Path | None = None) -> str:
    """Run a program and return its stdout."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_BUILD_SECONDS,
        check=False,
    )
    if done.returncode:
        tail = "\n".join(f"{done.stdout}{done.stderr}".splitlines()[-20:])
        raise CommandError(f"{' '.join(command)}: exit {done.returncode}:\n{tail}")
    return done.stdout


def _path() -> str:
    # A user's PATH may lack what only root needs.
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def _bytes(text: str) -> int:
    number, unit = text.split()
    return int(float(number) * {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9}[unit])


def _debian_mirror() -> list[str]:
    """Return the mirror that this machine's apt uses; nothing for debootstrap's own."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        command = ["apt-get", "indextargets", "--format", "$(REPO_URI)"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        for uri in done.stdout.split():
            if uri.rstrip("/").endswith("/debian"):
                return [uri.rstrip("/")]
    return []


def _pip_settings() -> dict[str, str]:
    """Return where this machine's pip finds packages, by file and then by environment."""
    found: dict[str, str] = {}
    own = Path.home() / ".config" / "pip" / "pip.conf"
    parser = configparser.ConfigParser(interpolation=None)
    for file in ("/etc/pip.conf", Path.home() / ".pip" / "pip.conf", own):
        parser.read(file)
    for section in ("global", "install"):
        if parser.has_section(section):
            found |= dict(parser.items(section))
    for key in _PIP_KEYS:
        if value := os.environ.get(f"PIP_{key.upper().replace('-', '_')}"):
            found[key] = value
    return {key: " ".join(value.split()) for key, value in found.items() if key in _PIP_KEYS}


def _certificate_authorities() -> Path | None:
    """Return the file of the authorities that this machine trusts."""
    named = os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE")
    file = Path(named or ssl.get_default_verify_paths().cafile or "")
    return file.resolve() if file.is_file() else None
