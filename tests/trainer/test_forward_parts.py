"""What `ling-train forward` is made of: its batches, its weights of tokens, its file."""

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from ling_trainer.forward import token_targets
from ling_trainer.forward_inputs import make_batch
from ling_trainer.safetensors_file import TensorWriter


def test_positions_restart_and_targets_end_with_each_document() -> None:
    batch = make_batch(
        np.asarray([[10, 11, 12, 13, 14, 15]]),
        np.asarray([[4, 4, 2, 0, 0, 3]]),
        vocab_size=256,
        depths=1,
        tokens_name="tokens",
        segments_name="segments",
    )
    assert batch.positions.tolist() == [[0, 1, 0, 0, 1, 0]]
    assert batch.targets.tolist() == [[11, 12, 13, 14, 15, 0]]
    assert batch.loss_mask.tolist() == [[True, False, False, False, False, False]]


def test_weights_of_tokens_add_up_to_1_and_the_factor() -> None:
    segments = np.asarray([[1, 1, 1, 1, 2, 2, 2], [5, 5, 0, 0, 0, 0, 0]])
    batch = make_batch(
        np.ones_like(segments), segments, vocab_size=4, depths=2,
        tokens_name="tokens", segments_name="segments",
    )  # fmt: skip
    targets = token_targets(batch, depths=2, mtp_loss_scaling_factor=0.3)
    assert targets.mask.sum((1, 2)).tolist() == [6, 3, 1]
    assert targets.weights.sum((1, 2)).tolist() == pytest.approx([1.0, 0.15, 0.15])
    assert not targets.weights[~targets.mask].any()


def test_a_row_that_does_not_fit_its_tensor_is_no_part_of_a_file(tmp_path: Path) -> None:
    rows, wrong = np.arange(6, dtype=np.float32).reshape(3, 2), np.zeros(3, np.float32)
    path = tmp_path / "x.safetensors"
    with TensorWriter(path, {"a": (rows.shape, rows.dtype)}, {"roll": "plain"}) as writer:
        for row in (2, 0, 1):
            writer.write_row("a", row, rows[row])
        for row, value in ((0, wrong), (3, rows[0]), (1, rows[1].astype(np.int32))):
            with pytest.raises(ValueError, match=f"row {row} of a is .* was announced"):
                writer.write_row("a", row, value)
    np.testing.assert_array_equal(load_file(path)["a"], rows)
    with safe_open(path, "np") as file:
        assert file.metadata() == {"roll": "plain"}
