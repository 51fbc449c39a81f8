"""scripts/build_images.sh: what it asks of a builder, and what it says without one."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

TOOLS = ("bash", "dirname", "git", "sed")


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A PATH without any builder."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    return folder


def run(repository: Path, tools: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(repository / "scripts" / "build_images.sh")],
        env={"PATH": str(tools), "HOME": os.environ.get("HOME", "/"), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def install(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_without_a_builder_the_script_names_the_three_and_one_to_install(
    repository: Path, tools: Path
) -> None:
    done = run(repository, tools)
    assert done.returncode == 1
    assert "docker, podman or buildah" in done.stderr
    assert "apt-get install -y buildah" in done.stderr


def test_a_docker_without_its_daemon_is_passed_over(repository: Path, tools: Path) -> None:
    install(tools, "docker", "exit 1")
    done = run(repository, tools)
    assert done.returncode == 1
    assert "docker does not reach its daemon" in done.stderr
    install(tools, "podman", 'echo podman "$@"')
    assert run(repository, tools).stdout.count("podman build --target") == 2


def test_the_builder_gets_base_extra_and_names(repository: Path, tools: Path) -> None:
    install(tools, "podman", 'echo "$@"')
    operator, trainer = [
        line
        for line in run(
            repository, tools, BASE="mirror/debian:1", EXTRA="", TAG="7", REPOSITORY="host/p/"
        ).stdout.splitlines()
        if line.startswith("build ")
    ]
    for line, name in ((operator, "operator"), (trainer, "trainer")):
        assert f"--target {name} --tag host/p/ling-{name}:7 " in line
        assert "--build-arg BASE=mirror/debian:1" in line
        assert "--build-arg VERSION=" in line
    assert "--build-arg EXTRA= " in trainer
    assert "EXTRA" not in operator
    assert "--build-arg EXTRA=tpu" in run(repository, tools).stdout
