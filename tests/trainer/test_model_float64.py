"""Ling2 in odd shapes against a float64 NumPy forward pass written from its specification."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from float64_model import Reference
from ling_trainer import convert
from ling_trainer.batch import Batch
from ling_trainer.model import ling2
from ling_trainer.model_config import ModelConfig
from ling_trainer.presets import ling2_tiny

FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
SMALL = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 20,
    "moe_intermediate_size": 12,
    "initializer_range": 0.2,
    "chunk_size": 16,
}
ODD = SMALL | {  # no query compression, 6 heads of 16 = 96 wide, only an incomplete tail of MLA
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "layer_group_size": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 6,
    "head_dim": 16,
    "group_norm_size": 3,
    "q_lora_rank": None,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "rope_theta": 6e5,
    "num_nextn_predict_layers": 0,
}
DEEP = SMALL | {  # two groups to scan, a tail, two prediction depths, two shared experts
    "num_hidden_layers": 7,
    "layer_group_size": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 3,
    "head_dim": 8,
    "group_norm_size": 3,
    "q_lora_rank": 10,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 3,
    "num_shared_experts": 2,
    "moe_shared_expert_intermediate_size": 7,
    "num_nextn_predict_layers": 2,
    "lightning_slope_layer_offset": 1,
}


def objective(logits: Any, aux: Any, z: Any, directions: Any) -> Any:
    """Some scalar that every output takes part in."""
    terms = sum((x * d).mean() for x, d in zip(logits, directions, strict=True))
    return terms + 0.5 * sum(aux) + 0.01 * sum(z)


def make_case(change: dict[str, Any], *, reset: bool, mtp_roll: str) -> SimpleNamespace:
    config = ModelConfig.model_validate(ling2_tiny()["model"] | change)
    numbers = np.random.default_rng(7)
    rows, length = 3, 70 if change is ODD else 37
    places = np.tile(np.arange(length), (rows, 1))
    if reset:
        segments = 1 + (places >= 9) + (places >= 10) + (places >= 26)
        positions = np.where(places < 9, places, np.where(places < 26, places - 10, places - 26))
        positions = np.maximum(positions, 0)
    else:
        segments = (places < np.array([[length], [33], [5]])).astype(int)
        positions = places
    segments[2, -3:] = 0
    batch = SimpleNamespace(
        inputs=numbers.integers(0, config.vocab_size, (rows, length)),
        segment_ids=segments,
        positions=positions,
    )
    shapes = jax.eval_shape(lambda: ling2.init_params(config, seed=0))
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: (
            numbers.uniform(0.7, 1.3, x.shape)  # away from 1, or a forgotten norm would not show
            if path[-1].key == "scale"
            else numbers.normal(0, config.initializer_range, x.shape)
        ).astype(np.float32),
        shapes,
    )
    bias = numbers.normal(0, 0.1, (config.num_routers, config.num_experts)).astype(np.float32)
    depths = range(1 + config.num_nextn_predict_layers)
    shape = (rows, length, config.vocab_size)
    directions = [numbers.normal(size=shape) * (segments != 0)[..., None] for _ in depths]
    return SimpleNamespace(
        config=config, batch=batch, params=params, bias=bias, directions=directions,
        reset=reset, mtp_roll=mtp_roll,
    )  # fmt: skip


def reference(case: SimpleNamespace, params: Any) -> SimpleNamespace:
    bias = np.asarray(case.bias, np.float64)
    with_names = convert.params_to_hf(jax.tree.map(np.float32, params), case.config, bias)
    tensors = {name: np.asarray(x, np.float64) for name, x in with_names.items()}
    return Reference(case.config, tensors, case.batch, case.reset, case.mtp_roll).run()


def model_value_and_gradient(case: SimpleNamespace, config: ModelConfig) -> Any:
    batch = Batch(
        inputs=jnp.asarray(case.batch.inputs),
        targets=jnp.asarray(case.batch.inputs),
        positions=jnp.asarray(case.batch.positions),
        segment_ids=jnp.asarray(case.batch.segment_ids),
        loss_mask=jnp.asarray(case.batch.segment_ids != 0),
    )

    def total(params: Any) -> Any:
        out = ling2.apply(
            params,
            jnp.asarray(case.bias),
            batch,
            config=config,
            loss_groups=1,
            mtp_roll=case.mtp_roll,
            reset_attention_mask=case.reset,
        )
        states = (out.hidden, *out.mtp_hidden)
        logits = [ling2.logits(params, h, depth) for depth, h in enumerate(states)]
        aux, z = out.router.aux[0], out.router.z[0]
        return objective(logits, aux, z, case.directions), (logits, out.router)

    step = jax.jit(jax.value_and_grad(total, has_aux=True), compiler_options=FAST_COMPILE)
    return jax.device_get(step(case.params))


@pytest.fixture(
    scope="module",
    params=[(ODD, False, "plain"), (DEEP, True, "segment"), (DEEP, False, "plain")],
    ids=["odd_shapes", "packed_two_depths", "plain_two_depths"],
)
def case(request: pytest.FixtureRequest) -> SimpleNamespace:
    change, reset, mtp_roll = request.param
    case = make_case(change, reset=reset, mtp_roll=mtp_roll)
    case.expected = reference(case, case.params)
    (case.value, (case.logits, case.router)), case.gradients = model_value_and_gradient(
        case, case.config
    )
    return case


@pytest.mark.slow
def test_logits_of_every_depth_equal_the_float64_reference(case: SimpleNamespace) -> None:
    real = case.batch.segment_ids != 0
    assert len(case.logits) == len(case.expected.logits) == len(case.directions)
    for found, expected in zip(case.logits, case.expected.logits, strict=True):
        scale = np.abs(expected[real]).max()
        assert np.abs(found - expected)[real].max() <= 2e-5 * max(scale, 1.0)


@pytest.mark.slow
def test_router_statistics_equal_the_float64_reference(case: SimpleNamespace) -> None:
    np.testing.assert_array_equal(case.router.expert_counts, case.expected.counts)
    np.testing.assert_allclose(case.router.aux[0], case.expected.aux, rtol=1e-5)
    np.testing.assert_allclose(case.router.z[0], case.expected.z, rtol=1e-5)


@pytest.mark.slow
def test_gradient_equals_central_differences_of_the_float64_reference(
    case: SimpleNamespace,
) -> None:
    names = convert.params_to_hf(case.gradients, case.config)
    weights = convert.params_to_hf(case.params, case.config, case.bias)
    whole = np.sqrt(sum(float((g.astype(float) ** 2).sum()) for g in names.values()))
    numbers = np.random.default_rng(11)
    for _ in range(3):
        # Each tensor weighs about the same, or large gradients would hide wrong small ones.
        direction = {
            name: numbers.normal(size=g.shape) / max(np.linalg.norm(g), 1e-3 * whole)
            for name, g in names.items()
        }

        def along(step: float, direction: dict[str, np.ndarray] = direction) -> float:
            tensors = {name: np.asarray(w, np.float64) for name, w in weights.items()}
            tensors |= {name: tensors[name] + step * d for name, d in direction.items()}
            run = Reference(case.config, tensors, case.batch, case.reset, case.mtp_roll).run()
            return float(objective(run.logits, run.aux, run.z, case.directions))

        epsilon = 1e-9 * whole  # larger steps change experts of some tokens
        difference = (along(epsilon) - along(-epsilon)) / (2 * epsilon)
        gradient = sum(float((names[n].astype(float) * d).sum()) for n, d in direction.items())
        assert abs(gradient - difference) <= 2e-4 * np.sqrt(len(names)), (gradient, difference)


@pytest.mark.slow
def test_scanning_and_rematerialisation_do_not_change_the_result() -> None:
    change = {"num_hidden_layers": 6, "num_nextn_predict_layers": 0}  # two groups to scan
    case = make_case(DEEP | change, reset=True, mtp_roll="segment")
    (expected, _), expected_gradients = model_value_and_gradient(case, case.config)
    for update in ({"scan_layers": False}, {"remat_policy": "full"}):
        config = case.config.model_copy(update=update)
        (value, _), gradients = model_value_and_gradient(case, config)
        assert abs(value - expected) <= 1e-6 * max(abs(expected), 1.0)
        pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True)
        for found, other in pairs:
            assert np.abs(found - other).max() <= 1e-5 * np.abs(other).max()
