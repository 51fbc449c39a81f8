"""The flows that the operator needs, and some that it does not, against the rendered policy.

Nothing here enforces a policy: this evaluates it by the rules of the NetworkPolicy API. Whether a
cluster's network plugin does the same, above all for pods on the host network, is not shown.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lingcluster.client import Manifest
from lingcluster.helm import Helm, of_kind

VALUES = Path(__file__).parent / "values"
NAME_LABEL = "kubernetes.io/metadata.name"


@dataclass(frozen=True)
class Peer:
    """The other end of a flow. On the host network labels are nothing: it is its node."""

    address: str
    namespace: str = ""
    labels: Mapping[str, str] = field(default_factory=dict[str, str])


SERVICE = Peer("10.96.0.1")
CONTROL_PLANE = Peer("172.16.0.2")
KUBE_DNS = Peer("10.4.0.9", "kube-system", {"k8s-app": "kube-dns"})
NODE_DNS = Peer("169.254.20.10")
NODE = Peer("10.128.0.7")
TRAINER = Peer("10.4.3.5", "team-a", {"jobset.sigs.k8s.io/jobset-name": "ling2"})
OTHERS_TRAINER = Peer("10.4.3.6", "team-b", {"jobset.sigs.k8s.io/jobset-name": "x"})
WEB = Peer("10.4.8.8", "shop", {"app": "web"})
PROMETHEUS = Peer("10.4.1.1", "monitoring", {"app": "prometheus"})

# flow, values file -> allowed
EGRESS = [
    (SERVICE, 443, "TCP", {"gke": True, "everything": True, "one-namespace": True}),
    (CONTROL_PLANE, 443, "TCP", {"gke": True, "everything": True, "one-namespace": True}),
    (CONTROL_PLANE, 6443, "TCP", {"gke": True, "everything": True, "one-namespace": True}),
    (KUBE_DNS, 53, "UDP", {"gke": True, "everything": True, "one-namespace": True}),
    (KUBE_DNS, 53, "TCP", {"gke": True, "everything": True, "one-namespace": True}),
    (NODE_DNS, 53, "UDP", {"gke": True, "everything": True, "one-namespace": True}),
    (TRAINER, 9464, "TCP", {"gke": True, "everything": True, "one-namespace": True}),
    (TRAINER, 9465, "TCP", {"gke": True, "everything": True, "one-namespace": True}),
    (NODE, 9464, "TCP", {"gke": True, "everything": True, "one-namespace": True}),
    (NODE, 9465, "TCP", {"gke": True, "everything": True, "one-namespace": True}),
    (TRAINER, 9467, "TCP", {"gke": True, "everything": False, "one-namespace": False}),
    (TRAINER, 8476, "TCP", {"gke": False, "everything": False, "one-namespace": False}),
    (TRAINER, 9464, "UDP", {"gke": False, "everything": False, "one-namespace": False}),
    (NODE, 10250, "TCP", {"gke": False, "everything": False, "one-namespace": False}),
    (WEB, 9464, "TCP", {"gke": False}),  # elsewhere 0.0.0.0/0 takes it in, said in values.yaml
    (WEB, 80, "TCP", {"gke": False, "everything": False, "one-namespace": False}),
    (Peer("169.254.169.254"), 80, "TCP", {"gke": False, "everything": False}),
]
INGRESS = [
    (PROMETHEUS, 8080, {"gke": True, "everything": True, "one-namespace": True}),
    (WEB, 8080, {"gke": True, "everything": False, "one-namespace": True}),
    (NODE, 8081, {"gke": True, "everything": True, "one-namespace": True}),
    (WEB, 22, {"gke": False, "everything": False, "one-namespace": False}),
]


def allows(policy: Manifest, direction: str, peer: Peer, port: int, protocol: str) -> bool:
    """Evaluate a policy for one flow of a pod that it selects."""
    assert direction.capitalize() in policy["spec"]["policyTypes"]
    peers = {"egress": "to", "ingress": "from"}[direction]
    return any(
        _port_matches(rule.get("ports"), port, protocol)
        and (not rule.get(peers) or any(_peer_matches(each, peer) for each in rule[peers]))
        for rule in policy["spec"].get(direction, [])
    )


def _port_matches(ports: list[dict[str, Any]] | None, port: int, protocol: str) -> bool:
    return not ports or any(
        each.get("protocol", "TCP") == protocol
        and each["port"] <= port <= each.get("endPort", each["port"])
        for each in ports
    )


def _peer_matches(rule: dict[str, Any], peer: Peer) -> bool:
    if "ipBlock" in rule:
        return ipaddress.ip_address(peer.address) in ipaddress.ip_network(rule["ipBlock"]["cidr"])
    if not peer.namespace:
        return False
    namespace = {NAME_LABEL: peer.namespace}
    return _selects(rule.get("namespaceSelector", {}), namespace) and _selects(
        rule.get("podSelector", {}), peer.labels
    )


def _selects(selector: dict[str, Any], labels: Mapping[str, str]) -> bool:
    for expression in selector.get("matchExpressions", []):
        value = labels.get(expression["key"])
        if expression["operator"] == "In" and value not in expression["values"]:
            return False
        assert expression["operator"] in {"In", "Exists"}
        if value is None:
            return False
    return selector.get("matchLabels", {}).items() <= labels.items()


@pytest.fixture(scope="module", params=["gke", "everything", "one-namespace"])
def rendered(request: pytest.FixtureRequest, helm: Helm) -> tuple[str, Manifest]:
    """A values file's name, and its policy."""
    objects = helm.template("--values", VALUES / f"{request.param}.yaml")
    (policy,) = of_kind(objects, "NetworkPolicy")
    return request.param, policy


def test_the_operator_reaches_what_it_needs_and_nothing_else(
    rendered: tuple[str, Manifest],
) -> None:
    values, policy = rendered
    wrong = [
        (peer.address, port, protocol)
        for peer, port, protocol, expected in EGRESS
        if values in expected
        and allows(policy, "egress", peer, port, protocol) != expected[values]
    ]
    assert wrong == []


def test_metrics_and_probes_are_reached_and_nothing_else(
    rendered: tuple[str, Manifest],
) -> None:
    values, policy = rendered
    wrong = [
        (peer.address, port)
        for peer, port, expected in INGRESS
        if allows(policy, "ingress", peer, port, "TCP") != expected[values]
    ]
    assert wrong == []


@pytest.mark.parametrize("values", ["one-namespace", "two-namespaces"])
def test_with_nodes_addresses_given_a_release_reads_no_trainers_but_of_its_namespaces(
    helm: Helm, values: str
) -> None:
    nodes = ("--set", "networkPolicy.trainers.cidrs={10.128.0.0/20}")
    objects = helm.template("--values", VALUES / f"{values}.yaml", *nodes)
    (policy,) = of_kind(objects, "NetworkPolicy")
    assert allows(policy, "egress", TRAINER, 9464, "TCP")
    both = values == "two-namespaces"
    assert allows(policy, "egress", OTHERS_TRAINER, 9464, "TCP") == both
    for peer in (TRAINER, OTHERS_TRAINER):
        elsewhere = Peer(peer.address, "team-c", peer.labels)
        assert not allows(policy, "egress", elsewhere, 9464, "TCP")


def test_by_default_there_is_no_policy(helm: Helm) -> None:
    assert of_kind(helm.template("--values", VALUES / "minimal.yaml"), "NetworkPolicy") == []
