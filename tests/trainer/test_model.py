"""Ling2: parameters, layers and invariances."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ling_trainer.batch import Batch
from ling_trainer.model import ling2
from ling_trainer.model_config import ModelConfig
from ling_trainer.presets import ling2 as ling2_preset
from ling_trainer.presets import ling2_tiny

FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def config(preset: Any = ling2_tiny, **overrides: Any) -> ModelConfig:
    return ModelConfig.model_validate(preset()["model"] | overrides)


def draw(config: ModelConfig) -> Any:
    """Parameters without compiling an initialiser."""
    numbers = np.random.default_rng(1)
    return jax.tree_util.tree_map_with_path(
        lambda path, x: (
            np.ones(x.shape, np.float32)
            if path[-1].key == "scale"
            else numbers.normal(0, 0.1, x.shape).astype(np.float32)
        ),
        jax.eval_shape(lambda: ling2.init_params(config, seed=0)),
    )


def batch_of(inputs: Any, segment_ids: Any = None, positions: Any = None) -> Batch:
    inputs = jnp.asarray(inputs)
    places = jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape)
    return Batch(
        inputs=inputs,
        targets=jnp.roll(inputs, -1, axis=1),
        positions=places if positions is None else jnp.asarray(positions),
        segment_ids=jnp.ones_like(inputs) if segment_ids is None else jnp.asarray(segment_ids),
        loss_mask=jnp.ones(inputs.shape, bool),
    )


def run(config: ModelConfig, params: Any, batch: Batch, **settings: Any) -> Any:
    fixed = {"loss_groups": 1, "mtp_roll": "segment", "reset_attention_mask": True} | settings
    bias = ling2.init_router_bias(config)
    forward = jax.jit(
        lambda p, b: ling2.apply(p, bias, b, config=config, **fixed),
        compiler_options=FAST_COMPILE,
    )
    return jax.device_get(forward(params, batch))


@pytest.mark.parametrize(
    ("shared_width", "backbone", "prediction"),
    [(2048, 16_595_936_256, 835_595_008), (512, 16_416_629_760, 826_157_824)],
)
def test_ling2_has_exactly_this_many_parameters(
    shared_width: int, backbone: int, prediction: int
) -> None:
    big = config(ling2_preset, moe_shared_expert_intermediate_size=shared_width)
    shapes = jax.eval_shape(lambda: ling2.init_params(big, seed=0))
    counted = {
        name: sum(int(np.prod(x.shape)) for x in jax.tree.leaves(tree))
        for name, tree in shapes.items()
    }
    assert counted.pop("mtp") == prediction
    assert sum(counted.values()) == backbone
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(shapes))


def test_ling2_tiny_has_all_four_kinds_of_layer() -> None:
    tiny = config()
    kinds = {(tiny.is_mla(layer), tiny.is_moe(layer)) for layer in range(4)}
    assert kinds == {(False, False), (False, True), (True, False), (True, True)}
    shapes = jax.eval_shape(lambda: ling2.init_params(tiny, seed=0))
    blocks = [*shapes["prefix"], *shapes["groups"]]
    found = {("kv_b" in block["attention"], "router" in block["mlp"]) for block in blocks}
    assert found == kinds
    assert all("shared" in block["mlp"] for block in shapes["groups"])
    assert len(shapes["mtp"]) == 1


@pytest.mark.slow
def test_every_parameter_of_ling2_tiny_gets_a_gradient() -> None:
    tiny = config()
    params = draw(tiny)
    batch = batch_of(np.random.default_rng(0).integers(0, 257, (2, 48)))
    bias = ling2.init_router_bias(tiny)

    def total(params: Any) -> Any:
        out = ling2.apply(
            params, bias, batch, config=tiny, loss_groups=1, mtp_roll="segment",
            reset_attention_mask=False,
        )  # fmt: skip
        states = (out.hidden, *out.mtp_hidden)
        return sum(
            jax.nn.logsumexp(ling2.logits(params, h, d), axis=-1)[:, :-2].mean()
            for d, h in enumerate(states)
        )

    gradients = jax.jit(jax.grad(total), compiler_options=FAST_COMPILE)(params)
    idle = [
        jax.tree_util.keystr(path)
        for path, g in jax.tree_util.tree_leaves_with_path(gradients)
        if not np.abs(g).max() > 0
    ]
    assert idle == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, (2, 1, 0)),
        ({"first_k_dense_replace": 0}, (0, 2, 0)),
        ({"first_k_dense_replace": 4}, (4, 0, 0)),
        ({"num_hidden_layers": 5}, (2, 1, 1)),
        ({"num_hidden_layers": 5, "first_k_dense_replace": 5}, (5, 0, 0)),
        ({"num_hidden_layers": 3, "layer_group_size": 5, "first_k_dense_replace": 0}, (0, 0, 3)),
        ({"num_hidden_layers": 11, "layer_group_size": 4, "first_k_dense_replace": 1}, (4, 1, 3)),
    ],
)
def test_layers_divide_into_prefix_groups_and_tail(
    change: dict[str, int], expected: tuple[int, int, int]
) -> None:
    layout = ling2.layer_layout(config(**change))
    assert (layout.prefix, layout.groups, layout.tail) == expected


@pytest.mark.slow
def test_initial_values_depend_on_the_seed_and_not_on_scan_layers() -> None:
    small = config(num_hidden_layers=2, first_k_dense_replace=0, num_nextn_predict_layers=0)

    def initial(config: ModelConfig, seed: int) -> Any:
        make = jax.jit(lambda: ling2.init_params(config, seed=seed), compiler_options=FAST_COMPILE)
        return jax.device_get(make())

    one = initial(small, 1)
    unrolled = initial(small.model_copy(update={"scan_layers": False}), 1)
    jax.tree.map(np.testing.assert_array_equal, one, unrolled)
    assert (one["head"] != initial(small, 2)["head"]).any()
    for path, leaf in jax.tree_util.tree_leaves_with_path(one):
        if path[-1].key == "scale":
            np.testing.assert_array_equal(leaf, 1.0)
        else:
            assert abs(leaf.std() / small.initializer_range - 1) < 0.2, path
            assert abs(leaf.mean()) < 0.2 * small.initializer_range, path


def test_documents_packed_in_a_row_equal_documents_alone() -> None:
    tiny = config()
    params = draw(tiny)
    numbers = np.random.default_rng(3)
    lengths = (29, 1, 66)
    row = numbers.integers(0, 257, (1, sum(lengths)))
    segments = np.repeat((1, 2, 3), lengths)[None]
    positions = np.concatenate([np.arange(n) for n in lengths])[None]
    packed = run(tiny, params, batch_of(row, segments, positions))
    starts = np.cumsum((0, *lengths))
    alone = np.zeros((3, max(lengths)), int)
    valid = np.zeros((3, max(lengths)), int)
    for i, n in enumerate(lengths):
        alone[i, :n] = row[0, starts[i] : starts[i + 1]]
        valid[i, :n] = 1
    single = run(tiny, params, batch_of(alone, valid))
    for found, expected in ((packed.hidden, single.hidden),
                            (packed.mtp_hidden[0], single.mtp_hidden[0])):  # fmt: skip
        for i, n in enumerate(lengths):
            piece = found[0, starts[i] : starts[i + 1]]
            np.testing.assert_allclose(piece, expected[i, :n], atol=2e-5)
    counts = packed.router.expert_counts
    np.testing.assert_array_equal(counts, single.router.expert_counts)
    np.testing.assert_array_equal(counts.sum(axis=1), 4 * sum(lengths))


def test_no_token_sees_a_later_one() -> None:
    tiny = config()
    params = draw(tiny)
    ids = np.random.default_rng(4).integers(0, 257, (2, 70))
    changed = ids.copy()
    changed[0, 40] = (changed[0, 40] + 1) % 257
    a, b = (run(tiny, params, batch_of(x), reset_attention_mask=False) for x in (ids, changed))
    np.testing.assert_array_equal(a.hidden[0, :40], b.hidden[0, :40])
    np.testing.assert_array_equal(a.mtp_hidden[0][0, :39], b.mtp_hidden[0][0, :39])
    assert (a.hidden[0, 40:] != b.hidden[0, 40:]).any(axis=-1).all()
    assert (a.mtp_hidden[0][0, 39] != b.mtp_hidden[0][0, 39]).any()
    np.testing.assert_array_equal(a.hidden[1], b.hidden[1])


@pytest.mark.slow
def test_loss_groups_are_blocks_of_rows() -> None:
    tiny = config(num_hidden_layers=2, first_k_dense_replace=0)
    params = draw(tiny)
    ids = np.random.default_rng(5).integers(0, 257, (4, 24))
    segments = np.ones((4, 24), int)
    segments[1, 7:] = 0
    both = run(tiny, params, batch_of(ids, segments), loss_groups=2).router
    for group in range(2):
        rows = slice(2 * group, 2 * group + 2)
        one = run(tiny, params, batch_of(ids[rows], segments[rows])).router
        np.testing.assert_allclose(both.aux[group], one.aux[0], rtol=1e-5)
        np.testing.assert_allclose(both.z[group], one.z[0], rtol=1e-5)
    with pytest.raises(ValueError, match="loss_groups=3 does not divide 4 rows"):
        run(tiny, params, batch_of(ids), loss_groups=3)


@pytest.mark.slow
def test_bfloat16_compute_stays_near_float32_and_returns_float32() -> None:
    tiny = config()
    params = draw(tiny)
    batch = batch_of(np.random.default_rng(6).integers(0, 257, (2, 32)))
    exact = run(tiny, params, batch)
    half = run(tiny.model_copy(update={"dtype": "bfloat16"}), params, batch)
    for found, expected in zip(jax.tree.leaves(half), jax.tree.leaves(exact), strict=True):
        assert found.dtype == expected.dtype
    # A token may change experts, and its state with them; most must not.
    apart = np.abs(half.hidden - exact.hidden).max(axis=-1)
    assert 0 < np.median(apart) < 0.1 * np.abs(exact.hidden).max()


@pytest.fixture(scope="module")
def no_experts() -> SimpleNamespace:
    dense = config(first_k_dense_replace=4, num_nextn_predict_layers=0)
    return SimpleNamespace(config=dense, params=draw(dense))


def test_a_model_without_routers_has_empty_statistics(no_experts: SimpleNamespace) -> None:
    out = run(no_experts.config, no_experts.params, batch_of(np.zeros((2, 8), int)))
    assert out.router.aux.shape == (1, 0)
    assert out.router.expert_counts.shape == (0, 16)
    assert out.mtp_hidden == ()
