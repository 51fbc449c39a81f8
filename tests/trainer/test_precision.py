"""bfloat16 compute: how far from float32 on golden weights, and where float32 must stay."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxprs import carries, equations
from ling_trainer import convert
from ling_trainer.batch import Batch
from ling_trainer.config import RunConfig
from ling_trainer.head_loss import head_loss
from ling_trainer.model import ling2
from ling_trainer.model.block import Block
from ling_trainer.model.router import route
from ling_trainer.model_config import ModelConfig
from ling_trainer.optimizer import make_optimizer
from ling_trainer.step import init_state, train_step

FOLDER = Path(__file__).parents[1] / "golden" / "ling" / "ling_v2_5_tiny"
PROGRAM = Path(__file__).with_name("sharded_precision_program.py")
FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@pytest.fixture(scope="module")
def golden() -> SimpleNamespace:
    """Golden weights and tokens; at t the label is that of t + 1, and -100 has none."""
    expected = load_file(FOLDER / "expected.safetensors")
    settings = convert.config_from_hf(json.loads((FOLDER / "config.json").read_text()))
    config = ModelConfig.model_validate(settings, strict=True)
    params, router_bias = convert.hf_to_params(load_file(FOLDER / "model.safetensors"), config)
    ids, labels = (expected[name].astype(np.int32) for name in ("input_ids", "labels"))
    targets = np.pad(labels[:, 1:], ((0, 0), (0, 1)), constant_values=-100)
    real = expected["attention_mask"] == 1
    batch = Batch(
        inputs=jnp.asarray(ids),
        targets=jnp.asarray(targets),
        positions=jnp.tile(jnp.arange(ids.shape[1]), (ids.shape[0], 1)),
        segment_ids=jnp.asarray(real, jnp.int32),
        loss_mask=jnp.asarray(targets != -100),
    )
    lm_loss = json.loads((FOLDER / "expected.json").read_text())["lm_loss"]
    return SimpleNamespace(
        params=params, router_bias=jnp.asarray(router_bias), batch=batch, real=real,
        config=config.model_copy(update={"scan_layers": False}), lm_loss=lm_loss,
    )  # fmt: skip


@pytest.fixture(scope="module")
def forward(golden: SimpleNamespace) -> dict[str, Any]:
    """Token losses, outputs of every block and choices of every router, by compute type.

    `weights` is float32 but for the weights of products, which are rounded to bfloat16: what any
    bfloat16 run must cost.
    """
    exact = _forward(golden, "float32")
    return {
        "float32": exact(golden.params),
        "weights": exact(jax.tree_util.tree_map_with_path(_rounded, golden.params)),
        "bfloat16": _forward(golden, "bfloat16")(golden.params),
    }


def _rounded(path: tuple[Any, ...], leaf: Any) -> Any:
    if str(path[-1].key) in {"scale", "embedding", "head", "router"}:
        return leaf
    return np.asarray(leaf).astype(jnp.bfloat16).astype(np.float32)


def _forward(golden: SimpleNamespace, dtype: str) -> Callable[[Any], Any]:
    config = golden.config.model_copy(update={"dtype": dtype})
    blocks: list[Any] = []
    choices: list[Any] = []
    call = Block.__call__

    def recorded_call(self: Block, *inputs: Any) -> Any:
        stream, stats = call(self, *inputs)
        blocks.append(stream)
        return stream, stats

    def recorded_route(*inputs: Any, **options: Any) -> Any:
        routing = route(*inputs, **options)
        choices.append(routing.indices)
        return routing

    def run(params: Any) -> Any:
        blocks.clear()
        choices.clear()
        out = ling2.apply(
            params, golden.router_bias, golden.batch, config=config, loss_groups=1,
            mtp_roll="plain", reset_attention_mask=False,
        )  # fmt: skip
        mask = golden.batch.loss_mask
        loss = head_loss(
            params, out.hidden, golden.batch.targets, mask, mask / mask.sum(),
            logits=ling2.logits, depth=0, z_loss_multiplier=0.0, num_vocab_tiling=5,
        )  # fmt: skip
        return loss, list(blocks), list(choices)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Block, "__call__", recorded_call)
        patch.setattr("ling_trainer.model.moe.route", recorded_route)
        compiled = jax.jit(run, compiler_options=FAST_COMPILE).lower(golden.params).compile()
    return lambda params: jax.device_get(compiled(params))


def test_golden_lm_loss_holds_when_the_head_is_cut_into_chunks(
    golden: SimpleNamespace, forward: dict[str, Any], show_golden: Callable[..., None]
) -> None:
    assert golden.batch.inputs.shape[1] % 5
    error = abs(float(forward["float32"][0].objective) - golden.lm_loss)
    show_golden("ling_v2_5_tiny", cases="lm_loss in 5 chunks", worst=error, tolerance=5e-6)
    assert error <= 5e-6


@pytest.fixture(scope="module")
def apart(golden: SimpleNamespace, forward: dict[str, Any]) -> dict[str, Any]:
    """Absolute differences of token losses from float32."""
    mask = np.asarray(golden.batch.loss_mask)
    losses = {kind: np.asarray(found[0].xent)[mask] for kind, found in forward.items()}
    return {kind: np.abs(losses[kind] - losses["float32"]) for kind in ("weights", "bfloat16")}


def test_bfloat16_moves_token_losses_by_three_times_the_weights_rounding_at_most(
    apart: dict[str, Any],
) -> None:
    for kind, found in apart.items():
        print(f"\ntoken losses, {kind} - float32: mean {found.mean():.1e}, max {found.max():.1e}")
    assert 0 < apart["weights"].mean() < apart["bfloat16"].mean()
    assert apart["bfloat16"].mean() <= 3 * apart["weights"].mean()


@pytest.mark.xfail(
    strict=True,
    reason="of 95 tokens of a random model 64 wide; rounding the weights alone takes 5.1e-3",
)
def test_bfloat16_moves_token_losses_by_five_thousandths_on_average(apart: dict[str, Any]) -> None:
    assert apart["bfloat16"].mean() <= 5e-3


def test_bfloat16_routers_choose_as_float32_ones_for_99_of_100_places(
    golden: SimpleNamespace, forward: dict[str, Any]
) -> None:
    same = [
        (a[:, :, None] == b[:, None, :]).any(-1)[golden.real.ravel()]
        for a, b in zip(forward["bfloat16"][2], forward["float32"][2], strict=True)
    ]
    agreement = [float(layer.mean()) for layer in same]
    print(f"\nsame experts, router by router: {', '.join(f'{a:.2%}' for a in agreement)}")
    assert len(same) == golden.config.num_routers
    assert np.mean(same) >= 0.99


def test_bfloat16_error_of_each_block_grows_no_faster_than_its_roundings(
    golden: SimpleNamespace, forward: dict[str, Any]
) -> None:
    """Each block adds some roundings of 2^-9 to the residual stream; print the table."""
    print("\n| block | relative error of its output |\n|---|---|")
    names = [_kind(golden.config, layer) for layer in range(golden.config.num_hidden_layers)]
    names.append("MTP 1: MLA, MoE")
    pairs = zip(names, forward["bfloat16"][1], forward["float32"][1], strict=True)
    for depth, (name, found, exact) in enumerate(pairs, start=1):
        a, b = (np.asarray(x, np.float64)[golden.real] for x in (found, exact))
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        print(f"| {name} | {error:.1e} |")
        assert found.dtype == "bfloat16"
        assert 2**-12 < error < depth * 2**-7


def _kind(config: ModelConfig, layer: int) -> str:
    attention = "MLA" if config.is_mla(layer) else "lightning"
    return f"{layer}: {attention}, {'MoE' if config.is_moe(layer) else 'dense'}"


@pytest.fixture(scope="module", params=[8, 40], ids=["dense experts", "sorted experts"])
def step(request: pytest.FixtureRequest, step_config: Callable[..., RunConfig]) -> SimpleNamespace:
    """A bfloat16 step, traced and not run; no dimension of a parameter is one of the batch."""
    config = step_config(
        gradient_accumulation_steps=3,
        data={"global_batch_size": 9, "max_target_length": 23},
        loss={"num_vocab_tiling": 2},
        model={"dtype": "bfloat16", "num_experts": request.param, "num_experts_per_tok": 2},
    )
    apply = partial(
        ling2.apply, config=config.model, loss_groups=1, mtp_roll="segment",
        reset_attention_mask=True,
    )  # fmt: skip
    tx = make_optimizer(config.optimizer)
    state = jax.eval_shape(
        lambda: init_state(
            ling2.init_params(config.model, seed=0), ling2.init_router_bias(config.model), tx
        )
    )
    ids: Any = jax.ShapeDtypeStruct((9, 23), jnp.int32)
    mask: Any = jax.ShapeDtypeStruct((9, 23), jnp.bool_)
    batch = Batch(inputs=ids, targets=ids, positions=ids, segment_ids=ids, loss_mask=mask)
    jaxpr, (after, _) = jax.make_jaxpr(
        lambda s, b: train_step(s, b, apply=apply, logits=ling2.logits, tx=tx, config=config),
        return_shape=True,
    )(state, batch)
    return SimpleNamespace(jaxpr=jaxpr.jaxpr, after=after, params=state.params)


def test_parameters_and_moments_stay_float32_in_a_bfloat16_run(step: SimpleNamespace) -> None:
    types = {leaf.dtype for leaf in jax.tree.leaves((step.after.params, step.after.opt_state))}
    assert types == {jnp.dtype("float32"), jnp.dtype("int32")}  # int32: the optimizer's count
    products = [e for e in equations(step.jaxpr) if "dot_general" in e.primitive.name]
    assert any(e.invars[0].aval.dtype == jnp.bfloat16 for e in products)


def test_gradients_are_carried_over_micro_batches_in_float32(step: SimpleNamespace) -> None:
    (accumulation,) = [
        e for e in step.jaxpr.eqns if e.primitive.name == "scan" and e.params["length"] == 3
    ]
    carried = carries(accumulation)
    shapes = [leaf.shape for leaf in jax.tree.leaves(step.params)]
    assert not Counter(shapes) - Counter(aval.shape for aval in carried)
    assert {str(aval.dtype) for aval in carried} == {"float32", "int32"}


def test_no_gradient_of_a_parameter_is_ever_bfloat16(step: SimpleNamespace) -> None:
    """A cast from bfloat16 to float32 in a parameter's shape would be a rounded gradient."""
    shapes = {leaf.shape for leaf in jax.tree.leaves(step.params)}
    shapes |= {leaf.shape[1:] for leaf in jax.tree.leaves(step.params["groups"])}
    shapes -= {()}
    casts = [e for e in equations(step.jaxpr) if e.primitive.name == "convert_element_type"]
    down = [e for e in casts if e.outvars[0].aval.dtype == jnp.bfloat16]
    assert any(e.outvars[0].aval.shape in shapes for e in down)  # weights, as they are used
    up = [e for e in casts if e.invars[0].aval.dtype == jnp.bfloat16]
    assert not [e for e in up if e.outvars[0].aval.shape in shapes]


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What 8 devices exchange: arrays as [computation, kind, type, shape]."""
    folder = tmp_path_factory.mktemp("partitioned")
    flags = (
        "--xla_force_host_platform_device_count=8",
        f"--xla_dump_to={folder}",
        "--xla_dump_hlo_pass_re=spmd-partitioning",
        "--xla_dump_hlo_module_re=.*whole_step.*",
    )
    mesh = {
        "ici_fsdp_parallelism": 2, "ici_expert_parallelism": 2, "ici_tensor_parallelism": 2,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder), json.dumps(mesh)],
        env={**os.environ, "XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_devices_sum_gradients_of_parameters_in_float32(exchanged: dict[str, Any]) -> None:
    """Only activations, which have a multiple of 23 tokens, are summed in bfloat16."""
    sums = [e for e in exchanged["step"] if e[1] in {"all-reduce", "reduce-scatter"}]
    rounded = [shape for _, _, dtype, shape in sums if dtype == "bf16"]
    exact = [shape for _, _, dtype, shape in sums if dtype == "f32"]
    assert len([shape for shape in exact if len(shape) > 1]) > 10
    assert rounded, "tensor parallelism sums activations"
    assert not [shape for shape in rounded if all(size % 23 for size in shape)]


@pytest.mark.slow
def test_devices_exchange_the_head_once_and_never_logits(exchanged: dict[str, Any]) -> None:
    """56 tokens of vocabulary, 28 a device of the tensor axis."""
    with_vocabulary = [e for e in exchanged["head"] if {56, 28} & set(e[3])]
    assert [(e[0], sorted(e[3])) for e in with_vocabulary] == [("ENTRY", [28, 64])] * 2
    assert [e for e in exchanged["head"] if e[0] != "ENTRY"]  # maxima and sums over the vocabulary
    # Sums over halves of the vocabulary and eighths of the rows, in another order.
    assert exchanged["head_error"] <= 5e-6
