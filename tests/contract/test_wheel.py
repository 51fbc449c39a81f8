"""What a user installs: the wheel without JAX is enough for every operator module."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

IMPORT_ALL = """
import importlib, pkgutil, sys
import ling_operator
names = [m.name for m in pkgutil.iter_modules(ling_operator.__path__, "ling_operator.")]
for name in names:
    importlib.import_module(name)
heavy = {"jax", "flax", "optax", "numpy", "orbax"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
print(len(names))
"""


def _uv(repository: Path) -> str:
    return shutil.which("uv") or str(repository / ".venv" / "bin" / "uv")


def _run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_the_operator_imports_from_the_wheel_in_an_environment_without_jax(
    repository: Path, tmp_path: Path
) -> None:
    uv = _uv(repository)
    _run(uv, "build", "--quiet", "--wheel", "--out-dir", str(tmp_path), cwd=repository)
    wheel = next(tmp_path.glob("*.whl"))
    names = zipfile.ZipFile(wheel).namelist()
    assert "ling_operator/reconcile.py" in names
    assert "ling_trainer/step.py" in names
    assert "ling_operator/py.typed" in names

    _run(uv, "venv", "--quiet", "--python", sys.executable, "fresh", cwd=tmp_path)
    python = str(tmp_path / "fresh" / "bin" / "python")
    install = (uv, "pip", "install", "--quiet", "--python", python)
    lock = str(repository / "requirements" / "operator.txt")
    _run(*install, "--require-hashes", "-r", lock, cwd=tmp_path)
    _run(*install, "--no-deps", str(wheel), cwd=tmp_path)
    modules = int(_run(python, "-c", IMPORT_ALL, cwd=tmp_path))
    assert (
        modules
        == len([n for n in names if n.startswith("ling_operator/") and n.endswith(".py")]) - 1
    )
    plugin = _run(str(tmp_path / "fresh" / "bin" / "kubectl-ling"), "--help", cwd=tmp_path)
    assert plugin.startswith("usage: kubectl ling ")
