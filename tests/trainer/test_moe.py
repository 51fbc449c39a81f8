"""Router, statistics and experts."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ling_trainer.model.layers import Tokens
from ling_trainer.model.moe import combine, dense_experts, dispatch, sorted_experts
from ling_trainer.model.router import Routing, route, router_stats
from ling_trainer.model_config import ModelConfig
from ling_trainer.presets import ling2_tiny

FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def config(**overrides: Any) -> ModelConfig:
    return ModelConfig.model_validate(ling2_tiny()["model"] | overrides)


def test_expert_bias_gets_no_gradient() -> None:
    scores = jax.random.normal(jax.random.key(0), (8, 16))
    total = jax.grad(lambda bias: route(scores, bias, config=config()).weights.sum())
    np.testing.assert_array_equal(total(jnp.zeros(16)), np.zeros(16))


def experts_case() -> tuple[Any, ...]:
    keys = jax.random.split(jax.random.key(1), 5)
    scores = jax.random.normal(keys[0], (24, 16))
    bias = jnp.where(jnp.arange(16) == 3, 9.0, 0.0)  # expert 3 takes every token
    routing = route(scores, bias, config=config())
    x, gate_up = jax.random.normal(keys[1], (24, 8)), jax.random.normal(keys[2], (16, 8, 10))
    down, do = jax.random.normal(keys[3], (16, 5, 8)), jax.random.normal(keys[4], (24, 8))
    return x, routing, gate_up, down, do


def test_sorted_and_dense_experts_are_equal_forward_and_backward() -> None:
    x, routing, gate_up, down, do = experts_case()
    assert int((routing.indices == 3).sum()) == 24

    def run(experts: Callable[..., Any]) -> Any:
        def f(x: Any, weights: Any, gate_up: Any, down: Any) -> Any:
            return experts(x, Routing(routing.indices, weights), gate_up, down)

        value, vjp = jax.vjp(f, x, routing.weights, gate_up, down)
        return value, vjp(do)

    compiled = jax.jit(
        lambda: (run(sorted_experts), run(dense_experts)), compiler_options=FAST_COMPILE
    )
    found, expected = compiled()
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(jnp.abs(b).max()))


def test_experts_equal_a_loop_over_tokens() -> None:
    x, routing, gate_up, down, _ = experts_case()
    expected = np.zeros(x.shape)
    for t in range(x.shape[0]):
        for e, w in zip(routing.indices[t], routing.weights[t], strict=True):
            gate, up = np.split(np.asarray(x[t], float) @ np.asarray(gate_up[e], float), 2)
            inner = gate / (1 + np.exp(-gate)) * up
            expected[t] += float(w) * inner @ np.asarray(down[e], float)
    np.testing.assert_allclose(
        sorted_experts(x, routing, gate_up, down), expected, rtol=1e-5, atol=1e-4
    )


def test_dispatch_drops_nothing_and_combine_is_its_transpose() -> None:
    x, routing, *_ = experts_case()
    sent = dispatch(x, routing.indices, num_experts=16)
    assert int(sent.group_sizes.sum()) == routing.indices.size
    chosen = np.sort(np.asarray(routing.indices).ravel(), kind="stable")
    np.testing.assert_array_equal(sent.group_sizes, np.bincount(chosen, minlength=16))
    summed = combine(sent.rows, sent.order // 4, sent.places)
    np.testing.assert_allclose(summed, 4 * x, rtol=1e-6)


def plain_counts(q: Any, chosen: int = 4) -> Any:
    return np.bincount(np.argsort(-q, axis=-1)[:, :chosen].ravel(), minlength=16)


def test_statistics_count_valid_tokens_only_and_equal_a_float64_reference() -> None:
    small = config()
    scores = 2 * jax.random.normal(jax.random.key(2), (4 * 6, 16))
    valid = np.ones((4, 6), bool)
    valid[1, 2:] = False
    valid[3] = False
    bias = jnp.linspace(-1, 1, 16)
    routing = route(scores, bias, config=small)
    tokens = Tokens(
        positions=jnp.zeros((4, 6), int), documents=None, valid=jnp.asarray(valid), loss_groups=2
    )
    compiled = jax.jit(
        lambda: router_stats(scores, routing, bias, tokens, config=small),
        compiler_options=FAST_COMPILE,
    )
    stats = jax.device_get(compiled())
    s = 1 / (1 + np.exp(-np.asarray(scores, float)))
    q = (s / s.sum(-1, keepdims=True)).reshape(4, 6, 16)

    def aux(q: Any) -> Any:
        return 16 / (4 * len(q) ** 2) * (plain_counts(q) * q.sum(0)).sum()

    lse = np.log(np.exp(np.asarray(scores, float)).sum(-1)).reshape(4, 6)
    for group, rows in enumerate((slice(0, 2), slice(2, 4))):
        of_group, in_rows = q[rows][valid[rows]], valid[rows].any(1)
        each = [aux(q[rows][i][valid[rows][i]]) for i in np.flatnonzero(in_rows)]
        assert stats.aux[group] == pytest.approx(aux(of_group), rel=1e-5)
        assert stats.seq_aux[group] == pytest.approx(np.mean(each), rel=1e-5)
        assert stats.z[group] == pytest.approx((lse[rows][valid[rows]] ** 2).mean(), rel=1e-5)
        mean = of_group.sum(0) / valid.sum()
        np.testing.assert_allclose(stats.mean_scores[group], mean, rtol=1e-5)
    flat, chosen = valid.ravel(), np.asarray(routing.indices)
    counts = np.bincount(chosen[flat].ravel(), minlength=16)
    np.testing.assert_array_equal(stats.expert_counts, counts)
    np.testing.assert_array_equal(stats.loads, plain_counts(q[valid]))
    assert stats.expert_counts.dtype == stats.loads.dtype == jnp.int32
    assert (stats.loads != counts).any()  # the balance loss's choice is another one
    p = np.exp(s + np.asarray(bias, float))[flat]
    p /= p.sum(-1, keepdims=True)
    picked = np.take_along_axis(p, chosen[flat], axis=-1)
    assert stats.topk_weight == pytest.approx(picked.mean(), rel=1e-5)
    assert stats.probs_std == pytest.approx(p.std(-1).mean(), rel=1e-5)


@pytest.mark.parametrize("group_limit", [2, 4])
def test_choice_keeps_to_the_best_groups(group_limit: int) -> None:
    small = config(topk_group=group_limit)
    scores = jax.random.normal(jax.random.key(3), (64, 16))
    indices = np.asarray(route(scores, jnp.zeros(16), config=small).indices)
    used = [len(set(row // 4)) for row in indices]
    assert max(used) <= group_limit
    assert max(used) > 1
