"""The step against Megatron's own schedule: normalisation, clipping, zeros, MTP, cross-entropy."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ling_trainer.batch import Batch
from ling_trainer.config import LossConfig
from ling_trainer.head_loss import head_loss
from ling_trainer.loss import microbatch_loss, mtp_targets
from ling_trainer.model.outputs import ModelOutputs, RouterStats
from ling_trainer.optimizer import make_optimizer
from ling_trainer.report import to_log
from ling_trainer.step import init_state, loss_and_gradients, train_step

LOSS = Path(__file__).parents[1] / "golden" / "megatron" / "loss"
MICRO, CLIP = 4, 0.05
ATOL = 1e-6  # float32 sums in another order


def _no_router(groups: int) -> RouterStats:
    return RouterStats(
        aux=jnp.zeros((groups, 0)),
        z=jnp.zeros((groups, 0)),
        expert_counts=jnp.zeros((0, 1), jnp.int32),
    )


def _batch(tokens: Any, labels: Any, mask: Any, segments: Any = None) -> Batch:
    ones = np.ones_like(tokens, np.int32) if segments is None else segments
    return Batch(
        inputs=jnp.asarray(tokens, jnp.int32),
        targets=jnp.asarray(labels, jnp.int32),
        positions=jnp.asarray(np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)),
        segment_ids=jnp.asarray(ones),
        loss_mask=jnp.asarray(mask > 0),
    )


@pytest.mark.parametrize("mode", ["pertoken", "permicro"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_golden_megatron_normalisation_clipping_and_reports(
    ranks: int, mode: str, step_config: Any, show_golden: Any
) -> None:
    golden = np.load(LOSS / "ga_normalization.npz")

    def rows(name: str) -> np.ndarray:  # [rank, k, j, S] -> row (rank * mbs + j) * K + k
        return golden[name][:ranks].transpose(0, 2, 1, 3).reshape(-1, golden[name].shape[-1])

    def apply(params: Any, router_bias: Any, batch: Batch) -> ModelOutputs:
        hidden = params["emb"][batch.inputs]
        return ModelOutputs(hidden=hidden, mtp_hidden=(), router=_no_router(ranks))

    def logits(params: Any, hidden: Any, depth: int) -> Any:
        return hidden @ params["out"].T

    config = step_config(
        gradient_accumulation_steps=MICRO,
        loss={"calculate_per_token_loss": mode == "pertoken", "loss_groups": ranks},
        optimizer={"gradient_clipping_threshold": CLIP},
    )
    params = {name: jnp.asarray(golden[name], jnp.float32) for name in ("emb", "out")}
    params["dead"] = jnp.ones(5)
    bias, batch = jnp.zeros((0, 1)), _batch(rows("tokens"), rows("labels"), rows("loss_mask"))
    tx = make_optimizer(config.optimizer)
    model = {"apply": apply, "logits": logits, "config": config}
    _, grads = loss_and_gradients(params, bias, batch, **model)
    _, report = train_step(init_state(params, bias, tx), batch, tx=tx, **model)
    log, prefix = to_log(jax.device_get(report)), f"dp{ranks}_{mode}"

    worst = abs(log["learning/lm_loss_token_avg"] - golden[f"{prefix}_reported_lm_loss"])
    legacy = golden[f"dp{ranks}_legacy2tuple_reported_lm_loss"]
    by_mode = legacy if mode == "permicro" else golden[f"{prefix}_reported_lm_loss"]
    worst = max(worst, abs(log["learning/lm_loss"] - by_mode))
    worst = max(worst, abs(log["learning/raw_grad_norm"] - golden[f"{prefix}_grad_norm"]))
    factor = log["learning/grad_norm"] / log["learning/raw_grad_norm"]
    for name, grad in grads.items():
        worst = max(worst, np.abs(grad - golden[f"{prefix}_grad_{name}"]).max())
        clipped = golden[f"{prefix}_clipped_grad_{name}"]
        worst = max(worst, np.abs(grad * factor - clipped).max())
    if mode == "permicro":  # the older loss function, of the same gradients
        old = f"dp{ranks}_legacy2tuple"
        for name, grad in grads.items():
            worst = max(worst, np.abs(grad - golden[f"{old}_grad_{name}"]).max())
            worst = max(worst, np.abs(grad * factor - golden[f"{old}_clipped_grad_{name}"]).max())
        assert golden[f"{old}_num_zeros"] == golden[f"{prefix}_num_zeros"]
        assert golden[f"{old}_grad_norm"] == golden[f"{prefix}_grad_norm"]
    show_golden(
        f"megatron/loss/ga_normalization.npz ({prefix})", cases="1/1", worst=worst, tolerance=ATOL
    )
    assert log["learning/num_zeros"] == golden[f"{prefix}_num_zeros"]
    assert log["learning/total_weights"] == golden["valid_tokens"][:ranks].sum()
    assert log["learning/grad_norm"] <= CLIP
    assert worst < ATOL


@pytest.mark.parametrize("ranks", [1, 2])
def test_golden_megatron_reports_sums_and_tokens_of_each_micro_batch_of_each_rank(
    ranks: int, show_golden: Any
) -> None:
    golden, worst = np.load(LOSS / "ga_normalization.npz"), 0.0
    head = jnp.asarray(golden["out"], jnp.float32).T
    for rank in range(ranks):
        for micro in range(MICRO):
            tokens, labels, mask = (
                golden[name][rank, micro] for name in ("tokens", "labels", "loss_mask")
            )
            loss = head_loss(
                head, jnp.asarray(golden["emb"], jnp.float32)[tokens], jnp.asarray(labels, int),
                jnp.asarray(mask > 0), jnp.zeros(mask.shape), depth=0, z_loss_multiplier=0.0,
                logits=lambda p, h, depth: h @ p, num_vocab_tiling=1,
            )  # fmt: skip
            total, count = float(loss.xent.sum()), float((mask > 0).sum())
            want: dict[str, tuple[float, ...]] = {
                "pertoken": (total, count),
                "permicro": (total, count),
            }
            want["legacy2tuple"] = (total / max(count, 1),)
            for mode, values in want.items():
                report = golden[f"dp{ranks}_{mode}_per_micro_report_rank{rank}"][micro]
                scale = max(count, 1) if len(values) > 1 else 1  # sums are of up to 31 tokens
                worst = max(worst, float(np.abs(report - np.array(values)).max()) / scale)
    show_golden("megatron/loss/ga_normalization.npz", cases="", worst=worst, tolerance=ATOL)
    assert worst < ATOL


def test_golden_megatron_normalisation_has_no_other_case() -> None:
    names = np.load(LOSS / "ga_normalization.npz").files
    assert len(names) == 69
    modes = {tuple(name.split("_")[:2]) for name in names if name.startswith("dp")}
    assert modes == {(d, m) for d in ("dp1", "dp2") for m in ("pertoken", "permicro",
                                                              "legacy2tuple")}  # fmt: skip


@pytest.mark.parametrize("roll", ["plain", "packed"])
@pytest.mark.parametrize("mask", ["mask", "ones", "empty"])
@pytest.mark.parametrize("mode", ["pt0", "pt1"])
def test_golden_megatron_mtp_loss_by_depth_and_its_gradient(
    roll: str, mask: str, mode: str, show_golden: Any
) -> None:
    golden = np.load(LOSS / "mtp.npz")
    labels, cuts = golden["labels"], golden["cu_seqlens"]
    kinds = {"mask": golden["loss_mask"], "ones": np.ones_like(golden["loss_mask"])}
    loss_mask = kinds.get(mask, np.zeros_like(golden["loss_mask"]))
    segments = np.repeat(np.arange(1, len(cuts)), np.diff(cuts)).astype(np.int32)[None]
    batch = _batch(labels, labels, loss_mask, segments)
    hidden = jnp.asarray(golden["hidden_states"])[:, 0].reshape(3, 1, labels.shape[1], -1)
    config = LossConfig(
        mtp_per_layer_loss_norm=True,
        mtp_loss_scaling_factor=0.1,
        mtp_roll="segment" if roll == "packed" else "plain",
    )

    def objective(hidden: Any, weight: Any) -> Any:
        def apply(params: Any, router_bias: Any, batch: Batch) -> ModelOutputs:
            states = (hidden[1], hidden[2])
            return ModelOutputs(hidden=hidden[0], mtp_hidden=states, router=_no_router(1))

        # Megatron scales by the micro-batch's tokens and divides by the step's later (per token),
        # or by 1 / K = 1 / 4: the share. The language model's own loss is not in this golden.
        scale = max(loss_mask.sum(), 0) if mode == "pt1" else 0.25
        return microbatch_loss(
            weight, jnp.zeros((0, 1)), batch, jnp.zeros(labels.shape), jnp.full((1,), scale),
            apply=apply, logits=lambda p, h, depth: h @ p.T, config=config, num_microbatches=1,
        )  # fmt: skip

    weight = jnp.asarray(golden["output_weight"])
    (d_hidden, d_weight), terms = jax.grad(objective, argnums=(0, 1), has_aux=True)(hidden, weight)
    key = f"mtp_{roll}_{mask}_{mode}"
    found = {
        "logged_loss_per_layer": terms.mtp_depth_losses,
        "d_hidden": d_hidden.reshape(golden["hidden_states"].shape),
        "d_weight": d_weight,
    }
    found["total"] = jnp.stack([
        mtp_targets(batch, depth=depth, mtp_roll=config.mtp_roll)[1].sum() for depth in (1, 2)
    ])  # fmt: skip
    worst = max(float(np.abs(v - golden[f"{key}_{name}"]).max()) for name, v in found.items())
    show_golden(f"megatron/loss/mtp.npz ({key})", cases="1/1", worst=worst, tolerance=2e-5)
    assert worst < 2e-5


@pytest.mark.parametrize("roll", ["plain", "segment"])
def test_golden_mtp_targets_of_megatron_and_of_the_reference(
    roll: Any, maxtext: SimpleNamespace
) -> None:
    golden, small = np.load(LOSS / "mtp.npz"), maxtext.small
    labels, cuts = np.arange(1, 25, dtype=np.int32)[None], golden["cu_seqlens"]
    segments = np.repeat(np.arange(1, len(cuts)), np.diff(cuts)).astype(np.int32)[None]
    for depth in (1, 2, 3):
        batch = _batch(labels, labels, np.ones_like(labels), segments)
        targets, mask = mtp_targets(batch, depth=depth, mtp_roll=roll)
        name = "packed" if roll == "segment" else "plain"
        np.testing.assert_array_equal(targets, golden[f"roll_{name}_{depth}"])
        assert int(jnp.where(mask, targets, 0).sum()) == golden[f"roll_{name}_{depth}_sum"]
        if roll == "segment":
            ids, x = small["mtp_roll/segment_ids"], small["mtp_roll/x"]
            targets, mask = mtp_targets(_batch(x, x, ids != 0, ids), depth=depth, mtp_roll=roll)
            wanted = small[f"mtp_roll_k{depth}/correct_mask"] > 0
            np.testing.assert_array_equal(mask, wanted)
            wanted_targets = small[f"mtp_roll_k{depth}/correct_target"]
            np.testing.assert_array_equal(
                np.where(wanted, targets, 0), np.where(wanted, wanted_targets, 0)
            )
