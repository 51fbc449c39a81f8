"""What tests ask of traced programs."""

from collections.abc import Iterator
from typing import Any

import jax


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations, those inside loops and calls too."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda p: hasattr(p, "eqns")):
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def carries(equation: Any) -> list[Any]:
    """What a loop carries: its other outputs are stacked, with one dimension more."""
    if equation.primitive.name != "scan":
        return []
    outs = zip(equation.outvars, equation.params["jaxpr"].outvars, strict=True)
    return [out.aval for out, inner in outs if out.aval.shape == inner.aval.shape]
