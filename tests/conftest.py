"""Shared by every test: JAX on the CPU, and the RFC's cpu_only marker."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")

ROOT = Path(__file__).parents[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as cpu_only all that needs neither an accelerator nor the control plane."""
    for item in items:
        if not {"cluster", "device"} & {mark.name for mark in item.iter_markers()}:
            item.add_marker(pytest.mark.cpu_only)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The folder that holds pyproject.toml."""
    return ROOT
