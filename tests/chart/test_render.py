"""Every values file renders to objects that belong together, pass lint and obey the restricted
pod security standard."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lingcluster.client import Manifest
from lingcluster.helm import Helm, HelmError, of_kind

VALUES = sorted((Path(__file__).parent / "values").glob("*.yaml"))
CLUSTER_SCOPED = {
    "ClusterRole",
    "ClusterRoleBinding",
    "CustomResourceDefinition",
    "ClusterPodMonitoring",
    "ClusterRules",
}
IMAGE = ("--set", "image.repository=r/ling-operator")


@pytest.fixture(params=VALUES, ids=lambda path: path.stem)
def values(request: pytest.FixtureRequest) -> Path:
    """One values file."""
    return request.param


@pytest.fixture
def objects(helm: Helm, values: Path) -> list[Manifest]:
    """What the chart makes of it."""
    return helm.template("--values", values)


def deployment(objects: list[Manifest]) -> Manifest:
    (found,) = of_kind(objects, "Deployment")
    return found


def pod_template(objects: list[Manifest]) -> dict[str, Any]:
    return deployment(objects)["spec"]["template"]


def test_lint_finds_nothing(helm: Helm, chart: Path, values: Path) -> None:
    printed = helm("lint", "--strict", chart, "--values", values)
    assert "0 chart(s) failed" in printed
    assert not re.search(r"WARN|ERROR", printed), printed


def test_each_object_is_there_once_with_our_labels_and_a_namespace_where_it_has_one(
    objects: list[Manifest], values: Path
) -> None:
    identities = Counter(
        (each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"])
        for each in objects
    )
    assert [identity for identity, count in identities.items() if count > 1] == []
    for kind, namespace, name in identities:
        assert (namespace is None) == (kind in CLUSTER_SCOPED), (kind, name)
        assert len(name) <= 63
    for each in objects:
        labels = each["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == "ling-operator"
        assert labels["helm.sh/chart"].startswith("ling-operator-")
        assert (values.stem == "everything") == (labels.get("team") == "pretraining")


def test_selectors_select_the_operators_pods_and_not_the_tests(objects: list[Manifest]) -> None:
    labels = pod_template(objects)["metadata"]["labels"]
    selectors = [
        deployment(objects)["spec"]["selector"]["matchLabels"],
        *(
            constraint["labelSelector"]["matchLabels"]
            for constraint in pod_template(objects)["spec"].get("topologySpreadConstraints", [])
        ),
        *(
            each["spec"]["selector"]["matchLabels"]
            for each in of_kind(objects, "PodDisruptionBudget")
        ),
        *(
            each["spec"]["podSelector"]["matchLabels"]
            for each in of_kind(objects, "NetworkPolicy")
        ),
        *(
            each["spec"]["selector"]["matchLabels"]
            for each in objects
            if each["kind"] in {"PodMonitor", "PodMonitoring"}
            and "matchLabels" in each["spec"]["selector"]
        ),
    ]
    test_pods = [each["metadata"]["labels"] for each in of_kind(objects, "Pod")]
    for selector in selectors:
        assert selector.items() <= labels.items()
        assert not any(selector.items() <= each.items() for each in test_pods)


def test_pods_meet_the_restricted_pod_security_standard(objects: list[Manifest]) -> None:
    for spec in (
        pod_template(objects)["spec"],
        *(each["spec"] for each in of_kind(objects, "Pod")),
    ):
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC", "volumes"} & spec.keys()
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert context["readOnlyRootFilesystem"] is True
            assert container["resources"]["limits"]["memory"]


def test_the_image_is_pinned_and_no_tag_is_latest(objects: list[Manifest], values: Path) -> None:
    (container,) = pod_template(objects)["spec"]["containers"]
    tags = {"one-namespace": ":0.1.0-rc.1", "gke": "@sha256:0123456789abcdef"}
    assert tags.get(values.stem, ":0.1.0") in container["image"]
    assert {each["spec"]["containers"][0]["image"] for each in of_kind(objects, "Pod")} <= {
        container["image"]
    }


def test_bindings_give_existing_roles_to_the_account_that_the_pods_use(
    objects: list[Manifest],
) -> None:
    account = pod_template(objects)["spec"]["serviceAccountName"]
    roles = {
        (each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"])
        for each in objects
        if each["kind"] in {"Role", "ClusterRole"}
    }
    for binding in (*of_kind(objects, "RoleBinding"), *of_kind(objects, "ClusterRoleBinding")):
        reference, metadata = binding["roleRef"], binding["metadata"]
        assert (reference["kind"], metadata.get("namespace"), reference["name"]) in roles
        (subject,) = binding["subjects"]
        assert (subject["name"], subject["namespace"]) == (account, "ling-system")


def test_each_namespace_watched_has_the_cluster_roles_rights_and_is_told_to_the_operator(
    helm: Helm,
) -> None:
    two = helm.template(*IMAGE, "--set", "watchNamespaces={team-a,team-b},rbac.userRoles=false")
    assert not {"ClusterRole", "ClusterRoleBinding"} & {each["kind"] for each in two}
    (everywhere,) = (
        each
        for each in of_kind(helm.template(*IMAGE), "ClusterRole")
        if each["metadata"]["name"] == "ling-operator"
    )
    roles = {
        each["metadata"]["namespace"]: each["rules"]
        for each in of_kind(two, "Role")
        if each["metadata"]["name"] == "ling-operator"
    }
    assert roles == dict.fromkeys(("team-a", "team-b"), everywhere["rules"])
    bound = Counter(each["metadata"]["namespace"] for each in of_kind(two, "RoleBinding"))
    assert bound == {"team-a": 1, "team-b": 1, "ling-system": 1}
    (container,) = pod_template(two)["spec"]["containers"]
    flags = [word for word in container["args"] if word.startswith("--namespace")]
    assert flags == ["--namespace=team-a", "--namespace=team-b"]
    (test,) = of_kind(two, "Pod")
    assert test["spec"]["containers"][0]["args"][1:] == [
        "ling-system/ling-operator",
        "team-a",
        "team-b",
    ]


def test_one_namespace_needs_no_cluster_role_and_is_told_to_the_operator(helm: Helm) -> None:
    objects = helm.template("--values", Path(__file__).parent / "values" / "one-namespace.yaml")
    assert not {"ClusterRole", "ClusterRoleBinding"} & {each["kind"] for each in objects}
    roles = {each["metadata"]["namespace"] for each in of_kind(objects, "Role")}
    assert roles == {"team-a", "ling-system"}
    (container,) = pod_template(objects)["spec"]["containers"]
    assert "--namespace=team-a" in container["args"]
    assert of_kind(objects, "PodDisruptionBudget") == []  # of one replica it would block drains


def test_the_crd_is_kept_unless_its_deletion_is_accepted(helm: Helm) -> None:
    (kept,) = of_kind(helm.template(*IMAGE), "CustomResourceDefinition")
    assert kept["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    with pytest.raises(HelmError, match=r"crds\.iAcceptDeletion=true") as refusal:
        helm.template(*IMAGE, "--set", "crds.keep=false")
    assert "every TrainingRun of the cluster" in str(refusal.value)
    accepted = ("--set", "crds.keep=false,crds.iAcceptDeletion=true")
    (deleted,) = of_kind(helm.template(*IMAGE, *accepted), "CustomResourceDefinition")
    assert "annotations" not in deleted["metadata"]
    assert (
        of_kind(helm.template(*IMAGE, "--set", "crds.enabled=false"), "CustomResourceDefinition")
        == []
    )


def test_two_releases_of_one_namespace_lead_apart(helm: Helm) -> None:
    leases = {
        word
        for release in ("a", "b")
        for word in pod_template(helm.template(*IMAGE, release=release))["spec"]["containers"][0][
            "args"
        ]
        if word.startswith("--leader-election-lease=")
    }
    assert leases == {
        "--leader-election-lease=a-ling-operator",
        "--leader-election-lease=b-ling-operator",
    }
    for role in of_kind(helm.template(*IMAGE, release="a"), "Role"):
        assert role["rules"][1]["resourceNames"] == ["a-ling-operator"]


def test_notes_say_what_to_do_next(helm: Helm, chart: Path, values: Path) -> None:
    printed = helm(
        "install", "ling-operator", chart, "--dry-run=client", "-n", "x", "--values", values
    )
    notes = printed.partition("NOTES:")[2]
    assert "kubectl -n x rollout status deployment/" in notes
    assert ("helm test" in notes) == (values.stem != "bare")
    assert ("DELETES every TrainingRun" in notes) == (values.stem == "everything")
    scraped = values.stem in {"everything", "gke", "one-namespace", "two-namespaces"}
    assert ("no alert can fire" in notes) != scraped
    watched = {"one-namespace": "team-a", "two-namespaces": "team-a, team-b"}
    assert f"it watches {watched.get(values.stem, 'all namespaces')}." in notes


def test_old_clusters_are_refused_and_gkes_versions_are_not(helm: Helm) -> None:
    with pytest.raises(HelmError, match=r"requires kubeVersion: >=1\.29\.0-0"):
        helm.template(*IMAGE, "--kube-version", "1.28.9")
    assert helm.template(*IMAGE, "--kube-version", "1.33.4-gke.1172000")
