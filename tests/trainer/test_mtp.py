"""The rolls of multi-token prediction, its masks at every depth, and how depths are averaged."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ling_trainer.batch import Batch
from ling_trainer.config import LossConfig
from ling_trainer.loss import microbatch_loss, mtp_targets
from ling_trainer.model.mtp import roll, roll_plain, roll_within_segments
from ling_trainer.model.outputs import ModelOutputs, RouterStats

MTP = Path(__file__).parents[1] / "golden" / "megatron" / "loss" / "mtp.npz"

IDS = jnp.asarray([[10, 11, 12, 20, 21, 30]])
SEGMENTS = jnp.asarray([[1, 1, 1, 2, 2, 0]])


def test_roll_within_segments_fills_where_a_document_ends() -> None:
    once = roll_within_segments(IDS, SEGMENTS, shift=1, fill=-7)
    np.testing.assert_array_equal(once, [[11, 12, -7, 21, -7, -7]])
    twice = roll_within_segments(IDS, SEGMENTS, shift=2, fill=-7)
    np.testing.assert_array_equal(twice, [[12, -7, -7, -7, -7, -7]])


def test_plain_roll_crosses_documents_and_fills_the_end_of_the_row() -> None:
    np.testing.assert_array_equal(roll_plain(IDS, shift=2, fill=0), [[12, 20, 21, 30, 0, 0]])
    np.testing.assert_array_equal(
        roll(IDS, SEGMENTS, shift=1, fill=0, by="plain"), [[11, 12, 20, 21, 30, 0]]
    )


def test_a_rolled_mask_is_still_a_mask() -> None:
    mask = jnp.asarray([[True, True, False, True, True, True]])
    rolled = roll(mask, SEGMENTS, shift=1, fill=0, by="segment")
    np.testing.assert_array_equal(rolled, [[True, False, False, True, False, False]])
    assert rolled.dtype == jnp.bool_


@pytest.mark.parametrize("shift", [-1, 0, 6])
def test_a_shift_outside_the_row_is_refused(shift: int) -> None:
    with pytest.raises(ValueError, match=rf"shift={shift} is outside \[1, 6\)"):
        roll_within_segments(IDS, SEGMENTS, shift=shift, fill=0)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    first=st.integers(1, 2),
    second=st.integers(1, 2),
)
def test_rolling_twice_is_rolling_once_further(
    lengths: list[int], first: int, second: int
) -> None:
    segments = np.zeros((1, 30), int)
    segments[0, : sum(lengths)] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    ids = jnp.arange(100, 130)[None]
    steps = roll_within_segments(ids, jnp.asarray(segments), shift=first, fill=0)
    steps = roll_within_segments(steps, jnp.asarray(segments), shift=second, fill=0)
    once = roll_within_segments(ids, jnp.asarray(segments), shift=first + second, fill=0)
    np.testing.assert_array_equal(steps, once)


def batch_of(segments: Any, mask: Any = None) -> Batch:
    segments = jnp.asarray(segments, jnp.int32)
    ids = jnp.zeros_like(segments)
    return Batch(
        inputs=ids, targets=ids, positions=ids, segment_ids=segments,
        loss_mask=segments != 0 if mask is None else jnp.asarray(mask) > 0,
    )  # fmt: skip


def test_golden_mtp_counts_of_every_case_of_megatron_and_no_key_is_left_out(
    show_golden: Any,
) -> None:
    golden = np.load(MTP)
    cuts, loss_mask = golden["cu_seqlens"], golden["loss_mask"]
    segments = np.repeat(np.arange(1, len(cuts)), np.diff(cuts))[None]
    masks = {"mask": loss_mask, "ones": loss_mask * 0 + 1, "empty": loss_mask * 0}
    rolls = {"plain": "plain", "packed": "segment"}
    used = {"hidden_states", "output_weight", "labels", "loss_mask", "cu_seqlens"}
    used |= {f"roll_{name}_{depth}{end}" for name in rolls for depth in (1, 2, 3)
             for end in ("", "_sum")}  # fmt: skip
    ends = ("d_hidden", "d_weight", "logged_loss_per_layer")  # test_step_megatron compares these
    for name, by in rolls.items():
        for kind, mask in masks.items():
            for mode in ("pt0", "pt1"):
                case = f"mtp_{name}_{kind}_{mode}"
                used |= {f"{case}_{end}" for end in (*ends, "total")}
                found = [
                    int(mtp_targets(batch_of(segments, mask), depth=depth, mtp_roll=by)[1].sum())  # type: ignore[arg-type]
                    for depth in (1, 2)
                ]
                assert found == golden[f"{case}_total"].tolist(), case
    assert used == set(golden.files)
    assert len(used) == 65
    show_golden("megatron/loss/mtp.npz", cases="12 counts", worst=0.0, tolerance=1.0)


def test_golden_mtp_masks_are_right_at_every_depth_where_upstream_leaks(
    maxtext: SimpleNamespace, show_golden: Any
) -> None:
    small = maxtext.small
    segments, leaks = small["mtp_roll/segment_ids"], []
    for depth in (1, 2, 3):
        _, mask = mtp_targets(batch_of(segments), depth=depth, mtp_roll="segment")
        np.testing.assert_array_equal(mask, small[f"mtp_roll_k{depth}/correct_mask"])
        assert mask.sum() > 0
        leaks.append(int((small[f"mtp_roll_k{depth}/upstream_mask"] > np.asarray(mask)).sum()))
    assert leaks == [0, 3, 5]
    show_golden("maxtext/small.npz (mtp_roll)", cases="3/3", worst=0.0, tolerance=1.0)


@pytest.mark.parametrize(
    ("per_layer", "key"), [(False, "upstream_pooled_scaled"), (True, "per_layer_scaled")]
)
def test_golden_mtp_depths_are_pooled_or_averaged_one_by_one(
    maxtext: SimpleNamespace, per_layer: bool, key: str, show_golden: Any
) -> None:
    small = maxtext.small
    sums, counts = small["mtp_norm/losses"], small["mtp_norm/weights"]
    # Documents of 3 and 2 tokens, so that the first depth has 50 targets and the second 10.
    lengths = [3] * 10 + [2] * 30
    batch = batch_of(np.repeat(np.arange(1, 41), lengths)[None])
    # Two logits, [a, 0], give the first a cross-entropy of log(1 + e^-a): a mean of sums / counts.
    first = -np.log(np.expm1(sums / counts))
    states = tuple(jnp.full((1, 90, 1), value, jnp.float32) for value in first)

    def apply(params: Any, router_bias: Any, batch: Batch) -> ModelOutputs:
        none = jnp.zeros((1, 0))
        router = RouterStats(aux=none, z=none, expert_counts=jnp.zeros((0, 1), jnp.int32))
        return ModelOutputs(hidden=jnp.zeros((1, 90, 1)), mtp_hidden=states, router=router)

    config = LossConfig(
        mtp_loss_scaling_factor=float(small["mtp_norm/scale"]), mtp_per_layer_loss_norm=per_layer
    )
    objective, terms = microbatch_loss(
        {}, jnp.zeros((0, 1)), batch, jnp.zeros((1, 90)), jnp.ones((1,)), apply=apply,
        logits=lambda params, hidden, depth: jnp.pad(hidden, ((0, 0), (0, 0), (0, 1))),
        config=config, num_microbatches=1,
    )  # fmt: skip
    np.testing.assert_allclose(terms.mtp_depth_losses, sums / counts, rtol=1e-6)
    worst = max(
        abs(float(value) - small[f"mtp_norm/{key}"]) for value in (objective, terms.mtp_loss)
    )
    if per_layer:
        worst = max(worst, abs(float(terms.raw_mtp_loss) - small["mtp_norm/per_layer_raw"]))
    show_golden("maxtext/small.npz (mtp_norm)", cases="1/1", worst=worst, tolerance=1e-6)
    assert worst < 1e-6
