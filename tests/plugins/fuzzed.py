"""Specs and metric pages as users, other trainers and accidents write them, from a seed.

A spec begins as one that can run, with random parts; then none to three things are done to it
that should not be. A page begins as a trainer's, and goes wrong in the same way.
"""

import copy
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ling_trainer import health_metrics as series

SEED = 20261130
COUNT = 10_000
type Node = dict[str, Any]

_ODD: tuple[Any, ...] = (
    None, True, 0, -1, 1, 2**31, 2**63, 2**70, 0.5, 1e308, float("nan"), float("inf"), "", " ",
    "0",
    "x", "a b", "-", "NaN", "\x00", "\ud83d\ude00", "ä" * 70, "y" * 300, "$(POD_IP)", "../..", [],
    {}, [None], [[]], [{}], {"": None}, {"name": None}, {"name": []}, {"a": {"b": {"c": []}}},
    "8Gi", "1e3", "2026-11-30",
)  # fmt: skip
_TYPES = (
    "v4-8", "v4-64", "v5litepod-16", "v5e-256", "v5p-8", "v5p-128", "v5p-2x2x4", "v6e-1", "v6e-16",
    "tpu7x-2", "tpu7x-16",
)  # fmt: skip
_NO_TYPES = (
    "v4-768",
    "tpu7x-12544",
    "v9-8",
    "v5p-7",
    "H100",
    "v5p-4x4",
    "v5p-99999999",
    "-",
    "v4",
)
_SHAPES = (
    ("tpu-v4-podslice", "8x4x4"), ("tpu-v5-lite-podslice", "4x4"), ("tpu-v5p-slice", "2x2x4"),
    ("tpu-v6e-slice", "16x16"), ("tpu7x", "4x4x4"), ("tpu7x", "2x2x2"),
)  # fmt: skip
_TOPOLOGIES = ("1x1", "2x2", "2x4", "16x16", "2x2x1", "4x4x4", "8x4x4", "0x0", "3", "9999999x9999")
_RULES = (
    "nonFinite", "lossSpike", "gradNormSpike", "numZeros", "totalWeights", "zeroLoss", "stall",
    "straggler", "metricsMissing",
)  # fmt: skip


def specs(seed: int = SEED, count: int = COUNT) -> Iterator[Node]:
    """Yield objects as their users might write them."""
    for number in range(count):
        source = random.Random(f"{seed}/{number}")
        spec = _spec(source)
        for _ in range(source.choice((0, 0, 0, 0, 0, 1, 1, 2, 3))):
            _spoil(spec, source)
        yield {
            "apiVersion": "ling.primatrix.io/v1alpha1",
            "kind": "TrainingRun",
            "metadata": {
                "name": _name(source, number),
                "namespace": "default",
                "uid": f"uid-{number}",
                "resourceVersion": "1",
                "generation": 1,
            },
            "spec": spec,
        }


def pages(seed: int = SEED, count: int = COUNT) -> Iterator[bytes]:
    """Yield pages of metrics, one after the other as one trainer might serve them."""
    step = 0
    for number in range(count):
        source = random.Random(f"{seed}/page/{number}")
        step = max(step + source.choice((0, 1, 1, 1, 5, -3)), 0)
        lines = [*_page(source, step)]
        for _ in range(source.choice((0, 0, 1, 1, 3, 8))):
            _spoil_line(lines, source)
        page = "\n".join(lines).encode("utf-8", "surrogatepass") + source.choice((b"\n", b""))
        if source.random() < 0.05:
            at = source.randrange(len(page) + 1)
            page = page[:at] + source.randbytes(source.randrange(40)) + page[at:]
        yield page


def _name(source: random.Random, number: int) -> str:
    if source.random() < 0.9:
        return f"run-{number}"
    return source.choice(("a", "r" * 43, "r" * 44, "r" * 253, "1st", "a.b", "A", "a-", "ä", ""))


def _some[T](source: random.Random, make: Callable[[random.Random], T], chance: float) -> list[T]:
    return [make(source) for _ in range(2) if source.random() < chance]


def _spec(source: random.Random) -> Node:
    spec: Node = {"image": source.choice(("ling-trainer:1", "a.example/b/c@sha256:" + "0" * 64))}
    spec |= _place(source)
    if source.random() < 0.15:
        spec |= {"command": ["train"], "args": source.choice(([], ["--x", "$(POD_IP)"]))}
    else:
        spec["run"] = _settings(source)
    if source.random() < 0.3:
        spec["queue"] = source.choice(("multislice-queue", "team"))
    if source.random() < 0.2:
        spec |= {"restarts": source.randrange(20), "attempt": source.randrange(1, 5)}
    if source.random() < 0.05:
        spec["suspend"] = source.choice((True, False))
    if source.random() < 0.4:
        spec["health"] = _health(source)
    if source.random() < 0.6:
        spec["template"] = _template(source)
    return spec


def _place(source: random.Random) -> Node:
    draw = source.random()
    if draw < 0.4:
        return {"cpu": {"processes": source.choice((1, 2, 10, 11, 1024))}}
    if draw < 0.7:
        tpu: Node = {"accelerator": source.choice(_TYPES)}
    elif draw < 0.78:
        tpu = {"accelerator": source.choice(_NO_TYPES)}
    else:
        label, topology = source.choice(_SHAPES)
        tpu = {"accelerator": label, "topology": topology}
        if draw > 0.95:
            tpu["topology"] = source.choice(_TOPOLOGIES)
    if source.random() < 0.3:
        tpu["slices"] = source.choice((1, 2, 16, 1024))
    if source.random() < 0.15:
        tpu["parallelContainers"] = source.choice((1, 2))
    return {"tpu": tpu}


def _settings(source: random.Random) -> Node:
    settings: Node = {
        "preset": source.choice(("ling2_tiny", "ling2")),
        "datasetType": "synthetic",
        "baseOutputDirectory": source.choice(("gs://bucket/runs", "runs/$(LING_RUN)", "/data")),
        "steps": source.choice((1, 100, 100_000)),
    }
    if source.random() < 0.3:
        settings["optimizer"] = {"learningRate": source.choice((3.36e-4, 0.1))}
    if source.random() < 0.2:
        settings["metrics"] = {"metricsPort": source.choice((9464, 9000, 1024, 65535, 8476, 0))}
    return settings


def _health(source: random.Random) -> Node:
    health: Node = {"scrapeIntervalSeconds": source.choice((1, 5, 3600))}
    for rule in _RULES:
        if source.random() < 0.2:
            health[rule] = {"action": source.choice(("Halt", "Alert", "Ignore"))}
    if source.random() < 0.2:
        health["trainerStops"] = source.choice((True, False))
    return health


def _template(source: random.Random) -> Node:
    volumes = [
        ({"name": "data", "emptyDir": {}}, {"name": "data", "mountPath": "/data"}),
        (
            {"name": "own", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}},
            {"name": "own", "mountPath": "/dev/shm"},
        ),
        (
            {"name": "bucket", "csi": {"driver": "gcsfuse.csi.storage.gke.io", "readOnly": True}},
            {"name": "bucket", "mountPath": "/models", "readOnly": True},
        ),
    ]
    chosen = [pair for pair in volumes if source.random() < 0.3]
    parts: Node = {
        "env": _some(source, _variable, 0.4),
        "resources": source.choice(
            ({}, {"requests": {"cpu": "4"}}, {"limits": {"memory": "8Gi"}})
        ),
        "volumes": [volume for volume, _ in chosen],
        "volumeMounts": [mount for _, mount in chosen],
        "hostNetwork": source.choice((True, False)),
        "privileged": source.choice((True, False)),
        "terminationGracePeriodSeconds": source.choice((1, 30, 300)),
        "imagePullPolicy": source.choice(("Always", "IfNotPresent", "Never")),
        "imagePullSecrets": [{"name": "pull"}],
        "labels": source.choice(({"team": "ling"}, {"kueue.x-k8s.io/priority-class": "high"})),
        "annotations": source.choice(
            ({"gke-gcsfuse/volumes": "true"}, {"alpha.jobset.sigs.k8s.io/exclusive-topology": ""})
        ),
        "tolerations": [
            {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true"}
        ],
        "priorityClassName": source.choice(("very-low", "medium", "very-high")),
        "nodeSelector": {"cloud.google.com/reservation-name": "ling"},
        "initContainers": [{"name": "fetch", "image": "fetch:1", "command": ["true"]}],
        "sidecars": [{"name": "logs", "image": "logs:1"}],
        "serviceAccountName": "trainer",
        "ttlSecondsAfterFinished": source.choice((0, 43200)),
    }
    return {key: value for key, value in parts.items() if source.random() < 0.3}


def _variable(source: random.Random) -> Node:
    name = source.choice(("JAX_PLATFORMS", "XLA_FLAGS", "LING_ALLOW_FAULT_INJECTION", "A", "B"))
    if source.random() < 0.8:
        return {"name": name, "value": source.choice(("", "1", "$(POD_IP)"))}
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}


def _spoil(spec: Node, source: random.Random) -> None:
    """Do one thing to a spec that should not be done."""
    node, key = _somewhere(spec, source)
    match source.randrange(7):
        case 0:
            node.pop(key, None)
        case 1:
            node[source.choice(("stepz", "imagee", "", "name", "x" * 80))] = source.choice(_ODD)
        case 2:
            node[key] = [node[key]]
        case 3 if isinstance(node[key], list):
            node[key] = node[key] * 2
        case 4 if isinstance(node[key], str):
            node[key] = node[key] + source.choice((" ", "\n", "X", "-", "é", "\x07"))
        case 5:
            field = source.choice(
                ("watch", "cpu", "tpu", "queue", "command", "template", "health")
            )
            spec[field] = source.choice(_ODD)
        case _:
            node[key] = copy.deepcopy(source.choice(_ODD))


def _somewhere(spec: Node, source: random.Random) -> tuple[Any, Any]:
    """Return a container within the spec, and a key of it."""
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        pairs: Sequence[tuple[Any, Any]] = ()
        if isinstance(node, dict):
            pairs = [*node.items()]
        for key, value in pairs:
            places.append((node, key))
            walk(value)
            if isinstance(value, list):
                for item in value:
                    walk(item)

    walk(spec)
    return source.choice(places) if places else (spec, "image")


def _page(source: random.Random, step: int) -> Iterator[str]:
    labels = 'run="r",run_namespace="ns"'
    bad = source.random() < 0.1
    for metric in series.ALL:
        if metric.optional and source.random() < 0.5:
            continue
        value = source.choice((0.0, 1.0, source.random(), source.gauss(3, 1)))
        extra = "".join(f',{label}="{_label(label, source)}"' for label in metric.labels)
        yield f"# TYPE {metric.name} {metric.kind}"
        text = {series.STEP.name: str(step), series.LOSS.name: "NaN" if bad else f"{value}"}
        yield f"{metric.name}{{{labels}{extra}}} {text.get(metric.name, value)}"


def _label(name: str, source: random.Random) -> str:
    uid = "pod-0" if source.random() < 0.97 else "pod-1"
    return {"pod_uid": uid, "kind": "nan", "signal": "NonFiniteLoss"}.get(name, "x")


def _spoil_line(lines: list[str], source: random.Random) -> None:
    at = source.randrange(len(lines))
    line = lines[at]
    names = [metric.name for metric in series.ALL]
    numbers = ("NaN", "+Inf", "-Inf", "-1", "1e308", "1e-320", "9" * 400, "0x1p3", "1_0", "", "x")
    match source.randrange(6):
        case 0:
            del lines[at]
            if not lines:
                lines.append("")
        case 1:
            lines[at] = f"{line.rpartition(' ')[0]} {source.choice(numbers)}"
        case 2:
            cut = source.randrange(len(line) + 1)
            lines[at] = line[:cut]
        case 3:
            cut = source.randrange(len(line) + 1)
            lines[at] = line[:cut] + source.choice(('"', "{", "}", "\\", ",", "\x00", "é", "\r"))
            lines[at] += line[cut:]
        case 4:
            lines.append(f"{source.choice(names)} {source.choice(numbers)}")
        case _:
            lines.append(f'{source.choice(names)}{{kind="{source.choice(numbers)}"}} {math.pi}')
