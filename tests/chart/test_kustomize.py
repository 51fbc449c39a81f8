"""manifests/operator and the chart's defaults are the same installation."""

from __future__ import annotations

import copy
import subprocess
from pathlib import Path

import pytest
import yaml

from lingcluster.build import Programs
from lingcluster.client import Manifest
from lingcluster.helm import Helm

# What differs on purpose.
HELM_LABELS = {
    "app.kubernetes.io/instance",
    "app.kubernetes.io/version",
    "app.kubernetes.io/managed-by",
    "helm.sh/chart",
}
ONLY_KUSTOMIZE = {("Namespace", "ling-system")}  # Helm's is made by --create-namespace
ONLY_CHART = {
    ("CustomResourceDefinition", "trainingruns.ling.primatrix.io"),  # manifests/crd
    ("Pod", "ling-operator-test"),  # the hook of `helm test`
}
IMAGE = "ling-operator:dev"  # a placeholder in both

type Identity = tuple[str, str]


def without_helms_labels(node: object) -> object:
    """Remove the labels that only Helm writes, from selectors too."""
    if isinstance(node, dict):
        return {k: without_helms_labels(v) for k, v in node.items() if k not in HELM_LABELS}
    if isinstance(node, list):
        return [without_helms_labels(each) for each in node]
    return node


def by_identity(objects: list[Manifest]) -> dict[Identity, object]:
    return {
        (each["kind"], each["metadata"]["name"]): without_helms_labels(copy.deepcopy(each))
        for each in objects
    }


@pytest.fixture
def kustomized(chart_programs: Programs, repository: Path) -> dict[Identity, object]:
    """What `kubectl apply -k manifests/operator` applies."""
    done = subprocess.run(
        [chart_programs["kubectl"], "kustomize", repository / "manifests" / "operator"],
        check=True,
        capture_output=True,
        text=True,
    )
    return by_identity([each for each in yaml.safe_load_all(done.stdout) if each])


def test_both_ways_install_the_same_objects(
    helm: Helm, kustomized: dict[Identity, object]
) -> None:
    repository, _, tag = IMAGE.partition(":")
    rendered = by_identity(
        helm.template("--set", f"image.repository={repository},image.tag={tag}")
    )
    assert kustomized.keys() - rendered.keys() == ONLY_KUSTOMIZE
    assert rendered.keys() - kustomized.keys() == ONLY_CHART
    for identity in kustomized.keys() & rendered.keys():
        assert kustomized[identity] == rendered[identity], identity
