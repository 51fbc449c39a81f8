"""TPU shapes: accelerator and topology -> hosts, chips a host, node selectors. A table, no I/O.

Source: xpk src/xpk/core/system_characteristics.py@367c8382 and GKE's "Plan TPUs in GKE".
"""

import difflib
import math
import re
from dataclasses import dataclass

from ling_operator.api import TpuSlice
from ling_trainer.schema import ConfigError

_CUBE = 64
_SMALL_3D = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")
_V5E_HOSTS = {"2x4": 2, "4x4": 4, "4x8": 8, "8x8": 16, "8x16": 32, "16x16": 64}
_V6E_HOSTS = {"1x1": 1, "2x2": 1} | _V5E_HOSTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One generation of TPU.

    Attributes:
      name: as in an XPK type, before the dash.
      label: value of cloud.google.com/gke-tpu-accelerator.
      units_per_chip: cores (2) or chips (1) that the number of an XPK type counts.
      flat: topologies with two axes and their hosts; empty for a generation with three.
      max_cubes: largest slice in 4x4x4 cubes; 0 for a generation with two axes.
      ordered: the axes must not decrease.
      single_chip: topology of the machine with one chip; "" without one.
    """

    name: str
    label: str
    units_per_chip: int
    flat: tuple[tuple[str, int], ...] = ()
    max_cubes: int = 0
    ordered: bool = True
    single_chip: str = ""


GENERATIONS = (
    Generation(name="v4", label="tpu-v4-podslice", units_per_chip=2, max_cubes=64, ordered=False),
    Generation(
        name="v5litepod",
        label="tpu-v5-lite-podslice",
        units_per_chip=1,
        flat=tuple(_V5E_HOSTS.items()),
    ),
    Generation(name="v5p", label="tpu-v5p-slice", units_per_chip=2, max_cubes=140),
    Generation(
        name="v6e",
        label="tpu-v6e-slice",
        units_per_chip=1,
        flat=tuple(_V6E_HOSTS.items()),
        single_chip="1x1",
    ),
    Generation(name="tpu7x", label="tpu7x", units_per_chip=2, max_cubes=144, single_chip="1x1x1"),
)
_ALIASES = {"v5e": "v5litepod"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceShape:
    """One slice.

    Attributes:
      label: value of cloud.google.com/gke-tpu-accelerator.
      topology: value of cloud.google.com/gke-tpu-topology.
      hosts: machines of the slice.
      chips_per_host: google.com/tpu of each.
    """

    label: str
    topology: str
    hosts: int
    chips_per_host: int

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
      tpu: accelerator is GKE's label (tpu-v5p-slice) with a topology, or an XPK type (v5p-32),
        whose topology, where given, must have as many chips as the type says.

    Raises:
      ConfigError: no such accelerator or topology, or the two contradict each other; the message
        lists the near ones.
    """
    by_label = {generation.label: generation for generation in GENERATIONS}
    generation = by_label.get(tpu.accelerator)
    if generation is not None:
        if tpu.topology is None:
            msg = (
                f"spec.tpu.topology is not set; accelerator {tpu.accelerator} comes in "
                f"{_listing(topologies(generation))}"
            )
            raise ConfigError(msg)
        return _shape(generation, tpu.topology)
    return _shape_of_type(tpu)


def topologies(generation: Generation, max_chips: int = 4096) -> tuple[str, ...]:
    """List a generation's topologies of up to max_chips chips, smallest first."""
    if generation.flat:
        return tuple(topology for topology, _ in generation.flat)
    axes = range(4, 4 * 16 + 1, 4)
    cubes = (
        (a, b, c)
        for a in axes
        for b in axes
        for c in axes
        if a <= b <= c and a * b * c <= min(max_chips, generation.max_cubes * _CUBE)
    )
    large = sorted(cubes, key=lambda shape: (math.prod(shape), shape[2]))
    single = (generation.single_chip,) if generation.single_chip else ()
    return (*single, *_SMALL_3D, *("x".join(map(str, shape)) for shape in large))


def _shape_of_type(tpu: TpuSlice) -> SliceShape:
    match = re.fullmatch(r"([a-z0-9]+)-([0-9]{1,6})", tpu.accelerator)
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
    chips, odd = divmod(int(match[2]), generation.units_per_chip)
    fitting = [t for t in topologies(generation, 16384) if _chips(t) == chips and not odd]
    if not fitting:
        msg = (
            f"spec.tpu.accelerator={tpu.accelerator!r} is no size of {generation.name}; near are "
            f"{', '.join(_near_types(generation, chips))}"
        )
        raise ConfigError(msg)
    topology = tpu.topology or fitting[0]
    shape = _shape(generation, topology)
    if _chips(topology) != chips:
        msg = (
            f"spec.tpu.topology={topology} has {_chips(topology)} chips, accelerator "
            f"{tpu.accelerator} has {chips}; use {' or '.join(fitting)}, or leave topology out"
        )
        raise ConfigError(msg)
    return shape


def _shape(generation: Generation, topology: str) -> SliceShape:
    chips = _chips(topology)
    if not _valid(generation, topology):
        near = sorted(topologies(generation, 16384), key=lambda t: (abs(_chips(t) - chips), t))
        msg = (
            f"spec.tpu.topology={topology} is none of {generation.label}; near are "
            f"{', '.join(near[:4])}"
        )
        raise ConfigError(msg)
    hosts = dict(generation.flat).get(topology, max(chips // 4, 1))
    return SliceShape(
        label=generation.label,
        topology=topology,
        hosts=hosts,
        chips_per_host=chips // hosts,
    )


def _valid(generation: Generation, topology: str) -> bool:
    if generation.flat or topology == generation.single_chip:
        return topology in (*dict(generation.flat), generation.single_chip)
    axes = [int(axis) for axis in topology.split("x")]
    if topology != "x".join(map(str, axes)) or len(axes) != 3:
        return False
    ascending = "x".join(map(str, sorted(axes)))
    known = {"x".join(map(str, sorted(map(int, t.split("x"))))) for t in _SMALL_3D}
    if ascending in known:
        return topology in _SMALL_3D
    if generation.ordered and axes != sorted(axes):
        return False
    return (
        all(axis and axis % 4 == 0 for axis in axes)
        and math.prod(axes) <= generation.max_cubes * _CUBE
    )


def _chips(topology: str) -> int:
    return math.prod(int(axis) for axis in topology.split("x"))


def _near_types(generation: Generation, chips: int) -> list[str]:
    sizes = sorted({_chips(t) for t in topologies(generation, 16384)})
    near = sorted(sorted(sizes, key=lambda size: abs(size - chips))[:4])
    return [f"{generation.name}-{size * generation.units_per_chip}" for size in near]


def _listing(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:8])
    return f"{shown} and larger ones" if len(names) > 8 else shown
