"""TPU shapes: the table, both ways to name a slice, and what a wrong one is told."""

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ling_operator.api import TpuSlice
from ling_operator.tpu import GENERATIONS, slice_shape, topologies
from ling_trainer.schema import ConfigError

TABLE = [
    # generation's label, topology, XPK type, hosts, chips a host
    ("tpu-v4-podslice", "2x2x1", "v4-8", 1, 4),
    ("tpu-v4-podslice", "2x2x2", "v4-16", 2, 4),
    ("tpu-v4-podslice", "2x2x4", "v4-32", 4, 4),
    ("tpu-v4-podslice", "2x4x4", "v4-64", 8, 4),
    ("tpu-v4-podslice", "4x4x4", "v4-128", 16, 4),
    ("tpu-v4-podslice", "4x4x8", "v4-256", 32, 4),
    ("tpu-v4-podslice", "4x8x8", "v4-512", 64, 4),
    ("tpu-v4-podslice", "8x8x8", "v4-1024", 128, 4),
    ("tpu-v4-podslice", "8x8x16", "v4-2048", 256, 4),
    ("tpu-v5-lite-podslice", "1x1", "v5litepod-1", 1, 1),
    ("tpu-v5-lite-podslice", "2x2", "v5e-4", 1, 4),
    ("tpu-v5-lite-podslice", "2x4", "v5litepod-8", 2, 4),
    ("tpu-v5-lite-podslice", "4x4", "v5litepod-16", 4, 4),
    ("tpu-v5-lite-podslice", "4x8", "v5litepod-32", 8, 4),
    ("tpu-v5-lite-podslice", "8x8", "v5litepod-64", 16, 4),
    ("tpu-v5-lite-podslice", "8x16", "v5litepod-128", 32, 4),
    ("tpu-v5-lite-podslice", "16x16", "v5e-256", 64, 4),
    ("tpu-v5p-slice", "2x2x1", "v5p-8", 1, 4),
    ("tpu-v5p-slice", "2x2x4", "v5p-32", 4, 4),
    ("tpu-v5p-slice", "8x8x8", "v5p-1024", 128, 4),
    ("tpu-v5p-slice", "8x12x12", "v5p-2304", 288, 4),
    ("tpu-v6e-slice", "1x1", "v6e-1", 1, 1),
    ("tpu-v6e-slice", "2x2", "v6e-4", 1, 4),
    ("tpu-v6e-slice", "2x4", "v6e-8", 2, 4),
    ("tpu-v6e-slice", "4x4", "v6e-16", 4, 4),
    ("tpu-v6e-slice", "16x16", "v6e-256", 64, 4),
    ("tpu7x", "1x1x1", "tpu7x-2", 1, 1),
    ("tpu7x", "2x2x1", "tpu7x-8", 1, 4),
    ("tpu7x", "4x4x4", "tpu7x-128", 16, 4),
]


@pytest.mark.parametrize(("label", "topology", "name", "hosts", "chips"), TABLE)
def test_both_names_of_a_slice_mean_the_same_machines(
    label: str, topology: str, name: str, hosts: int, chips: int
) -> None:
    by_label = slice_shape(TpuSlice(accelerator=label, topology=topology))
    assert (by_label.hosts, by_label.chips_per_host) == (hosts, chips)
    assert by_label.node_selector == {
        "cloud.google.com/gke-tpu-accelerator": label,
        "cloud.google.com/gke-tpu-topology": topology,
    }
    assert slice_shape(TpuSlice(accelerator=name, topology=topology)) == by_label
    by_type = slice_shape(TpuSlice(accelerator=name))
    assert (by_type.hosts, by_type.chips_per_host, by_type.label) == (hosts, chips, label)


@pytest.mark.parametrize(
    ("slice_", "message"),
    [
        (
            {"accelerator": "tpu-v6e-slice", "topology": "2x8"},
            "spec.tpu.topology=2x8 is none of tpu-v6e-slice; near are 4x4, 2x4",
        ),
        (
            {"accelerator": "tpu-v5p-slice", "topology": "8x4x4"},
            "spec.tpu.topology=8x4x4 is none of tpu-v5p-slice; near are 4x4x8",
        ),
        ({"accelerator": "tpu-v5p-slice", "topology": "4x4"}, "near are 2x2x4"),
        ({"accelerator": "tpu-v5p-slice", "topology": "04x4x4"}, "is none of tpu-v5p-slice"),
        ({"accelerator": "tpu-v5p-slice", "topology": "0x4x4"}, "is none of tpu-v5p-slice"),
        ({"accelerator": "tpu-v5p-slice", "topology": "24x24x24"}, "is none of tpu-v5p-slice"),
        (
            {"accelerator": "tpu-v6e-slice"},
            "spec.tpu.topology is not set; accelerator tpu-v6e-slice comes in 1x1, 2x2, 2x4",
        ),
        ({"accelerator": "v5p-24"}, "is no size of v5p; near are v5p-8, v5p-16, v5p-32"),
        ({"accelerator": "v5p-7"}, "is no size of v5p"),
        ({"accelerator": "v5p-2x2x3"}, "spec.tpu.topology=2x2x3 is none of tpu-v5p-slice; near"),
        (
            {"accelerator": "v4-768"},
            "spec.tpu.accelerator=v4-768 comes as 4x8x12, 4x4x24; set spec.tpu.topology",
        ),
        (
            {"accelerator": "v5p-2x2x2", "topology": "2x2x4"},
            "has 16 chips, accelerator v5p-2x2x2 has 8; use 2x2x2, or leave topology out",
        ),
        (
            {"accelerator": "v5p-32", "parallelContainers": 2},
            "spec.tpu.parallelContainers=2: a host of tpu-v5p-slice 2x2x4 runs one container",
        ),
        ({"accelerator": "tpu7x-2", "parallelContainers": 2}, "two are for tpu7x hosts of 4"),
        (
            {"accelerator": "v5p-32", "topology": "2x4x4"},
            "has 32 chips, accelerator v5p-32 has 16; use 2x2x4, or leave topology out",
        ),
        ({"accelerator": "tpu-v5-slice", "topology": "2x2x1"}, "did you mean tpu-v5p-slice?"),
        ({"accelerator": "H100"}, "is not known; use one of v4-N"),
    ],
)
def test_a_slice_that_does_not_exist_is_answered_with_near_ones(
    slice_: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        slice_shape(TpuSlice.model_validate(slice_))
    assert message in str(refused.value)


def test_v4_takes_its_axes_in_any_order_and_v5p_only_ascending() -> None:
    assert slice_shape(TpuSlice(accelerator="tpu-v4-podslice", topology="8x4x4")).hosts == 32
    with pytest.raises(ConfigError):
        slice_shape(TpuSlice(accelerator="tpu-v5p-slice", topology="8x4x4"))


def golden(kind: str, repository: Path) -> list[list[str]]:
    lines = (repository / "tests/golden/xpk/shapes.txt").read_text().splitlines()
    found = [words[1:] for words in map(str.split, lines) if words[0] == kind]
    assert len(found) > 300
    return found


def test_every_slice_that_xpk_knows_has_the_hosts_and_chips_that_xpk_gives_it(
    repository: Path,
) -> None:
    names = {generation.label: generation.name for generation in GENERATIONS}
    for label, topology, *numbers in golden("slice", repository):
        hosts, chips, containers = map(int, numbers)
        for accelerator in (label, f"{names[label]}-{topology}"):
            tpu = TpuSlice(accelerator=accelerator, topology=topology)
            tpu = tpu.model_copy(update={"parallel_containers": containers})
            shape = slice_shape(tpu)
            assert (shape.label, shape.topology) == (label, topology)
            assert (shape.hosts, shape.chips_per_host) == (hosts, chips), topology
    known = {(label, topology) for label, topology, *_ in golden("slice", repository)}
    ours = {(g.label, t) for g in GENERATIONS for t in topologies(g)}
    of_gke = {("tpu-v5-lite-podslice", "1x1"), ("tpu-v5-lite-podslice", "2x2")}
    assert ours - known == of_gke, "single hosts, which GKE has and xpk does not offer"


def test_a_type_means_the_topology_that_xpk_takes_or_the_user_is_asked(repository: Path) -> None:
    asked = 0
    for name, topology in golden("type", repository):
        taken = answer = ""
        try:
            taken = slice_shape(TpuSlice(accelerator=name)).topology
        except ConfigError as refused:
            answer = str(refused)
            asked += 1
        assert taken == topology or "set spec.tpu.topology" in answer
        shape = slice_shape(TpuSlice(accelerator=name, topology=topology))
        assert not answer or shape.hosts >= 96, "small sizes have one usual topology"
    assert asked == 87


@pytest.mark.parametrize("generation", GENERATIONS, ids=lambda g: g.name)
def test_every_listed_topology_is_valid_and_its_hosts_hold_all_its_chips(generation: Any) -> None:
    for topology in topologies(generation):
        shape = slice_shape(TpuSlice(accelerator=generation.label, topology=topology))
        chips = math.prod(int(axis) for axis in topology.split("x"))
        assert shape.hosts * shape.chips_per_host == chips


@given(st.from_regex(r"[0-9]{1,3}x[0-9]{1,3}(x[0-9]{1,3})?", fullmatch=True))
@settings(deadline=None)
def test_any_topology_is_either_a_shape_or_a_message(topology: str) -> None:
    for generation in GENERATIONS:
        tpu = TpuSlice(accelerator=generation.label, topology=topology)
        message = ""
        try:
            assert slice_shape(tpu).topology == topology
        except ConfigError as refused:
            message = str(refused)
        assert not message or "near are" in message
