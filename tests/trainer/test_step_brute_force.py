"""The step against a float64 sum over virtual ranks and micro-batches, written from the formulas.

The shipped goldens hold neither a single empty micro-batch among full ones nor auxiliaries of
several ranks; here are both. b rows, S tokens, V vocabulary, E experts.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

TOP_K = 2


def head_loss(hidden: Any, matrix: Any, targets: Any, weights: Any, z: float) -> Any:
    """Weighted loss parts of a linear head and their gradient."""
    logits = hidden @ matrix
    top = logits.max(-1, keepdims=True)
    log_z = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
    probabilities = np.exp(logits - log_z[..., None])
    one_hot = np.eye(logits.shape[-1])[targets]
    xent = log_z - (logits * one_hot).sum(-1)
    slope = probabilities - one_hot + 2 * z * (log_z[..., None] * probabilities)
    grad = np.einsum("bsd,bsv->dv", hidden, weights[..., None] * slope)
    return (weights * xent).sum(), z * (weights * log_z**2).sum(), grad


def router_losses(hidden: Any, matrix: Any) -> Any:
    """Balance loss and z-loss of one group, without coefficients, and their gradients."""
    scores = hidden @ matrix
    rows, length, experts = scores.shape
    log_z = np.log(np.exp(scores).sum(-1))
    probabilities = np.exp(scores - log_z[..., None])
    chosen = np.argsort(-probabilities, axis=-1)[..., :TOP_K]
    density = np.eye(experts)[chosen].sum(2).mean(1) / TOP_K
    balance = experts * (density * probabilities.mean(1)).sum() / rows
    slope = np.broadcast_to(experts / (rows * length) * density[:, None], scores.shape)
    inner = slope - (probabilities * slope).sum(-1, keepdims=True)
    grad_balance = np.einsum("bsd,bse->de", hidden, probabilities * inner)
    slope_z = 2 * log_z[..., None] * probabilities / (rows * length)
    return balance, grad_balance, (log_z**2).mean(), np.einsum("bsd,bse->de", hidden, slope_z)


def mtp_loss(group: Any, inputs: Any, *, per_layer: bool) -> Any:
    """Loss of both depths of one group over its own tokens, without factor, and gradients."""
    hidden, targets, segments = group
    masks, shifted = [], []
    for depth in (1, 2):
        mask = np.zeros_like(segments, bool)
        mask[:, :-depth] = (segments[:, :-depth] == segments[:, depth:]) & (
            segments[:, depth:] != 0
        )
        masks.append(mask)
        shifted.append(np.roll(targets, -depth, axis=1))
    counts = [mask.sum() for mask in masks]
    pooled = max(sum(counts), 1)
    divisors = [2 * max(n, 1) if per_layer else pooled for n in counts]
    total, grads = 0.0, {}
    for name, mask, target, divisor in zip(("M1", "M2"), masks, shifted, divisors, strict=True):
        value, _, grads[name] = head_loss(hidden, inputs[name], target, mask / divisor, 0.0)
        total += value
    return total, grads


def brute_force(inputs: Any, segments: Any, *, micro: int, ranks: int = 1, **loss: Any) -> Any:
    """Return reported values and gradients of the step."""
    inputs = {key: np.asarray(value, np.float64 if key in "emb W R M1 M2" else None)
              for key, value in inputs.items()}  # fmt: skip
    hidden, targets = inputs["emb"][inputs["inputs"]], inputs["targets"]
    per_token, mask = loss["calculate_per_token_loss"], segments != 0
    total = mask.sum()
    out = dict.fromkeys(("lm", "z", "lb", "router_z", "mtp", "objective"), 0.0)
    grads = {name: np.zeros_like(inputs[name]) for name in ("W", "R", "M1", "M2")}
    lb, router_z = loss["load_balance_loss_weight"], loss.get("moe_z_loss_weight", 0.0)
    factor, groups = loss["mtp_loss_scaling_factor"], micro * ranks
    for k in range(micro):
        for rows in np.split(np.arange(k, len(mask), micro), ranks):
            n = mask[rows].sum()
            share = 1 / groups
            if per_token:
                share = n / total if total else (1 / ranks if micro == 1 else 0.0)
            weights = mask[rows] / (max(total, 1) if per_token else groups * max(n, 1))
            lm, z, grad = head_loss(
                hidden[rows], inputs["W"], targets[rows], weights, loss["z_loss_multiplier"]
            )
            grads["W"] += grad
            balance, grad_balance, zr, grad_zr = router_losses(hidden[rows], inputs["R"])
            grads["R"] += share * (lb * grad_balance + router_z * grad_zr)
            group = hidden[rows], targets[rows], segments[rows]
            mtp, mtp_grads = mtp_loss(group, inputs, per_layer=loss["mtp_per_layer_loss_norm"])
            for name, grad in mtp_grads.items():
                grads[name] += share * factor * grad
            parts = (lm, z, lb * balance / groups, router_z * zr / groups, factor * mtp / groups)
            for name, part in zip(out, parts, strict=False):
                out[name] += part
            out["objective"] += lm + z + share * (lb * balance + router_z * zr + factor * mtp)
    return out, grads


LOG_KEYS = {
    "lm": "lm_loss", "z": "z_loss", "lb": "moe_lb_loss", "router_z": "moe_z_loss",
    "mtp": "mtp_loss", "objective": "objective",
}  # fmt: skip


def test_golden_brute_force_agrees_with_the_float64_reference(
    maxtext: SimpleNamespace, show_golden: Any
) -> None:
    worst = 0.0
    for case in maxtext.cases:
        segments, z, micro, per_token, norm = case.split("_", 4)
        out, grads = brute_force(
            maxtext.inputs,
            maxtext.inputs[f"seg_{segments}"],
            micro=int(micro[2:]),
            calculate_per_token_loss=per_token == "pertoken1",
            mtp_per_layer_loss_norm=norm == "per_layer",
            z_loss_multiplier=float(z[1:]),
            load_balance_loss_weight=float(maxtext.inputs["lb_coeff"]),
            mtp_loss_scaling_factor=float(maxtext.inputs["mtp_scale"]),
        )
        wanted = maxtext.expected
        for name, key in LOG_KEYS.items():
            if name != "router_z":
                worst = max(worst, abs(out[name] - wanted[f"{case}/{key}"]))
        for name, grad in grads.items():
            worst = max(worst, np.abs(grad - wanted[f"{case}/grad_{name}"]).max())
    show_golden("maxtext/expected.npz (brute force)", cases="48/48", worst=worst, tolerance=1e-6)
    assert worst < 1e-6  # the coefficients are stored in float32


@pytest.mark.parametrize("per_token", [True, False], ids=["per_token", "per_micro_batch"])
@pytest.mark.parametrize(
    ("micro", "ranks", "empty"),
    [
        (4, 1, "micro-batch"),
        (2, 2, "micro-batch"),
        (4, 2, "rank"),
        (1, 4, "rank"),
        (1, 4, "step"),
        (2, 2, "step"),
    ],
)
def test_step_equals_a_sum_over_ranks_and_micro_batches(
    maxtext: SimpleNamespace,
    run_toy_step: Any,
    micro: int,
    ranks: int,
    empty: str,
    per_token: bool,
) -> None:
    segments = maxtext.inputs["seg_uneven"].copy()
    if empty == "micro-batch":  # the second has no token at all
        segments[1::micro] = 0
    elif empty == "rank":  # one rank of one micro-batch
        segments[: len(segments) // ranks : micro] = 0
    else:
        segments[:] = 0
    loss = {
        "calculate_per_token_loss": per_token,
        "mtp_per_layer_loss_norm": micro == 4,
        "z_loss_multiplier": 1e-2,
        "load_balance_loss_weight": 1.0,
        "moe_z_loss_weight": 0.5,
        "mtp_loss_scaling_factor": 0.8,
    }
    log, grads = run_toy_step(
        "ling_trainer", segments, num_microbatches=micro, loss_groups=ranks, **loss
    )
    out, wanted = brute_force(maxtext.inputs, segments, micro=micro, ranks=ranks, **loss)
    for name, key in LOG_KEYS.items():
        assert log[f"learning/{key}"] == pytest.approx(out[name], abs=1e-5)
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, wanted[name], atol=2e-6, err_msg=name)


def test_the_data_tells_the_modes_and_the_groups_apart(maxtext: SimpleNamespace) -> None:
    segments = maxtext.inputs["seg_uneven"].copy()
    segments[1::4] = 0
    loss = {
        "mtp_per_layer_loss_norm": True, "z_loss_multiplier": 0.0, "load_balance_loss_weight": 1.0,
        "mtp_loss_scaling_factor": 0.8,
    }  # fmt: skip
    settings = ((True, 1), (False, 1), (True, 2), (False, 2))
    grads = [
        brute_force(
            maxtext.inputs, segments, micro=4, ranks=d, calculate_per_token_loss=t, **loss
        )[1]
        for t, d in settings
    ]
    for i in range(4):
        for j in range(i):
            assert np.abs(grads[i]["M1"] - grads[j]["M1"]).max() > 1e-4
    for name in ("W", "R"):  # the toy's balance loss is a mean over rows: groups cannot change it
        assert np.abs(grads[0][name] - grads[1][name]).max() > 1e-4
