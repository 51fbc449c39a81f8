"""TPU shapes: accelerator and topology -> hosts, chips a host, node selectors. A table, no I/O.

Source: xpk 1.16.0 src/xpk/core/system_characteristics.py and GKE's "Plan TPUs in GKE". All that
xpk knows of these generations is in tests/golden/xpk, and compared.
"""

import difflib
import functools
import math
import re
from collections.abc import Container
from dataclasses import dataclass

from ling_operator.api import TpuSlice
from ling_trainer.schema import ConfigError

_CUBE = 64
_LONGEST_AXIS = 256
_CHIPS_PER_HOST = 4
_SMALL_3D = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One generation of TPU.

    Attributes:
      name: as in an XPK type, before the dash.
      label: value of cloud.google.com/gke-tpu-accelerator.
      units_per_chip: cores (2) or chips (1) that the number of an XPK type counts.
      flat: topologies with two axes; empty for a generation with three.
      max_cubes: largest slice in 4x4x4 cubes; 0 for a generation with two axes.
      ordered: the axes must not decrease.
      single_chip: the machine with one chip has three axes here.
      compact: numbers of chips whose type means the most compact topology where several have as
        many; for other numbers XPK takes a long one, so there the user has to say.
      containers: most containers that XPK runs on a host of four chips.
    """

    name: str
    label: str
    units_per_chip: int
    flat: tuple[str, ...] = ()
    max_cubes: int = 0
    ordered: bool = True
    single_chip: bool = False
    compact: Container[int] = ()
    containers: int = 1


GENERATIONS = (
    Generation(
        name="v4",
        label="tpu-v4-podslice",
        units_per_chip=2,
        max_cubes=64,
        ordered=False,
        compact=(256, 512, 768, 1024, 2048),
    ),
    Generation(name="v5litepod", label="tpu-v5-lite-podslice", units_per_chip=1, flat=_FLAT),
    Generation(
        name="v5p", label="tpu-v5p-slice", units_per_chip=2, max_cubes=140, compact=range(6145)
    ),
    Generation(name="v6e", label="tpu-v6e-slice", units_per_chip=1, flat=_FLAT),
    Generation(
        name="tpu7x",
        label="tpu7x",
        units_per_chip=2,
        max_cubes=144,
        single_chip=True,
        compact=range(6145),
        containers=2,
    ),
)
_ALIASES = {"v5e": "v5litepod"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceShape:
    """One slice.

    Attributes:
      label: value of cloud.google.com/gke-tpu-accelerator.
      topology: value of cloud.google.com/gke-tpu-topology.
      hosts: machines of the slice.
      chips_per_host: of each.
      containers: of the trainer on each, which share its chips.
    """

    label: str
    topology: str
    hosts: int
    chips_per_host: int
    containers: int = 1

    @property
    def node_selector(self) -> dict[str, str]:
        """Labels of the nodes that such a slice is made of."""
        return {
            "cloud.google.com/gke-tpu-accelerator": self.label,
            "cloud.google.com/gke-tpu-topology": self.topology,
        }


def slice_shape(tpu: TpuSlice) -> SliceShape:
    """Look up a slice.

    Args:
      tpu: accelerator is GKE's label (tpu-v5p-slice) with a topology, or an XPK type, which names
        the chips (v5p-32) or the topology (v5p-2x2x4); a topology beside it must agree.

    Raises:
      ConfigError: no such accelerator or topology, the two contradict each other, or the hosts
        run no such number of containers; the message lists the near ones.
    """
    by_label = {generation.label: generation for generation in GENERATIONS}
    generation = by_label.get(tpu.accelerator)
    if generation is None:
        generation, topology = _generation_and_topology(tpu)
    elif tpu.topology is None:
        msg = (
            f"spec.tpu.topology is not set; accelerator {tpu.accelerator} comes in "
            f"{_listing(topologies(generation))}"
        )
        raise ConfigError(msg)
    else:
        topology = tpu.topology
    return _shape(generation, topology, tpu.parallel_containers)


@functools.cache
def topologies(generation: Generation) -> tuple[str, ...]:
    """List a generation's topologies, axes ascending, fewest chips first, compact ones first."""
    if generation.flat:
        return generation.flat
    most = generation.max_cubes * _CUBE
    large = [
        (a, b, c)
        for a in _axes(most, 4)
        for b in _axes(most // a, a)
        for c in _axes(most // (a * b), b)
    ]
    large.sort(key=lambda axes: (math.prod(axes), sum(axes)))
    single = ("1x1x1",) if generation.single_chip else ()
    return (*single, *_SMALL_3D, *("x".join(map(str, axes)) for axes in large))


def _axes(most: int, least: int) -> range:
    return range(least, min(most, _LONGEST_AXIS) + 1, 4)


def _generation_and_topology(tpu: TpuSlice) -> tuple[Generation, str]:
    """Read an XPK type, in the light of the topology beside it."""
    match = re.fullmatch(r"([a-z0-9]+)-([0-9]{1,6}|[0-9]+(?:x[0-9]+){1,2})", tpu.accelerator)
    by_name = {generation.name: generation for generation in GENERATIONS}
    prefix = match[1] if match else ""
    generation = by_name.get(_ALIASES.get(prefix, prefix))
    if match is None or generation is None:
        known = [f"{g.name}-N" for g in GENERATIONS] + [g.label for g in GENERATIONS]
        near = difflib.get_close_matches(tpu.accelerator, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        msg = (
            f"spec.tpu.accelerator={tpu.accelerator!r} is not known; {hint}"
            f"use one of {', '.join(known)}"
        )
        raise ConfigError(msg)
    if "x" in match[2]:
        fitting: tuple[str, ...] = (match[2],)
    else:
        fitting = _of_size(generation, int(match[2]), tpu.accelerator)
    if tpu.topology is None:
        return generation, _only(generation, fitting, tpu.accelerator)
    agreeing = {_ascending(each) for each in fitting}
    if _valid(generation, tpu.topology) and _ascending(tpu.topology) not in agreeing:
        msg = (
            f"spec.tpu.topology={tpu.topology} has {_chips(tpu.topology)} chips, accelerator "
            f"{tpu.accelerator} has {_chips(fitting[0])}; use {' or '.join(fitting[:4])}"
            f"{', or leave topology out' if len(fitting) == 1 else ''}"
        )
        raise ConfigError(msg)
    return generation, tpu.topology


def _of_size(generation: Generation, size: int, accelerator: str) -> tuple[str, ...]:
    """Return the topologies of a type's size, the compact one first; at least one."""
    chips, odd = divmod(size, generation.units_per_chip)
    fitting = tuple(t for t in topologies(generation) if _chips(t) == chips and not odd)
    if not fitting:
        msg = (
            f"spec.tpu.accelerator={accelerator!r} is no size of {generation.name}; near are "
            f"{', '.join(_near_types(generation, chips))}"
        )
        raise ConfigError(msg)
    return fitting


def _only(generation: Generation, fitting: tuple[str, ...], accelerator: str) -> str:
    """Return the topology that a type means; the most compact one is the first."""
    compact = fitting[0]
    if len(fitting) > 1 and _chips(compact) not in generation.compact:
        msg = (
            f"spec.tpu.accelerator={accelerator} comes as {_listing(fitting)}; set "
            "spec.tpu.topology to the one of your node pools"
        )
        raise ConfigError(msg)
    return compact


def _shape(generation: Generation, topology: str, containers: int) -> SliceShape:
    chips = _chips(topology)
    if not _valid(generation, topology):
        near = sorted(topologies(generation), key=lambda t: (abs(_chips(t) - chips), t))
        msg = (
            f"spec.tpu.topology={topology} is none of {generation.label}; near are "
            f"{', '.join(near[:4])}"
        )
        raise ConfigError(msg)
    hosts = max(chips // _CHIPS_PER_HOST, 1)
    most = generation.containers if chips >= _CHIPS_PER_HOST else 1
    if containers > most:
        msg = (
            f"spec.tpu.parallelContainers={containers}: a host of {generation.label} {topology} "
            "runs one container with all its chips; set 1 (two are for tpu7x hosts of 4 chips)"
        )
        raise ConfigError(msg)
    return SliceShape(
        label=generation.label,
        topology=topology,
        hosts=hosts,
        chips_per_host=chips // hosts,
        containers=containers,
    )


def _valid(generation: Generation, topology: str) -> bool:
    if generation.ordered:
        return topology in topologies(generation)
    return topology in _SMALL_3D or (
        _ascending(topology) in topologies(generation)[len(_SMALL_3D) :]
        and topology == "x".join(str(int(axis)) for axis in topology.split("x"))
    )


def _ascending(topology: str) -> str:
    """Return the topology as it is listed: the axes of a large one ascending."""
    if topology in _SMALL_3D:
        return topology
    return "x".join(map(str, sorted(map(int, topology.split("x")))))


def _chips(topology: str) -> int:
    return math.prod(int(axis) for axis in topology.split("x"))


def _near_types(generation: Generation, chips: int) -> list[str]:
    sizes = sorted({_chips(t) for t in topologies(generation)})
    near = sorted(sorted(sizes, key=lambda size: abs(size - chips))[:4])
    return [f"{generation.name}-{size * generation.units_per_chip}" for size in near]


def _listing(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:8])
    return f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown
