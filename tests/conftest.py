"""Shared by every test: JAX on the CPU, and the RFC's cpu_only marker."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")

pytest_plugins = (
    "cluster_programs",
    "cluster_report",
    "cluster_runs",
    "golden_table",
    "image_fixtures",
    "kept_programs",
)
pytest.register_assert_rewrite("plan_rows", "simulated_cluster", "story")
ROOT = Path(__file__).parents[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs neither accelerator nor control plane, and run the control plane's last.

    Then quick failures come first, and no control plane idles beside the trainer's tests.
    """
    items.sort(key=lambda item: "cluster" in item.path.parts)
    for item in items:
        if not {"cluster", "device"} & {mark.name for mark in item.iter_markers()}:
            item.add_marker(pytest.mark.cpu_only)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The folder that holds pyproject.toml."""
    return ROOT
