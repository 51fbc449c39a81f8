"""The step against MaxText, Megatron and a float64 reference, through the product's functions."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

GRAD_ATOL, LOSS_ATOL = 2e-6, 1e-5  # fixtures/maxtext/README.json


@pytest.fixture(scope="module")
def case_errors(maxtext: SimpleNamespace, run_toy_step: Any) -> Callable[..., dict[str, float]]:
    """Error of each value of one case of expected.npz, as a multiple of its tolerance."""

    def errors(package: str, case: str, **options: bool) -> dict[str, float]:
        segments, z, micro, per_token, norm = case.split("_", 4)
        log, grads = run_toy_step(
            package,
            maxtext.inputs[f"seg_{segments}"],
            num_microbatches=int(micro.removeprefix("GA")),
            calculate_per_token_loss=per_token == "pertoken1",
            mtp_per_layer_loss_norm=norm == "per_layer",
            z_loss_multiplier=float(z[1:]),
            load_balance_loss_weight=float(maxtext.inputs["lb_coeff"]),
            mtp_loss_scaling_factor=float(maxtext.inputs["mtp_scale"]),
            **options,
        )
        want = {
            key.removeprefix(f"{case}/"): maxtext.expected[key]
            for key in maxtext.expected
            if key.startswith(f"{case}/")
        }
        want["loss"] = want["loss_rfc"] + want["z_loss"]
        found = {name: np.abs(grads[name] - want[f"grad_{name}"]).max() for name in grads}
        scaled = {f"grad_{name}": error / GRAD_ATOL for name, error in found.items()}
        names = ("lm_loss", "z_loss", "moe_lb_loss", "mtp_loss", "raw_mtp_loss", "objective")
        for name in (*names, "loss"):
            scaled[name] = abs(log[f"learning/{name}"] - want[name]) / LOSS_ATOL
        for name in ("num_zeros", "total_weights"):  # counts: exact
            scaled[name] = 0.0 if log[f"learning/{name}"] == want[name] else np.inf
        return scaled

    return errors


def test_golden_maxtext_cases_hold_through_the_products_own_functions(
    maxtext: SimpleNamespace, case_errors: Any, show_golden: Any
) -> None:
    assert len(maxtext.cases) == 48
    assert {key.split("/")[0] for key in maxtext.expected} == set(maxtext.cases)
    worst = {case: case_errors("ling_trainer", case) for case in maxtext.cases}
    for kind, tolerance in (("grad", GRAD_ATOL), ("loss", LOSS_ATOL)):
        ratios = [
            e
            for case in worst.values()
            for name, e in case.items()
            if ("grad" in name) == (kind == "grad")
        ]
        show_golden(
            f"maxtext/expected.npz ({kind})", cases="48/48",
            worst=max(ratios) * tolerance, tolerance=tolerance,
        )  # fmt: skip
    red = {c: {n: e for n, e in errors.items() if not e <= 1} for c, errors in worst.items()}
    assert not {case: errors for case, errors in red.items() if errors}


def test_golden_tunix_accumulation_averages_micro_batches_and_reports_the_token_average(
    maxtext: SimpleNamespace, run_toy_step: Any, show_golden: Any
) -> None:
    upstream, worst = maxtext.upstream, 0.0
    # Upstream skips a step without tokens, auxiliaries included: no case for allpad. The segments
    # of onepad were not recorded.
    cases = {"uneven_z0": 0.0, "uneven_z0.001": 0.001, "even_z0": 0.0}
    for case, z in cases.items():
        log, grads = run_toy_step(
            "ling_trainer",
            maxtext.inputs[f"seg_{case.split('_')[0]}"],
            num_microbatches=4,
            use_tunix_gradient_accumulation=True,
            z_loss_multiplier=z,
            load_balance_loss_weight=float(maxtext.inputs["lb_coeff"]),
        )
        prefix = f"{case}_GA4_tunix"
        assert abs(log["learning/loss"] - upstream[f"{prefix}/loss"]) < LOSS_ATOL
        for name, grad in grads.items():
            worst = max(worst, np.abs(grad - upstream[f"{prefix}/grad_{name}"]).max())
    show_golden(
        "maxtext/upstream_0.2.5.npz (tunix)", cases="3/5", worst=worst, tolerance=GRAD_ATOL
    )
    assert worst < GRAD_ATOL


def test_golden_maxtexts_own_numbers_are_those_of_the_reference(
    maxtext: SimpleNamespace, show_golden: Any
) -> None:
    """What MaxText reports K times too large, or with the z-loss inside, is undone here."""
    upstream, expected, worst = maxtext.upstream, maxtext.expected, 0.0
    cases = {key.split("/")[0] for key in upstream}
    assert len(cases) == 15
    for case in (c for c in cases if c.startswith(("uneven", "even"))):
        segments, z, micro, *tunix = case.split("_")
        mode = f"{segments}_{z}_{micro}_pertoken%d_pooled"
        gradients, reported = mode % (not tunix), mode % 1  # tunix reports per token
        for name in ("W", "R", "M1", "M2"):
            error = upstream[f"{case}/grad_{name}"] - expected[f"{gradients}/grad_{name}"]
            worst = max(worst, np.abs(error).max())
        want = {n: expected[f"{reported}/{n}"] for n in ("lm_loss", "z_loss", "loss_rfc")}
        total = upstream[f"{case}/aux_total_weights"]
        found = {
            "total_weights": (total, expected[f"{reported}/total_weights"]),
            "loss": (upstream[f"{case}/loss"], want["loss_rfc"] + want["z_loss"]),
            "lm": (upstream[f"{case}/aux_xent_sum"] / total, want["lm_loss"] + want["z_loss"]),
            "z": (
                upstream[f"{case}/aux_z_loss"] / int(micro[2:]),  # a sum of K means
                expected[f"{mode % 0}/z_loss"],
            ),
        }
        for name in ("moe_lb_loss", "mtp_loss"):
            found[name] = (upstream[f"{case}/aux_{name}"], expected[f"{reported}/{name}"])
        wrong = {name: pair for name, pair in found.items() if abs(pair[0] - pair[1]) > LOSS_ATOL}
        assert not wrong, case
    show_golden(
        "maxtext/upstream_0.2.5.npz (against the reference)", cases="9/15",
        worst=worst, tolerance=GRAD_ATOL,
    )  # fmt: skip
    assert worst < GRAD_ATOL


def test_golden_megatron_groups_of_ranks_weigh_the_same_whatever_their_tokens(
    maxtext: SimpleNamespace, run_toy_step: Any, show_golden: Any
) -> None:
    golden, worst = maxtext.megatron_groups, 0.0
    cases = {"dp1_k4_strided": (1, 4), "dp2_k2": (2, 2), "dp2_k4_mbs1": (2, 4), "dp4_k1": (4, 1)}
    assert {key.split("/")[0] for key in golden} == set(cases)
    for case, (ranks, micro) in cases.items():
        groups = golden[f"{case}/rows"].reshape(ranks, micro, -1)  # rank d, micro-batch k, row j
        rows = groups.transpose(0, 2, 1).reshape(-1)  # row (d * mbs + j) * K + k
        log, grads = run_toy_step(
            "ling_trainer",
            maxtext.inputs["seg_uneven"],
            rows,
            num_microbatches=micro,
            loss_groups=ranks,
            calculate_per_token_loss=False,
        )
        assert abs(log["learning/lm_loss"] - golden[f"{case}/lm_loss"]) < LOSS_ATOL
        token_avg = golden[f"{case}/lm_loss_token_avg"]
        assert abs(log["learning/lm_loss_token_avg"] - token_avg) < LOSS_ATOL
        worst = max(worst, np.abs(grads["W"] - golden[f"{case}/grad_W"]).max())
    show_golden("maxtext/megatron_groups.npz", cases="4/4", worst=worst, tolerance=GRAD_ATOL)
    assert worst < GRAD_ATOL
