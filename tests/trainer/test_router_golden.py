"""Every number of Megatron's router and of Ling's: choice, weights, losses, counts, gradients.

T tokens, E experts. Megatron's arrays lead with the sequence, [S, B, ...]; ours with the row.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from ling_trainer.auxiliaries import no_loads
from ling_trainer.batch import Batch
from ling_trainer.config import LossConfig
from ling_trainer.loss import microbatch_loss
from ling_trainer.model.layers import Tokens
from ling_trainer.model.outputs import ModelOutputs
from ling_trainer.model.router import balance_scores, join_layers, route, router_stats
from ling_trainer.model_config import ModelConfig
from ling_trainer.optimizer import router_bias_update
from ling_trainer.presets import ling2_tiny

FOLDER = Path(__file__).parents[1] / "golden"
GOLDEN = np.load(FOLDER / "megatron" / "loss" / "moe_router.npz")
OP_ROUTER = FOLDER / "ling" / "op_router"
TOP_K, GROUPS = 8, {"n_group": 8, "topk_group": 4}
NO_GROUPS = {"n_group": 1, "topk_group": 1}
SOFTMAX = {"score_function": "softmax", "routed_scaling_factor": 1.0}
# The settings that made each case; with a bias or without.
ROUTES: dict[str, tuple[dict[str, Any], bool]] = {
    "ling2": (GROUPS, True),
    "sigmoid_nogroup": (NO_GROUPS, True),
    "sigmoid_nobias": (GROUPS, False),
    "softmax_pre": (NO_GROUPS | SOFTMAX | {"moe_router_pre_softmax": True}, False),
    "softmax_post": (NO_GROUPS | SOFTMAX, False),
    "softmax_pre_group": (GROUPS | SOFTMAX | {"moe_router_pre_softmax": True}, False),
}
AUX_SCORES = ("sigmoid", "softmax")
# Megatron's name of each form's logged value; what another form leaves behind is logged as 0.
FORMS = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
RUNS = [(form, per_token, scale) for form in FORMS for per_token in (0, 1) for scale in (1, 0.25)]
BIAS_RULES = {"": "megatron", "_ling_zero_mean": "ling_zero_mean"}
AUX_COEFFICIENT, Z_COEFFICIENT = 0.01, 0.001  # of the runs of the whole router
FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
TOLERANCE = 1e-6  # float32 sums in another order; of the largest element, which is near 1


def config(**settings: Any) -> ModelConfig:
    small = ling2_tiny()["model"] | {"num_experts": 32, "num_experts_per_tok": TOP_K}
    return ModelConfig.model_validate(small | GROUPS | settings)


def tokens_of(rows: int, length: int) -> Tokens:
    shape = (rows, length)
    return Tokens(
        positions=jnp.zeros(shape, int), documents=None, valid=jnp.ones(shape, bool), loss_groups=1
    )


def scattered(routing: Any, experts: int = 32) -> Any:
    """Return [T, E]: the weight of each chosen expert, 0 elsewhere."""
    rows = jnp.arange(routing.indices.shape[0])[:, None]
    empty = jnp.zeros((routing.indices.shape[0], experts))
    return empty.at[rows, routing.indices].set(routing.weights)


def worst_of(found: dict[str, Any], prefix: str) -> float:
    """Return the largest error, relative to the golden's largest element."""
    errors = {
        name: np.abs(np.asarray(value) - GOLDEN[f"{prefix}_{name}"]).max()
        / max(1.0, np.abs(GOLDEN[f"{prefix}_{name}"]).max())
        for name, value in found.items()
    }
    return float(max(errors.values()))


def run_names() -> dict[tuple[str, int, float], str]:
    return {run: f"router_{run[0]}_pt{run[1]}_s{run[2]}" for run in RUNS}


def test_golden_router_file_has_no_key_that_is_not_compared() -> None:
    used = {"logits", "expert_bias", "route_cotangent", "z_loss_coeff1"}
    used |= {f"{name}_{part}" for name in ROUTES for part in ("probs", "map", "dlogits")}
    parts = ("map", "scores", "loss_coeff1")
    used |= {f"aux_{name}_{part}" for name in AUX_SCORES for part in parts}
    used |= {"bias_counts", "bias_before"}
    used |= {f"bias_after_rate1e-3{name}" for name in BIAS_RULES}
    used |= {"router_input", "router_weight", "router_cotangent"}
    parts = ("dW", "dx", "logged", "logged_names")
    used |= {f"{name}_{part}" for name in run_names().values() for part in parts}
    used |= {f"router_{form}_{part}" for form in FORMS for part in ("probs", "tokens_per_expert")}
    assert used == set(GOLDEN.files)
    assert len(used) == 89


@pytest.mark.parametrize("name", ROUTES)
def test_golden_route_choice_weights_and_vjp(name: str, show_golden: Callable[..., None]) -> None:
    settings, biased = ROUTES[name]
    bias = jnp.asarray(GOLDEN["expert_bias"]) if biased else jnp.zeros(32)

    def probs(logits: Any) -> tuple[Any, Any]:
        routing = route(logits, bias, config=config(**settings))
        return scattered(routing), routing.indices

    @functools.partial(jax.jit, compiler_options=FAST_COMPILE)
    def run(logits: Any, cotangent: Any) -> tuple[Any, ...]:
        found, vjp, indices = jax.vjp(probs, logits, has_aux=True)
        return found, indices, *vjp(cotangent)

    cotangent = jnp.asarray(GOLDEN["route_cotangent"], jnp.float32)
    found, indices, dlogits = run(jnp.asarray(GOLDEN["logits"]), cotangent)
    chosen = np.zeros((48, 32), bool)
    np.put_along_axis(chosen, np.asarray(indices), values=True, axis=1)
    np.testing.assert_array_equal(chosen, GOLDEN[f"{name}_map"])
    worst = worst_of({"probs": found, "dlogits": dlogits}, name)
    show_golden(f"moe_router.npz ({name})", cases="3/3 keys", worst=worst, tolerance=TOLERANCE)
    assert worst <= TOLERANCE


@pytest.mark.parametrize("name", AUX_SCORES)
def test_golden_balance_scores_choice_and_losses(
    name: str, show_golden: Callable[..., None]
) -> None:
    logits, c = jnp.asarray(GOLDEN["logits"]), config(score_function=name)
    bias = jnp.asarray(GOLDEN["expert_bias"])

    def stats(logits: Any, tokens: Tokens) -> Any:
        return router_stats(logits, route(logits, bias, config=c), bias, tokens, config=c)

    @functools.partial(jax.jit, compiler_options=FAST_COMPILE)
    def run(logits: Any) -> tuple[Any, ...]:
        alone = jax.vmap(lambda x: stats(x[None], tokens_of(1, 1)).loads)(logits)
        return alone, stats(logits, tokens_of(1, 48)), balance_scores(logits, config=c)

    alone, every, scores = run(logits)
    np.testing.assert_array_equal(alone, GOLDEN[f"aux_{name}_map"])
    assert (GOLDEN["aux_sigmoid_map"] != GOLDEN["ling2_map"]).any(1).all()  # no bias, no groups
    found = {"scores": scores, "loss_coeff1": every.aux[0]}
    worst = worst_of(found, f"aux_{name}")
    worst = max(worst, abs(float(every.z[0]) / GOLDEN["z_loss_coeff1"] - 1))
    show_golden(
        f"moe_router.npz (aux_{name}, z)", cases="4/4 keys", worst=worst, tolerance=TOLERANCE
    )
    assert worst <= TOLERANCE


def test_golden_router_z_loss_is_of_the_raw_logits(
    maxtext: SimpleNamespace, show_golden: Callable[..., None]
) -> None:
    small = config(num_experts=8, num_experts_per_tok=2, **NO_GROUPS)
    logits, bias = jnp.asarray(maxtext.small["router_z/logits"]).reshape(10, 8), jnp.ones(8)

    @functools.partial(jax.jit, compiler_options=FAST_COMPILE)
    def run(logits: Any) -> Any:
        routing = route(logits, bias, config=small)
        return router_stats(logits, routing, bias, tokens_of(2, 5), config=small).z[0]

    worst = abs(float(run(logits)) / float(maxtext.small["router_z/raw_mean_lse_sq"]) - 1)
    show_golden("maxtext/small.npz (router_z)", cases="1/1", worst=worst, tolerance=TOLERANCE)
    assert worst <= TOLERANCE


@pytest.mark.parametrize("name", BIAS_RULES)
def test_golden_router_bias_moves_as_in_megatron_and_in_lings_patch(name: str) -> None:
    after = router_bias_update(
        jnp.asarray(GOLDEN["bias_before"]),
        jnp.asarray(GOLDEN["bias_counts"], jnp.int32),
        rate=1e-3,
        bias_update=BIAS_RULES[name],  # type: ignore[arg-type]
    )
    wanted = GOLDEN[f"bias_after_rate1e-3{name}"]
    np.testing.assert_allclose(after, wanted, rtol=0, atol=1e-7)


def rows_first(x: np.ndarray) -> Any:
    """Turn [S, B, ...] or [S B, ...] of 12 tokens and 4 sequences into [B S, ...]."""
    return jnp.asarray(np.swapaxes(x.reshape(12, 4, -1), 0, 1).reshape(48, -1), jnp.float32)


def tokens_first(x: Any) -> np.ndarray:
    """Undo rows_first."""
    return np.swapaxes(np.asarray(x).reshape(4, 12, -1), 0, 1).reshape(48, -1)


@functools.cache
def whole_router(form: Any) -> Callable[..., Any]:
    """Return a function of (weight, x, share) to gradients, probabilities and terms."""
    c, bias = config(), jnp.asarray(GOLDEN["expert_bias"])
    cotangent = rows_first(GOLDEN["router_cotangent"])
    loss = LossConfig(
        load_balance_loss_weight=AUX_COEFFICIENT,
        moe_z_loss_weight=Z_COEFFICIENT,
        moe_router_load_balancing_type=form,
    )
    ids = jnp.zeros((4, 12), jnp.int32)
    batch = Batch(inputs=ids, targets=ids, positions=ids, segment_ids=ids + 1, loss_mask=ids == 0)

    def objective(weight: Any, x: Any, share: Any) -> Any:
        scores = jnp.einsum("td,ed->te", x, weight, precision="highest")
        routing = route(scores, bias, config=c)
        stats = router_stats(scores, routing, bias, tokens_of(4, 12), config=c)
        router = join_layers([jax.tree.map(lambda s: s[None], stats)], config=c, loss_groups=1)

        def apply(params: Any, router_bias: Any, batch: Batch) -> ModelOutputs:
            return ModelOutputs(hidden=jnp.zeros((4, 12, 1)), mtp_hidden=(), router=router)

        added, terms = microbatch_loss(
            {}, bias[None], batch, jnp.zeros((4, 12)), share, apply=apply, config=loss,
            logits=lambda params, hidden, depth: hidden, num_microbatches=1,
            previous=no_loads(bias[None], loss),
        )  # fmt: skip
        probs = scattered(routing)
        return (cotangent * probs).sum() + added, (probs, terms)

    gradients = jax.grad(objective, argnums=(0, 1), has_aux=True)
    return jax.jit(gradients, compiler_options=FAST_COMPILE)


@pytest.mark.parametrize("run", RUNS, ids=run_names().get)
def test_golden_whole_router_forward_and_backward(
    run: tuple[str, int, float], show_golden: Callable[..., None]
) -> None:
    form, per_token, scale = run
    name = run_names()[run]
    # Megatron scales what it adds in the backward pass, by the router's tokens too in token mode.
    share = jnp.full((1,), scale * (48.0 if per_token else 1.0), jnp.float32)
    weight, x = jnp.asarray(GOLDEN["router_weight"]), rows_first(GOLDEN["router_input"])
    (d_weight, dx), (probs, terms) = whole_router(form)(weight, x, share)
    found = {"dW": d_weight, "dx": tokens_first(dx).reshape(12, 4, 16)}
    worst = worst_of(found, name)
    worst = max(worst, worst_of({"probs": tokens_first(probs)}, f"router_{form}"))
    np.testing.assert_array_equal(
        terms.expert_counts[0], GOLDEN[f"router_{form}_tokens_per_expert"]
    )
    names, values = GOLDEN[f"{name}_logged_names"], GOLDEN[f"{name}_logged"]
    logged = dict(zip(names.tolist(), values, strict=True))
    worst = max(worst, abs(float(terms.load_balancing_loss) / logged.pop(FORMS[form]) - 1))
    worst = max(worst, abs(float(terms.raw_moe_z_loss) / logged.pop("z_loss") - 1))
    assert not any(logged.values())
    show_golden(f"moe_router.npz ({name})", cases="6/6 keys", worst=worst, tolerance=TOLERANCE)
    assert worst <= TOLERANCE


def test_golden_op_router_choice_weights_and_vjp(show_golden: Callable[..., None]) -> None:
    op = load_file(OP_ROUTER / "router.safetensors")
    facts = json.loads((OP_ROUTER / "router.json").read_text())
    names = set(ModelConfig.model_fields) & set(facts)
    assert set(facts) - names == {"seed", "tie_margin"}
    real = config(**{name: facts[name] for name in names})

    def weights(x: Any, w: Any) -> Any:
        scores = jnp.einsum("td,ed->te", x, w, precision="highest")
        routing = route(scores, jnp.asarray(op["expert_bias"]), config=real)
        return routing.weights, (routing.indices, scores)

    found, vjp, (indices, scores) = jax.vjp(
        weights, jnp.asarray(op["x"]), jnp.asarray(op["weight"]), has_aux=True
    )
    np.testing.assert_array_equal(indices, op["topk_idx"])
    pairs = {"topk_weight": found, "logits": scores}
    pairs |= dict(zip(("dx", "dweight"), vjp(jnp.asarray(op["dtopk_weight"])), strict=True))
    given = {"x", "weight", "expert_bias", "dtopk_weight", "topk_idx"}
    assert given | set(pairs) == set(op)
    worst = max(np.abs(value - op[name]).max() for name, value in pairs.items())
    cases = "48 x 8 choices, weights, logits, 2 gradients"
    show_golden("op_router", cases=cases, worst=worst, tolerance=5e-6)
    assert worst <= 5e-6


@pytest.mark.parametrize(
    ("name", "rule"), [("plain", "megatron"), ("zero_mean", "ling_zero_mean")]
)
def test_golden_op_router_bias_moves_from_counts_that_are_no_integers(
    name: str, rule: Any
) -> None:
    step = json.loads((OP_ROUTER / "bias_update.json").read_text())
    after = router_bias_update(
        jnp.asarray(step["expert_bias"]),
        jnp.asarray(step["tokens_per_expert"]),
        rate=step["update_rate"],
        bias_update=rule,
    )
    np.testing.assert_allclose(after, step[name], rtol=0, atol=1e-7)
