"""Loss of an output head: goldens, and chunks of tokens against all tokens at once."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprs import carries, equations
from ling_trainer.head_loss import head_loss

MEGATRON = np.load(
    Path(__file__).parents[1] / "golden" / "megatron" / "loss" / "vocab_parallel_ce.npz"
)
MAXTEXT = np.load(Path(__file__).parents[1] / "golden" / "maxtext" / "small.npz")
FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
ROWS, LENGTH, WIDTH, VOCAB = 3, 37, 16, 50


def linear(params: Any, hidden: Any, depth: int) -> Any:
    """The product's head: float32 operands and products."""
    matrix = params[("head", "ahead")[depth]]
    return jnp.matmul(
        hidden.astype(jnp.float32), matrix.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )


@pytest.fixture(scope="module")
def case() -> SimpleNamespace:
    """Uneven weights, masked tokens whose hidden states are NaN and whose targets are no ids."""
    rng = np.random.default_rng(7)
    mask = rng.random((ROWS, LENGTH)) < 0.8
    hidden = rng.normal(size=(ROWS, LENGTH, WIDTH))
    params = {"head": rng.normal(size=(WIDTH, VOCAB)), "ahead": rng.normal(size=(WIDTH, VOCAB))}
    return SimpleNamespace(
        params=jax.tree.map(jnp.float32, params) | {"embedding": jnp.ones((VOCAB, WIDTH))},
        hidden=jnp.asarray(np.where(mask[..., None], hidden, np.nan), jnp.float32),
        targets=jnp.asarray(np.where(mask, rng.integers(0, VOCAB, mask.shape), -100)),
        mask=jnp.asarray(mask),
        weights=jnp.asarray(np.where(mask, rng.random(mask.shape), 0), jnp.float32),
    )


def objective(
    params: Any, hidden: Any, case: SimpleNamespace, *, chunks: int, z: float, depth: int = 0
) -> Any:
    """A cotangent of 3, and reported values that must not add to the gradient."""
    loss = head_loss(
        params, hidden, case.targets, case.mask, case.weights,
        logits=linear, depth=depth, z_loss_multiplier=z, num_vocab_tiling=chunks,
    )  # fmt: skip
    return 3 * loss.objective, loss


def gradient(case: SimpleNamespace, **options: Any) -> Any:
    step = jax.grad(objective, argnums=(0, 1), has_aux=True)
    run = jax.jit(lambda p, h: step(p, h, case, **options), compiler_options=FAST_COMPILE)
    return run(case.params, case.hidden)


def forward(case: SimpleNamespace, **options: Any) -> Any:
    run = jax.jit(lambda p, h: objective(p, h, case, **options), compiler_options=FAST_COMPILE)
    return run(case.params, case.hidden)


def relative(found: Any, expected: Any) -> float:
    scale = np.abs(expected).max()
    return float(np.abs(np.asarray(found) - expected).max() / scale) if scale else 0.0


@pytest.fixture(scope="module")
def at_once(case: SimpleNamespace) -> dict[float, Any]:
    return {z: jax.device_get(gradient(case, chunks=1, z=z)) for z in (0.0, 1e-2)}


@pytest.mark.parametrize("z", [0.0, 1e-2])
@pytest.mark.parametrize("chunks", [2, 5, 1000])
def test_chunks_of_tokens_change_neither_losses_nor_gradients(
    case: SimpleNamespace, at_once: dict[float, Any], chunks: int, z: float
) -> None:
    found = jax.device_get(gradient(case, chunks=chunks, z=z))
    errors = jax.tree.map(relative, found, at_once[z])
    assert np.abs(at_once[z][0][0]["head"]).max() > 0.1
    assert (np.abs(at_once[z][1].z).max() > 0) == (z > 0)
    assert max(jax.tree.leaves(errors)) <= 1e-6, errors
    masked = np.asarray(~case.mask)
    assert (found[0][1][masked] == 0).all()
    assert (found[1].xent[masked] == 0).all()


def test_each_depth_has_a_gradient_in_its_own_head_alone(case: SimpleNamespace) -> None:
    (params, _), _ = jax.device_get(gradient(case, chunks=4, z=0.0, depth=1))
    (expected, _), _ = jax.device_get(gradient(case, chunks=1, z=0.0, depth=1))
    assert relative(params["ahead"], expected["ahead"]) <= 1e-6
    assert not params["head"].any()
    assert not params["embedding"].any()


def test_a_forward_pass_of_chunks_gives_the_same_losses(
    case: SimpleNamespace, at_once: dict[float, Any]
) -> None:
    _, loss = jax.device_get(forward(case, chunks=4, z=1e-2))
    assert max(jax.tree.leaves(jax.tree.map(relative, loss, at_once[1e-2][1]))) <= 1e-6


def test_reported_losses_of_chunks_carry_no_gradient(case: SimpleNamespace) -> None:
    def reported(hidden: Any) -> Any:
        loss = objective(case.params, hidden, case, chunks=4, z=1e-2)[1]
        return loss.xent.sum() + loss.z.sum()

    found = jax.jit(jax.grad(reported), compiler_options=FAST_COMPILE)(case.hidden)
    assert not np.asarray(found).any()


@pytest.mark.parametrize("wrong", [-1, VOCAB])
def test_a_target_outside_the_vocabulary_is_nan_in_chunks_too(
    case: SimpleNamespace, wrong: int
) -> None:
    row, column = np.argwhere(np.asarray(case.mask))[-1]
    targets = case.targets.at[row, column].set(wrong)
    other = SimpleNamespace(**vars(case) | {"targets": targets})
    _, loss = forward(other, chunks=4, z=0.0)
    assert np.isnan(loss.objective)
    assert np.argwhere(np.isnan(loss.xent)).tolist() == [[row, column]]


def vocabulary_products(jaxpr: Any) -> int:
    products = [e for e in equations(jaxpr) if e.primitive.name == "dot_general"]
    return sum(any(VOCAB in v.aval.shape for v in (*e.invars, *e.outvars)) for e in products)


@pytest.mark.parametrize("chunks", [1, 4])
def test_the_loss_and_its_gradients_are_three_vocabulary_sized_products(
    case: SimpleNamespace, chunks: int
) -> None:
    step = jax.grad(objective, argnums=(0, 1), has_aux=True)
    forward = jax.make_jaxpr(lambda h: objective(case.params, h, case, chunks=chunks, z=0.1))
    both = jax.make_jaxpr(lambda p, h: step(p, h, case, chunks=chunks, z=0.1))
    assert vocabulary_products(forward(case.hidden)) == 1
    assert vocabulary_products(both(case.params, case.hidden)) == 3


def test_logits_of_all_tokens_never_exist_in_chunks(case: SimpleNamespace) -> None:
    def largest(chunks: int) -> int:
        step = jax.grad(objective, argnums=(0, 1), has_aux=True)
        jaxpr = jax.make_jaxpr(lambda p, h: step(p, h, case, chunks=chunks, z=0.1))(
            case.params, case.hidden
        )
        return max(v.aval.size for e in equations(jaxpr) for v in e.outvars)

    assert largest(chunks=1) == ROWS * LENGTH * VOCAB
    assert largest(chunks=5) == max(ROWS * 8 * VOCAB, ROWS * 40 * WIDTH)


@pytest.mark.parametrize("matrix", ["float32", "bfloat16"])
def test_only_the_heads_gradient_is_carried_from_chunk_to_chunk_and_in_float32(
    case: SimpleNamespace, matrix: str
) -> None:
    params = jax.tree.map(lambda p: p.astype(matrix), case.params)
    step = jax.grad(objective, argnums=(0, 1), has_aux=True)
    jaxpr = jax.make_jaxpr(lambda p, h: step(p, h, case, chunks=4, z=0.1))(
        params, case.hidden.astype(jnp.bfloat16)
    )
    carried = [aval for equation in equations(jaxpr) for aval in carries(equation)]
    assert [(aval.dtype, aval.size) for aval in carried] == [("float32", WIDTH * VOCAB)]


def test_a_bfloat16_heads_gradient_does_not_stall_over_many_chunks() -> None:
    """Each of 600 tokens adds about 1: in bfloat16 the sum would stay at 256."""
    tokens = 600
    hidden = jnp.ones((1, tokens, 1), jnp.bfloat16)
    ones = jnp.ones((1, tokens))

    def total(head: Any) -> Any:
        return head_loss(
            {"head": head}, hidden, jnp.zeros((1, tokens), jnp.int32), ones > 0, ones,
            logits=linear, depth=0, z_loss_multiplier=0.0, num_vocab_tiling=tokens,
        ).objective  # fmt: skip

    found = jax.grad(total)(jnp.asarray([[-9.0, 9.0]], jnp.bfloat16))
    np.testing.assert_allclose(np.asarray(found, np.float32), [[-600, 600]], rtol=2**-8)


def through_the_head(
    logits: Any, targets: Any, weights: Any, *, z: float, chunks: int
) -> tuple[Any, Any]:
    """Give logits to head_loss as hidden states of an identity head; return d logits and loss."""
    identity = {"head": jnp.eye(logits.shape[-1])}

    def total(hidden: Any) -> Any:
        loss = head_loss(
            identity, hidden, targets, jnp.ones(targets.shape, bool), weights,
            logits=linear, depth=0, z_loss_multiplier=z, num_vocab_tiling=chunks,
        )  # fmt: skip
        return loss.objective, loss

    return jax.jit(jax.grad(total, has_aux=True), compiler_options=FAST_COMPILE)(logits)


KINDS = sorted({k.rsplit("_", 1)[0] for k in MEGATRON.files if k.endswith("_loss")})


def test_golden_keys_of_megatrons_cross_entropy_are_all_known() -> None:
    """Of 23 keys 12 are compared; label smoothing (ls0.1) is no part of pre-training Ling2."""
    compared = [k for k in KINDS if k.endswith("ls0.0")]
    assert [k for k in KINDS if k not in compared] == [
        f"{tp}_{dtype}_ls0.1" for tp in ("tp1", "tp2") for dtype in ("bf16", "f32")
    ]
    assert compared == [f"{tp}_{d}_ls0.0" for tp in ("tp1", "tp2") for d in ("bf16", "f32")]
    known = [k for k in MEGATRON.files if any(k.startswith(kind) for kind in KINDS)]
    assert sorted(set(MEGATRON.files) - set(known)) == ["grad_output", "logits", "target"]
    assert len(MEGATRON.files) == 23


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("kind", [k for k in KINDS if k.endswith("ls0.0")])
def test_golden_cross_entropy_of_megatron_holds_with_an_outlier(
    kind: str, chunks: int, show_golden: Callable[..., None]
) -> None:
    """One logit is 80 above the others: exp overflows without the largest subtracted."""
    parallel, name, _ = kind.split("_")
    dtype, atol = {"f32": (jnp.float32, 2e-6), "bf16": (jnp.bfloat16, 4e-3)}[name]
    assert MEGATRON["logits"].max() > 79
    target = jnp.asarray(MEGATRON["target"], jnp.int32)
    logits = jnp.asarray(MEGATRON["logits"], dtype)
    found, loss = through_the_head(
        logits, target, jnp.asarray(MEGATRON["grad_output"]), z=0.0, chunks=chunks
    )
    shards = [MEGATRON[f"{kind}_grad_shard{i}"] for i in range(int(parallel.removeprefix("tp")))]
    error = np.abs(loss.xent - MEGATRON[f"{kind}_loss"]).max()
    grad_error = np.abs(np.asarray(found, np.float32) - np.concatenate(shards, -1)).max()
    show_golden(
        f"megatron/loss/vocab_parallel_ce.npz ({kind})", cases=f"{1 + len(shards)} keys",
        worst=float(error), tolerance=1e-5,
    )  # fmt: skip
    assert error < 1e-5  # of a loss near 80
    assert grad_error < atol  # the gradient is rounded to the logits' type


CASES = sorted({k.split("/")[0] for k in MAXTEXT.files if k.startswith("ce_")})


def test_golden_cases_of_maxtexts_cross_entropy_are_all_compared() -> None:
    assert [f"ce_{d}_z{z}" for d in ("bfloat16", "float32") for z in ("0", "0.001")] == CASES
    assert len([k for k in MAXTEXT.files if k.startswith("ce_")]) == 3 * len(CASES)


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("name", CASES)
def test_golden_cross_entropy_and_z_loss_of_the_reference(
    name: str, chunks: int, show_golden: Callable[..., None]
) -> None:
    _, dtype, z = name.split("_")
    found, loss = through_the_head(
        jnp.asarray(MAXTEXT["ce/logits"], dtype), jnp.asarray(MAXTEXT["ce/targets"]),
        jnp.asarray(MAXTEXT["ce/cotangent"]), z=float(z.removeprefix("z")), chunks=chunks,
    )  # fmt: skip
    values = {"xent": loss.xent + loss.z, "z_loss": loss.z, "dlogits": found}
    # The reference rounds every result to bfloat16 (relative 2^-8, twice where two are added);
    # ours is float32 from the same bfloat16 logits.
    rtol, atol = (0.0, 2e-6) if dtype == "float32" else (2**-7, 2**-8)
    worst = 0.0
    for key, value in values.items():
        wanted, value = MAXTEXT[f"{name}/{key}"], np.asarray(value, np.float32)
        # Losses near 80 are compared relative to the largest: float32 has 7 digits.
        scale = max(1.0, float(np.abs(wanted).max())) if dtype == "float32" else 1.0
        np.testing.assert_allclose(value, wanted, rtol=rtol, atol=atol * scale, err_msg=key)
        beyond = np.abs(value - wanted) - rtol * np.abs(wanted)
        worst = max(worst, float(beyond.max()) / scale)
    show_golden(f"maxtext/small.npz ({name})", cases="3/3 keys", worst=worst, tolerance=atol)


@pytest.mark.parametrize(
    "name", ["uneven_z0.001_GA4_pertoken0_per_layer", "uneven_z0_GA1_pertoken1_pooled"]
)
def test_golden_maxtext_cases_hold_in_chunks_that_do_not_divide_the_sequence(
    name: str, maxtext: SimpleNamespace, run_toy_step: Any
) -> None:
    """32 tokens in 5 chunks of 7; each head has its own matrix, and masked states are NaN."""
    segments, z, micro, per_token, norm = name.split("_", 4)
    log, grads = run_toy_step(
        "ling_trainer",
        maxtext.inputs[f"seg_{segments}"],
        num_microbatches=int(micro.removeprefix("GA")),
        calculate_per_token_loss=per_token == "pertoken1",
        mtp_per_layer_loss_norm=norm == "per_layer",
        z_loss_multiplier=float(z[1:]),
        load_balance_loss_weight=float(maxtext.inputs["lb_coeff"]),
        mtp_loss_scaling_factor=float(maxtext.inputs["mtp_scale"]),
        num_vocab_tiling=5,
        masked_nan=True,
    )
    assert maxtext.inputs[f"seg_{segments}"].shape[1] % 5
    for key in ("W", "M1", "M2"):
        np.testing.assert_allclose(
            grads[key], maxtext.expected[f"{name}/grad_{key}"], rtol=0, atol=2e-6
        )
    for key in ("lm_loss", "z_loss", "mtp_loss"):
        assert abs(log[f"learning/{key}"] - maxtext.expected[f"{name}/{key}"]) < 1e-5
