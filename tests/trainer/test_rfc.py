"""The test matrix of the training-flow RFC, by its numbers, where each claim can hold.

Where it cannot, the right claim stands in its place: docs/adr/0009-the-rfcs-tests.md. Token counts
of the four micro-batches are 50, 20, 35 and 15; auxiliary coefficients are large, so that a wrong
share is a wrong gradient. Of the toy's parameters W gets its gradient from the language model
alone, R from the router, M1 and M2 from multi-token prediction. Number 8 on several devices is in
test_evaluate.py.

`found` comes from the package under test, what it is compared with always from the product.
"""

import math
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

PRODUCT, K = "ling_trainer", 4
AUX = {
    "load_balance_loss_weight": 1.0,
    "moe_z_loss_weight": 0.5,
    "mtp_loss_scaling_factor": 0.8,
}
ATOL = 2e-6  # of gradients up to 0.1: float32 sums in another order


def test_rfc_1_every_test_of_the_trainer_runs_under_cpu_only(
    request: pytest.FixtureRequest,
) -> None:
    here = [item for item in request.session.items if "trainer" in item.path.parts]
    assert here
    assert all(item.get_closest_marker("cpu_only") for item in here)


def test_rfc_2_per_token_lm_loss_and_gradient_do_not_depend_on_micro_batches(
    package: str, toy_gradients: Any, uneven: np.ndarray
) -> None:
    terms, grads = toy_gradients(PRODUCT, uneven, micro=1, **AUX)
    found, found_grads = toy_gradients(package, uneven, micro=K, **AUX)
    assert abs(found.lm - terms.lm) < 1e-5
    np.testing.assert_allclose(found_grads["W"], grads["W"], atol=ATOL)


def test_rfc_2_per_micro_batch_is_the_mean_of_micro_batch_means_and_another_loss(
    package: str, toy_gradients: Any, alone: Any, uneven: np.ndarray
) -> None:
    found, found_grads = toy_gradients(
        package, uneven, micro=K, calculate_per_token_loss=False, **AUX
    )
    each = alone(uneven, **AUX)
    assert abs(found.lm - np.mean([terms.lm for terms, _ in each])) < 1e-5
    mean = np.mean([grads["W"] for _, grads in each], axis=0)
    np.testing.assert_allclose(found_grads["W"], mean, atol=ATOL)
    per_token, _ = toy_gradients(PRODUCT, uneven, micro=1, **AUX)
    assert abs(found.lm - per_token.lm) > 1e-3, "the data does not tell the modes apart"


def test_rfc_3_gradients_of_the_default_mode_are_maxtexts_own(
    package: str, toy_gradients: Any, uneven: np.ndarray, maxtext: SimpleNamespace
) -> None:
    loss = {
        "load_balance_loss_weight": float(maxtext.inputs["lb_coeff"]),
        "mtp_loss_scaling_factor": float(maxtext.inputs["mtp_scale"]),
    }
    terms, grads = toy_gradients(package, uneven, micro=K, **loss)
    upstream, case = maxtext.upstream, f"uneven_z0_GA{K}"
    assert abs(terms.xent_sum - upstream[f"{case}/aux_xent_sum"]) < 1e-3  # of 434
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, upstream[f"{case}/grad_{name}"], atol=ATOL)


@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("empty", [False, True])
def test_rfc_4_an_auxiliary_weighs_its_micro_batchs_share(
    package: str, per_token: bool, empty: bool, toy_gradients: Any, alone: Any, uneven: np.ndarray
) -> None:
    segments = uneven.copy()
    if empty:  # its router still has tokens to balance
        segments[1::K] = 0
    loss = AUX | {"calculate_per_token_loss": per_token}
    terms, grads = toy_gradients(package, segments, micro=K, **loss)
    each = alone(segments, **AUX)
    counts = np.array([(segments[k::K] != 0).sum() for k in range(K)])
    shares = counts / counts.sum() if per_token else np.full(K, 1 / K)
    for name in ("R", "M1", "M2"):
        wanted = sum(s * g[name] for s, (_, g) in zip(shares, each, strict=True))
        np.testing.assert_allclose(grads[name], wanted, atol=ATOL, err_msg=name)
    auxiliary = [t.objective - t.lm for t, _ in each]
    assert abs(terms.objective - terms.lm - np.dot(shares, auxiliary)) < 1e-5


def test_rfc_5_reported_auxiliaries_are_means_over_micro_batches_and_not_sums(
    package: str, toy_gradients: Any, alone: Any, uneven: np.ndarray
) -> None:
    found, _ = toy_gradients(package, uneven, micro=K, **AUX)
    each = [terms for terms, _ in alone(uneven, **AUX)]
    for name in ("moe_lb_loss", "moe_z_loss", "mtp_loss", "load_balancing_loss", "raw_mtp_loss"):
        mean = float(np.mean([getattr(terms, name) for terms in each]))
        assert mean > 0.1
        assert float(getattr(found, name)) == pytest.approx(mean, rel=1e-6), name


def _reported(fixtures: Any, package: str, segments: np.ndarray, lm: float | None = None) -> Any:
    """Return the log of a step, its terms and gradients; `lm` replaces the loss."""
    product, toy_gradients, step_config, toy = fixtures
    modules = product(package)
    terms, grads = jax.tree.map(
        jnp.asarray, toy_gradients(PRODUCT, segments, micro=K, z_loss_multiplier=0.01, **AUX)
    )
    grads["W"] = grads["W"].at[0].set(0.0)
    config = step_config(gradient_accumulation_steps=K, loss=AUX)
    tx = modules.optimizer.make_optimizer(config.optimizer)
    _, report = modules.step.apply_gradients(
        modules.step.init_state(toy.params, toy.bias, tx),
        terms if lm is None else terms.replace(lm=jnp.float32(lm)),
        grads,
        total_weights=jnp.int32((segments != 0).sum()),
        tx=tx,
        config=config,
    )
    return modules.report.to_log(jax.device_get(report)), terms, grads


def test_rfc_6_zeros_are_those_of_the_gradients_and_the_loss_is_the_sum_of_its_parts(
    package: str, product: Any, toy_gradients: Any, step_config: Any, toy: Any, uneven: np.ndarray
) -> None:
    fixtures = (product, toy_gradients, step_config, toy)
    log, terms, grads = _reported(fixtures, package, uneven)
    assert log["learning/num_zeros"] == sum(int((g == 0).sum()) for g in grads.values()) == 24
    total = int((uneven != 0).sum())
    assert log["learning/lm_loss"] == pytest.approx(float(terms.xent_sum) / total, abs=1e-5)
    parts = ("lm_loss", "z_loss", "moe_lb_loss", "moe_z_loss", "mtp_loss")
    values = [log[f"learning/{part}"] for part in parts]
    assert all(value > 1e-2 for value in values)
    assert log["learning/loss"] == pytest.approx(sum(values), abs=1e-6)


@pytest.mark.parametrize("lm", [1.0, math.nan, math.inf])
def test_rfc_6_nan_and_inf_of_the_lm_loss_are_told_apart(
    package: str, lm: float, product: Any, toy_gradients: Any, step_config: Any, toy: Any,
    uneven: np.ndarray,
) -> None:  # fmt: skip
    log, *_ = _reported((product, toy_gradients, step_config, toy), package, uneven, lm)
    assert log["learning/is_nan"] == int(math.isnan(lm))
    assert log["learning/is_inf"] == int(math.isinf(lm))


def test_rfc_7_with_one_micro_batch_the_modes_are_one_for_one_group_and_not_for_two(
    package: str, toy_gradients: Any, uneven: np.ndarray
) -> None:
    per_token = toy_gradients(PRODUCT, uneven, micro=1, **AUX)
    found = toy_gradients(package, uneven, micro=1, calculate_per_token_loss=False, **AUX)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(per_token), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    groups, _ = toy_gradients(
        package, uneven, micro=1, calculate_per_token_loss=False, loss_groups=2, **AUX
    )
    halves = [toy_gradients(PRODUCT, uneven, rows, micro=1, **AUX)[0].lm
              for rows in (np.arange(4), np.arange(4, 8))]  # fmt: skip
    assert abs(groups.lm - np.mean(halves)) < 1e-5
    assert abs(groups.lm - per_token[0].lm) > 1e-3


def test_rfc_8_an_evaluation_does_not_see_rows_of_padding(
    package: str, product: Any, toy: Any, step_config: Any, uneven: np.ndarray
) -> None:
    modules, model = product(package), toy.build(product("ling_trainer"))
    segments = uneven.copy()
    segments[4:] = 0

    def evaluate(rows: slice) -> dict[str, float]:
        sums = modules.eval_step.eval_step(
            toy.params, toy.bias, toy.batch(product("ling_trainer"), segments, rows),
            config=step_config(), **model,
        )  # fmt: skip
        return modules.eval_step.eval_log([jax.device_get(sums)], mtp_per_layer_loss_norm=True)

    padded, alone = evaluate(slice(None)), evaluate(slice(4))
    assert padded == pytest.approx(alone, rel=1e-6)
    assert padded["eval/total_weights"] == (segments != 0).sum()


def test_rfc_9_the_launch_script_is_valid_bash_and_starts_the_trainer(repository: Path) -> None:
    script = repository / "scripts" / "pretrain_ling2.sh"
    subprocess.run(["bash", "-n", script], check=True)
    assert "-m ling_trainer run" in script.read_text()


def test_rfc_10_the_heads_z_loss_is_in_the_objective_and_not_in_the_lm_loss(
    package: str, toy_gradients: Any, uneven: np.ndarray, maxtext: SimpleNamespace
) -> None:
    loss = {
        "load_balance_loss_weight": float(maxtext.inputs["lb_coeff"]),
        "mtp_loss_scaling_factor": float(maxtext.inputs["mtp_scale"]),
    }
    without, _ = toy_gradients(PRODUCT, uneven, micro=K, **loss)
    terms, grads = toy_gradients(package, uneven, micro=K, z_loss_multiplier=1e-3, **loss)
    upstream, case = maxtext.upstream, f"uneven_z0.001_GA{K}"
    assert abs(terms.lm - without.lm) < 1e-6
    assert abs(terms.objective - without.objective - terms.z) < 1e-5
    reference = maxtext.expected[f"uneven_z0.001_GA{K}_pertoken1_pooled/z_loss"]
    assert abs(terms.z - reference) < 1e-6
    np.testing.assert_allclose(grads["W"], upstream[f"{case}/grad_W"], atol=ATOL)
