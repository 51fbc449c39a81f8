"""Containers of the built images. Tests here take root and the Debian packages of the images."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from lingcluster.image_build import BuiltImage, ImageStore
from lingcluster.processes import Session
from lingcluster.runc_container import RuncContainer, Start

HERE = Path(__file__).parent
USER = 65532

type StartContainer = Callable[[BuiltImage, Start], RuncContainer]


@pytest.fixture(scope="session")
def process_session() -> Iterator[Session]:
    """Owner of every process that runs outside of this one."""
    with Session() as session:
        yield session


@pytest.fixture
def start_container(
    image_store: ImageStore, process_session: Session, tmp_path: Path
) -> Iterator[StartContainer]:
    """Start a container; what is left of it at the end is removed."""
    with ExitStack() as stack:
        count = 0

        def start(image: BuiltImage, how: Start) -> RuncContainer:
            nonlocal count
            count += 1
            root = stack.enter_context(image_store.root_filesystem(image))
            folder = tmp_path / f"container-{count}"
            container = RuncContainer(image, root, how, folder=folder, session=process_session)
            stack.callback(container.remove)
            return container

        yield start


@pytest.fixture
def run_container(start_container: StartContainer) -> Callable[..., str]:
    """Run a container to its end, which must be a good one; return what it printed."""

    def run(image: BuiltImage, *entrypoint: str, mounts: dict[str, Path] | None = None) -> str:
        how = Start(entrypoint=entrypoint, mounts=mounts or {})
        container = start_container(image, how)
        assert container.wait(timeout=120) == 0, container.output()
        return container.output()

    return run


@pytest.fixture
def shared_folder(tmp_path: Path) -> Path:
    """A folder that the images' user may write to."""
    folder = tmp_path / "shared"
    folder.mkdir()
    os.chown(folder, USER, USER)
    return folder
