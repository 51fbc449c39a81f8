"""Balance losses of every form and the indexer's slot, summed over virtual ranks in float64.

K micro-batches, D loss groups, B rows, S tokens, H hidden width, L routers, E experts.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ling_trainer.batch import Batch
from ling_trainer.health_metrics import LOGGED
from ling_trainer.model.layers import Tokens
from ling_trainer.model.outputs import ModelOutputs
from ling_trainer.model.router import join_layers, route, router_stats
from ling_trainer.model_config import ModelConfig
from ling_trainer.optimizer import make_optimizer
from ling_trainer.presets import ling2_tiny
from ling_trainer.report import to_log
from ling_trainer.schema import ConfigError
from ling_trainer.step import apply_gradients, init_state, loss_and_gradients

FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
K, B, S, H, L, E, V, TOP_K = 2, 8, 6, 5, 2, 8, 7, 2
FORMS = ("aux_loss", "seq_aux_loss", "global_aux_loss")
COEFFICIENT = 0.7


@pytest.fixture(scope="module")
def case() -> SimpleNamespace:
    """Rows of different lengths, one without a token; micro-batches and ranks differ."""
    numbers = np.random.default_rng(0)
    segments = np.zeros((B, S), np.int32)
    for row, length in enumerate((6, 2, 5, 6, 0, 3, 4, 1)):
        segments[row, :length] = 1
    draw = numbers.normal
    return SimpleNamespace(
        segments=segments,
        mask=(segments != 0) & (numbers.random((B, S)) < 0.8),
        ids=numbers.integers(0, V, (B, S)),
        embedding=draw(size=(V, H)),
        params={"R": draw(size=(L, H, E)), "W": draw(size=(H, V)), "I": draw(size=(H,))},
        bias=draw(size=(L, E)),
    )


@pytest.fixture(scope="module")
def run(case: SimpleNamespace, step_config: Any) -> Any:
    """Run the product's step on a model of L routers, and an indexer and one depth if asked."""
    model = ModelConfig.model_validate(
        ling2_tiny()["model"] | {"num_experts": E, "num_experts_per_tok": TOP_K}
    )
    embedding = jnp.asarray(case.embedding, jnp.float32)

    def apply(
        params: Any, router_bias: Any, batch: Batch, *, ranks: int, indexer: bool, mtp: bool
    ) -> ModelOutputs:
        hidden = embedding[batch.inputs]
        tokens = Tokens(
            positions=batch.positions, documents=None, valid=batch.segment_ids != 0,
            loss_groups=ranks,
        )  # fmt: skip

        def measure(matrix: Any, bias: Any) -> Any:
            scores = jnp.matmul(hidden.reshape(-1, H), matrix, precision="highest")
            return router_stats(
                scores, route(scores, bias, config=model), bias, tokens, config=model
            )

        stats = jax.vmap(measure)(params["R"], router_bias)
        value = jnp.square(hidden @ params["I"]).reshape(ranks, -1).mean(-1)
        return ModelOutputs(
            hidden=hidden,
            mtp_hidden=(hidden,) if mtp else (),
            router=join_layers([stats], config=model, loss_groups=ranks),
            indexer_loss=value if indexer else None,
        )

    def logits(params: Any, hidden: Any, depth: int) -> Any:
        return hidden @ params["W"] * (1.0 + depth)

    params, bias = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (case.params, case.bias))
    ids = jnp.asarray(case.ids, jnp.int32)
    batch = Batch(
        inputs=ids, targets=jnp.roll(ids, -1, 1), positions=ids,
        segment_ids=jnp.asarray(case.segments), loss_mask=jnp.asarray(case.mask),
    )  # fmt: skip

    def step(
        *, micro: int = K, ranks: int = 1, indexer: bool = False, report: bool = False, **loss: Any
    ) -> tuple[Any, Any]:
        """Return terms, or with `report` that of a step with every loss, and gradients."""
        config = step_config(
            gradient_accumulation_steps=micro, loss={"loss_groups": ranks, **loss}
        )
        tx = make_optimizer(config.optimizer)

        @partial(jax.jit, compiler_options=FAST_COMPILE)
        def compiled(params: Any) -> Any:
            terms, grads = loss_and_gradients(
                params, bias, batch, logits=logits, config=config,
                apply=partial(apply, ranks=ranks, indexer=indexer, mtp=report),
            )  # fmt: skip
            if not report:
                return terms, grads
            return apply_gradients(
                init_state(params, bias, tx), terms, grads, tx=tx, config=config,
                total_weights=batch.loss_mask.sum(dtype="int32"),
            )[1], grads  # fmt: skip

        return jax.device_get(compiled(params))

    return step


def slopes(form: str, q: Any, valid: Any, *, micro_valid: Any, running: Any) -> Any:
    """Return d loss / d q of one rank's rows [b, S, E], from which the loss is sum(slope q)."""
    if form == "global_aux_loss":
        total = max(micro_valid.sum(), 1)
        return np.where(valid[..., None], E / (TOP_K * total**2) * running, 0.0)
    if form == "aux_loss":
        loads = plain_loads(q, valid)
        return np.where(valid[..., None], E / (TOP_K * max(valid.sum(), 1) ** 2) * loads, 0.0)
    rows = max(valid.any(1).sum(), 1)
    each = [slopes("aux_loss", q[[i]], valid[[i]], micro_valid=None, running=None) / rows
            for i in range(len(q))]  # fmt: skip
    return np.concatenate(each)


def plain_loads(q: Any, valid: Any) -> Any:
    chosen = np.argsort(-q, axis=-1)[..., :TOP_K]
    return np.bincount(chosen[valid].ravel(), minlength=E)


def brute_force(case: SimpleNamespace, *, form: str, ranks: int, per_token: bool) -> Any:
    """Return objective, contribution, raw value and gradient of R, rank by rank."""
    hidden, valid = case.embedding[case.ids], case.segments != 0
    scores = np.einsum("bsh,lhe->lbse", hidden, case.params["R"])
    s = 1 / (1 + np.exp(-scores))
    q = s / s.sum(-1, keepdims=True)
    out = dict.fromkeys(("objective", "contribution", "raw"), 0.0)
    grad = np.zeros_like(case.params["R"])
    for layer in range(L):
        seen = np.zeros(E)
        for k in range(K):
            rows = np.arange(k, B, K)
            seen += plain_loads(q[layer, rows], valid[rows])
            for own in np.split(rows, ranks):
                share = case.mask[own].sum() / case.mask.sum() if per_token else 1 / (K * ranks)
                slope = slopes(
                    form, q[layer, own], valid[own], micro_valid=valid[rows],
                    running=seen / (k + 1),
                )  # fmt: skip
                value = (slope * q[layer, own]).sum()
                out["objective"] += COEFFICIENT * share * value
                out["contribution"] += COEFFICIENT * value / (K * ranks)
                out["raw"] += value / (K * L * (1 if form == "global_aux_loss" else ranks))
                own_s, own_q = s[layer, own], q[layer, own]
                inner = slope - (slope * own_q).sum(-1, keepdims=True)
                d_scores = inner / own_s.sum(-1, keepdims=True) * own_s * (1 - own_s)
                grad[layer] += (
                    COEFFICIENT * share * np.einsum("bsh,bse->he", hidden[own], d_scores)
                )
    return out, grad


@pytest.mark.parametrize(
    ("form", "ranks", "per_token"),
    [("global_aux_loss", 1, True), *[(form, 2, mode) for form in FORMS for mode in (True, False)]],
)
def test_each_balance_loss_equals_a_sum_over_ranks_and_micro_batches(
    case: SimpleNamespace, run: Any, form: str, ranks: int, per_token: bool
) -> None:
    terms, grads = run(
        ranks=ranks, calculate_per_token_loss=per_token, load_balance_loss_weight=COEFFICIENT,
        moe_router_load_balancing_type=form,
    )  # fmt: skip
    out, grad = brute_force(case, form=form, ranks=ranks, per_token=per_token)
    assert terms.objective - terms.lm == pytest.approx(out["objective"], abs=1e-5)
    assert terms.moe_lb_loss == pytest.approx(out["contribution"], rel=1e-5)
    assert terms.load_balancing_loss == pytest.approx(out["raw"], rel=1e-5)
    np.testing.assert_allclose(grads["R"], grad, atol=2e-6)


def test_the_data_tells_the_forms_the_modes_and_the_groups_apart(case: SimpleNamespace) -> None:
    found = [
        brute_force(case, form=form, ranks=ranks, per_token=per_token)[1]
        for form in FORMS
        for ranks in (1, 2)
        for per_token in (True, False)
    ]
    for i, one in enumerate(found):
        for other in found[:i]:
            assert np.abs(one - other).max() > 1e-3


@pytest.mark.parametrize("per_token", [True, False], ids=["per_token", "per_micro_batch"])
def test_the_indexers_loss_is_weighted_by_share_and_reported_as_a_plain_mean(
    case: SimpleNamespace, run: Any, per_token: bool
) -> None:
    terms, grads = run(
        ranks=2, indexer=True, calculate_per_token_loss=per_token,
        indexer_loss_scaling_factor=0.3,
    )  # fmt: skip
    hidden = case.embedding[case.ids]
    scores, objective, reported, grad = hidden @ case.params["I"], 0.0, 0.0, np.zeros(H)
    for k in range(K):
        for own in np.split(np.arange(k, B, K), 2):
            share = case.mask[own].sum() / case.mask.sum() if per_token else 1 / (2 * K)
            value = (scores[own] ** 2).mean()
            objective += 0.3 * share * value
            reported += 0.3 * value / (2 * K)
            slope = 2 * scores[own] / scores[own].size
            grad += 0.3 * share * np.einsum("bs,bsh->h", slope, hidden[own])
    assert terms.indexer_loss == pytest.approx(reported, rel=1e-5)
    assert terms.objective - terms.lm == pytest.approx(objective, abs=1e-5)
    np.testing.assert_allclose(grads["I"], grad, atol=2e-6)


def test_an_indexer_that_is_not_configured_has_neither_key_nor_gradient(run: Any) -> None:
    report, grads = run(indexer=True, report=True)
    log = to_log(report)
    assert "learning/indexer_loss" not in log
    assert not grads["I"].any()
    optional = {metric.log_key for metric in LOGGED if metric.optional}
    assert optional - set(log) == {"learning/indexer_loss"}


def test_an_indexers_loss_of_a_model_without_indexer_is_refused_by_name(run: Any) -> None:
    with pytest.raises(ConfigError, match=r"loss\.indexer_loss_scaling_factor=0\.3.*set it to 0"):
        run(indexer_loss_scaling_factor=0.3)


@pytest.mark.parametrize("form", FORMS[1:])
def test_a_form_that_the_model_does_not_measure_is_refused(
    form: Any, toy: SimpleNamespace, product: Any, step_config: Any, maxtext: SimpleNamespace
) -> None:
    modules = product("ling_trainer")
    config = step_config(loss={"moe_router_load_balancing_type": form})
    batch = toy.batch(modules, maxtext.inputs["seg_uneven"])
    with pytest.raises(ConfigError, match=rf"moe_router_load_balancing_type={form}.*use aux_loss"):
        loss_and_gradients(toy.params, toy.bias, batch, config=config, **toy.build(modules))


COEFFICIENTS = st.sampled_from((1.0, 0.01, 0.0, 3.0))


@pytest.mark.slow
@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    micro=st.sampled_from((1, 2, 4)),
    form=st.sampled_from(FORMS),
    per_token=st.booleans(),
    tunix=st.booleans(),
    ranks=st.sampled_from((1, 2)),
    weights=st.tuples(*[COEFFICIENTS] * 5),
)
def test_the_logged_loss_is_the_sum_of_its_reported_parts(
    run: Any, micro: int, form: str, per_token: bool, tunix: bool, ranks: int, weights: Any
) -> None:
    names = ("z_loss_multiplier", "load_balance_loss_weight", "moe_z_loss_weight",
             "mtp_loss_scaling_factor", "indexer_loss_scaling_factor")  # fmt: skip
    report, _ = run(
        micro=micro, ranks=ranks, indexer=True, report=True, calculate_per_token_loss=per_token,
        use_tunix_gradient_accumulation=tunix, moe_router_load_balancing_type=form,
        **dict(zip(names, weights, strict=True)),
    )  # fmt: skip
    log = to_log(report)
    parts = ("lm_loss", "z_loss", "moe_lb_loss", "moe_z_loss", "mtp_loss", "indexer_loss")
    values = [log.get(f"learning/{part}", 0.0) for part in parts]
    assert log["learning/loss"] == pytest.approx(sum(values), rel=1e-6, abs=1e-6)
    assert ("learning/indexer_loss" in log) == (weights[4] > 0)
    for value, weight in zip(values[1:], weights, strict=True):
        assert (value > 0) == (weight > 0)
