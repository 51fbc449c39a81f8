"""XLA's programs, kept on this machine from one green run of the tests to the next.

They are entries of JAX's persistent compilation cache. An entry's name is a hash of the program,
its options, XLA's flags and JAX's version: what is computed in another way is compiled anew. JAX
writes an entry in place, so a process that is killed leaves half of one. A session therefore works
in a folder of its own, which begins as a copy of what is kept, and only a green one adds to that.
"""

import contextlib
import hashlib
import os
import platform
import shutil
from pathlib import Path

import pytest

from lingcluster.build import cache_root

LARGEST = 512 * 2**20  # bytes; a session that ends with more leaves nothing to the next
_OWN = pytest.StashKey[Path]()


def kept_folder() -> Path:
    """Return this machine's folder: a program is native code of the processor it was made on."""
    import jaxlib.version

    cpuinfo = Path("/proc/cpuinfo")
    lines = set(cpuinfo.read_text().splitlines()) if cpuinfo.exists() else set()
    same = sorted(line for line in lines if line.startswith(("model name", "flags", "Features")))
    machine = hashlib.sha256("\n".join([platform.machine(), *same]).encode()).hexdigest()[:12]
    return cache_root().with_name("xla") / f"jaxlib-{jaxlib.version.__version__}-{machine}"


@pytest.fixture(scope="session")
def kept_programs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Have this process use what is kept; return the environment that has another do so.

    Not for a process that a test kills. A cache that the environment names is left alone.
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    if jax.config.jax_compilation_cache_dir:
        return {}
    own = tmp_path_factory.mktemp("xla")
    for entry in kept_folder().glob("*-cache"):
        with contextlib.suppress(FileNotFoundError):  # another session begins anew
            shutil.copyfile(entry, own / entry.name)
    settings = {
        "jax_compilation_cache_dir": str(own),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # it may have been asked for, and found off, before
    request.config.stash[_OWN] = own
    return {name.upper(): str(value) for name, value in settings.items()}


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Keep what a green session compiled; what cannot be kept is compiled again."""
    own = session.config.stash.get(_OWN, None)
    if own is None:
        return
    if exitstatus == pytest.ExitCode.OK:
        with contextlib.suppress(OSError):
            keep(own, kept_folder())
    shutil.rmtree(own, ignore_errors=True)


def keep(own: Path, kept: Path) -> None:
    """Add to what is kept; an entry appears whole or not at all."""
    if sum(entry.stat().st_size for entry in own.iterdir()) > LARGEST:
        shutil.rmtree(kept)
        return
    kept.mkdir(parents=True, exist_ok=True)
    for entry in own.iterdir():
        if not (kept / entry.name).exists():
            half = kept / f".{os.getpid()}"
            shutil.copyfile(entry, half)
            half.replace(kept / entry.name)
