"""The project's images as fixtures: built once, when the first test asks for one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lingcluster.image_build import BuiltImage, ImageStore, ImagesUnavailableError

_SKIPPED = pytest.StashKey[str]()


@pytest.fixture(scope="session")
def image_store(request: pytest.FixtureRequest, repository: Path) -> ImageStore:
    """Buildah's storage. Where there can be none: skipped, said loudly; with CI=true a failure."""
    capture: Any = request.config.pluginmanager.getplugin("capturemanager")

    def report(line: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"[images] {line}", flush=True)

    try:
        store = ImageStore(repository, report=report)
        store.base()
    except ImagesUnavailableError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"images cannot be built: {error}")
        request.config.stash[_SKIPPED] = str(error)
        pytest.skip(f"images cannot be built: {error}")
    return store


@pytest.fixture(scope="session")
def base_image(image_store: ImageStore) -> BuiltImage:
    """What both images are built on."""
    return image_store.base()


@pytest.fixture(scope="session")
def operator_image(image_store: ImageStore) -> BuiltImage:
    """The operator's image."""
    return image_store.build("operator")


@pytest.fixture(scope="session")
def trainer_image(image_store: ImageStore) -> BuiltImage:
    """The trainer's image, for CPUs."""
    return image_store.build("trainer")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say once, and not in passing, what was not tested."""
    if reason := config.stash.get(_SKIPPED, None):
        terminalreporter.write_line(
            "NOT TESTED: no image was built, and none ran on a real node (tests/images, "
            f"tests/cluster/test_real_node.py): {' | '.join(reason.splitlines())}",
            red=True,
            bold=True,
        )
