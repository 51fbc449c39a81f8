"""The chart, rendered by real Helm. Everything under this folder needs its program."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lingcluster.build import Builder, Programs, ProgramsUnavailableError
from lingcluster.helm import Helm
from lingcluster.modules import HELM, KUBERNETES

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs programs that are built on first use."""
    for item in items:
        if item.path.is_relative_to(HERE) and "helm" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session")
def chart_programs() -> Programs:
    """Helm and kubectl. Without them: skipped; with CI=true a failure."""
    try:
        return Builder(report=print).ensure((HELM, KUBERNETES))
    except ProgramsUnavailableError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"the chart cannot be rendered: {error}")
        pytest.skip(f"NOT TESTED: the chart cannot be rendered: {error}")


@pytest.fixture(scope="session")
def helm(chart_programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Helm without a cluster."""
    return Helm(chart_programs["helm"], home=tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="session")
def chart(repository: Path) -> Path:
    """The chart's folder."""
    return repository / "charts" / "ling-operator"
