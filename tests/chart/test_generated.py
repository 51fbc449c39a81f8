"""What `make manifests` writes into the chart is what is there."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from lingcluster.client import load_manifests
from lingcluster.helm import Helm, of_kind


@pytest.fixture(scope="module")
def chart_files(repository: Path) -> ModuleType:
    """The script that writes them."""
    spec = importlib.util.spec_from_file_location(
        "chart_files", repository / "scripts" / "chart_files.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_files_are_what_the_script_writes(chart_files: ModuleType) -> None:
    stale = [path for path, text in chart_files.contents().items() if path.read_text() != text]
    assert stale == [], "run `make manifests`"


def test_the_rendered_crd_is_the_manifest_and_only_its_metadata_are_helms(
    helm: Helm, repository: Path
) -> None:
    objects = helm.template("--set", "image.repository=r/ling-operator")
    (rendered,) = of_kind(objects, "CustomResourceDefinition")
    (manifest,) = load_manifests(repository / "manifests" / "crd" / "trainingruns.yaml")
    assert rendered["metadata"].keys() == {"name", "annotations", "labels"}
    rendered["metadata"] = {"name": rendered["metadata"]["name"]}
    assert rendered == manifest


def test_a_setting_without_a_description_is_refused(chart_files: ModuleType) -> None:
    good = "a:\n  # -- What it is.\n  # Two lines.\n  b: 1\n"
    (row,) = chart_files.settings(good)
    assert (row.path, row.default, row.text) == ("a.b", 1, "What it is. Two lines.")
    with pytest.raises(ValueError, match=r"a\.c has no description"):
        chart_files.settings(good + "  c: 2\n")


def test_a_crd_that_helm_would_take_for_a_template_is_refused(chart_files: ModuleType) -> None:
    with pytest.raises(ValueError, match="reword"):
        chart_files.crd_template("metadata:\n  name: x\ntext: '{{ x }}'\n")
