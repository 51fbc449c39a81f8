"""Evaluations: when they come, the right samples at the right step, giving way to a signal."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from ling_trainer.data.index_file import DataError
from ling_trainer.data.order import SampleOrder
from ling_trainer.data.packing import PackedBatch
from ling_trainer.data.source import open_dataset, open_source
from ling_trainer.data.validation import ValidationSplit, open_validation, validation_order
from ling_trainer.eval_config import EvalConfig
from ling_trainer.eval_step import EvalSums
from ling_trainer.evaluate import Evaluation, evaluate
from ling_trainer.presets import ling2
from ling_trainer.run_record import RunRecord
from ling_trainer.schema import ConfigError
from ling_trainer.settings import resolve
from ling_trainer.stop_signal import StopSignal

DATASET = str(Path(__file__).parents[1] / "golden" / "megatron" / "data" / "ds_a")
DATA = resolve(
    {"preset": "ling2_tiny", "enable_checkpointing": False},
    {"data": {"dataset_path": DATASET, "split": "969,30,1", "max_target_length": 32}},
    {"data": {"eod_id": 3, "pad_id": 3, "data_shuffle_seed": 7}},
).data
VOCAB, ROWS = 1024, 4


def test_evaluations_go_on_where_the_one_before_ended_and_never_past_the_split() -> None:
    for steps, interval in ((10, 4), (12, 4), (3, 4), (4, 1)):
        config = EvalConfig(eval_interval=interval, eval_steps=3)
        due = [n for n in range(1, steps + 1) if config.is_due(n, last_step=steps)]
        assert due == sorted({*range(interval, steps + 1, interval), steps})
        assert [config.first_batch(n) for n in due] == [3 * i for i in range(len(due))]
        samples = (steps // interval + 1) * 3 * 8  # Megatron's
        assert config.num_samples(steps=steps, global_batch_size=8) == samples
        assert (config.first_batch(due[-1]) + 3) * 8 <= samples


@pytest.mark.parametrize("interval", [0, -1])
def test_a_run_without_an_interval_is_never_evaluated(interval: int) -> None:
    config = EvalConfig(eval_interval=interval, eval_steps=0)
    assert not config.is_due(7, last_step=7)
    assert config.num_samples(steps=7, global_batch_size=8) is None


def test_the_preset_evaluates_as_its_team_does_and_the_tiny_one_does_not() -> None:
    config = resolve({"preset": "ling2", "dataset_path": "x", "base_output_directory": "y"})
    assert config.evaluation == EvalConfig(eval_interval=1490, eval_steps=1)
    assert ling2()["evaluation"] == {"eval_interval": 1490, "eval_steps": 1}
    assert not resolve({"preset": "ling2_tiny", "dataset_path": "x"} | OFF).evaluation.enabled


OFF = {"enable_checkpointing": False}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"dataset_path": "x", "eval_steps": 0}, r"eval_steps=0 .*use a positive"),
        ({"dataset_path": "x", "eval_steps": -2}, r"eval_steps=-2"),
        ({"dataset_type": "synthetic"}, r"eval_steps=-1 .*positive number"),
        ({"train_data_path": "x"}, r"valid_data_path is not set .*eval_interval=5"),
        ({"dataset_path": "i|x", "dataset_type": "mmap_npy"}, r"valid_data_path .*one order"),
    ],
)
def test_an_evaluation_that_has_no_data_or_no_end_is_refused(
    settings: dict[str, Any], problem: str
) -> None:
    base: dict[str, Any] = {"preset": "ling2_tiny", "eval_interval": 5} | OFF
    with pytest.raises(ConfigError, match=problem):
        resolve(base | settings)
    resolve(base | settings | {"eval_interval": -1, "eval_steps": 1})


def open_split(
    eval_steps: int, *, steps: int = 10, saved: SampleOrder | None = None, **changes: Any
) -> ValidationSplit:
    config = EvalConfig(eval_interval=4, eval_steps=eval_steps)
    return open_validation(
        DATA.model_copy(update=changes),
        config,
        vocab_size=VOCAB,
        order=validation_order(config, saved, steps=steps, global_batch_size=ROWS),
        global_batch_size=ROWS,
        num_microbatches=2,
    )


def read(split: ValidationSplit, step: int, rows: range = range(ROWS)) -> list[PackedBatch]:
    with split.batches(step, rows=rows) as batches:
        return list(batches)


def inputs(batches: list[PackedBatch]) -> list[bytes]:
    return [row.tobytes() for batch in batches for row in batch.inputs]


def test_evaluations_read_the_validation_split_in_megatrons_order() -> None:
    split = open_split(2)
    order = SampleOrder((3 * 2 * ROWS,))
    valid = open_source(DATA, vocab_size=VOCAB, order=order, split_name="valid")
    train = open_source(DATA, vocab_size=VOCAB, order=order)
    whole = [valid.read(i).text[:-1].astype(np.int32).tobytes() for i in range(3 * 2 * ROWS)]
    found = [inputs(read(split, step)) for step in (4, 8, 10)]
    # Row i belongs to micro-batch i mod 2, and Megatron's micro-batches are consecutive samples.
    place = [batch * ROWS + i % 2 * ROWS // 2 + i // 2 for batch in range(2) for i in range(ROWS)]
    for number, rows in enumerate(found):
        assert rows == [whole[number * 2 * ROWS + i] for i in place]
    assert train.read(0).text[:-1].astype(np.int32).tobytes() not in whole


def test_a_resumed_run_with_more_steps_reads_the_same_batches_at_the_same_step() -> None:
    config, first = EvalConfig(eval_interval=4, eval_steps=2), inputs(read(open_split(2), 8))
    order = validation_order(config, None, steps=10, global_batch_size=ROWS)
    record = RunRecord(
        attempt=1, sample_order=SampleOrder((1,)), identity={}, valid_order=order
    ).to_json()
    saved = RunRecord.from_json(json.loads(json.dumps(record))).valid_order
    assert inputs(read(open_split(2, steps=100, saved=saved), 8)) == first
    assert inputs(read(open_split(2, steps=100), 8)) != first  # not pinned
    # Without evaluation, and in checkpoints that know of none, an order is kept as it is.
    for off in (EvalConfig(), EvalConfig(eval_interval=4)):
        assert validation_order(off, saved, steps=100, global_batch_size=ROWS) == saved
    del record["valid_order"]
    assert RunRecord.from_json(record).valid_order is None


def test_a_whole_split_is_read_once_and_its_last_batch_is_filled_up_with_padding() -> None:
    split = open_split(-1)
    whole = open_dataset(DATA, vocab_size=VOCAB, num_samples=None, split_name="valid")
    assert split.num_batches == -(-len(whole) // ROWS)
    assert len(whole) % ROWS, "an even last batch proves nothing"
    batches = read(split, 4)
    assert [len(batch.inputs) for batch in batches] == [ROWS] * split.num_batches
    real = [row for batch in batches for row in batch.inputs[batch.segment_ids.any(1)]]
    samples = [whole.read(i).text[:-1].astype(np.int32).tobytes() for i in range(len(whole))]
    assert sorted(row.tobytes() for row in real) == sorted(samples)
    padding = ~batches[-1].segment_ids.any(1)
    assert padding.sum() == -len(whole) % ROWS
    assert not batches[-1].loss_mask[padding].any()
    assert inputs(read(split, 8)) == inputs(batches)


def test_processes_read_the_rows_of_one_batch_between_them() -> None:
    split = open_split(-1)
    halves = [read(split, 4, rows) for rows in (range(ROWS // 2), range(ROWS // 2, ROWS))]
    joined = [
        np.concatenate([left.inputs, right.inputs]).tobytes()
        for left, right in zip(*halves, strict=True)
    ]
    assert joined == [batch.inputs.tobytes() for batch in read(split, 4)]


def test_synthetic_validation_text_is_not_that_of_training() -> None:
    synthetic = DATA.model_copy(update={"dataset_type": "synthetic", "dataset_path": None})
    order = SampleOrder((64,))
    train = open_source(synthetic, vocab_size=VOCAB, order=order)
    valid = open_source(synthetic, vocab_size=VOCAB, order=order, split_name="valid")
    texts = [{source.read(i).text.tobytes() for i in range(64)} for source in (train, valid)]
    assert not texts[0] & texts[1]
    assert len(read(open_split(2, dataset_type="synthetic", dataset_path=None), 4)) == 2


@pytest.mark.parametrize(
    ("eval_steps", "changes", "problem"),
    [
        (2, {"split": "100,0,0"}, "valid part of split=100,0,0"),
        (-1, {"dataset_path": f"{DATASET},1;{DATASET},1"}, "have no epoch"),
        (50, {"dataset_path": f"{DATASET};{DATASET}"}, r"set evaluation\.eval_steps=-1"),
        (2, {"dataset_path": "nowhere/x"}, "nowhere"),
    ],
)
def test_validation_data_that_cannot_be_read_say_how_to_do_without(
    eval_steps: int, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(DataError, match=rf"{problem}.*evaluation\.eval_interval=-1"):
        open_split(eval_steps, **changes)


class Stub:
    """Program, compiled step and reporter of an evaluation, as far as it looks at them."""

    def __init__(self, *, stop_at: int) -> None:
        self.config = SimpleNamespace(loss=SimpleNamespace(mtp_per_layer_loss_norm=True))
        self.signals = StopSignal()
        self.stop_at, self.beats = stop_at, 0

    def local_rows(self) -> list[int]:
        return list(range(ROWS))

    def place(self, arrays: dict[str, np.ndarray]) -> Any:
        return arrays

    def flag(self, *, stop: bool) -> bool:
        return stop

    def step(self, params: Any, bias: Any, batch: Any, flag: bool) -> tuple[EvalSums, int]:
        if self.beats + 1 == self.stop_at:
            self.signals.requested = True
            flag = True
        tokens = batch["loss_mask"].sum(1)[None]
        none = np.zeros((*tokens.shape, 0))
        return cast("Any", EvalSums)(2.0 * tokens, tokens, none, none), int(flag)

    def beat(self) -> None:
        self.beats += 1


@pytest.fixture
def evaluated() -> Callable[[Stub, int], dict[str, float]]:
    def run(stub: Stub, eval_steps: int) -> dict[str, float]:
        split = open_split(eval_steps)
        evaluation = Evaluation(
            program=cast("Any", stub), step=cast("Any", stub.step), split=split
        )
        state = SimpleNamespace(params=None, router_bias=None)
        return evaluate(
            evaluation, cast("Any", state), 4, reporter=cast("Any", stub), signals=stub.signals
        )

    return run


def test_an_evaluation_gives_way_to_a_signal_after_the_batch_it_is_at(evaluated: Any) -> None:
    stub = Stub(stop_at=2)
    assert evaluated(stub, 5) == {}
    assert stub.beats == 2  # and the outside heard of both


def test_a_signal_during_the_last_batch_loses_no_result(evaluated: Any) -> None:
    stub = Stub(stop_at=5)
    assert evaluated(stub, 5)["eval/lm_loss"] == 2.0
    assert stub.beats == 5


def test_every_batch_of_the_whole_split_counts(evaluated: Any) -> None:
    stub = Stub(stop_at=0)
    log = evaluated(stub, -1)
    assert log["eval/lm_loss"] == 2.0
    assert log["eval/total_weights"] == sum(
        batch.loss_mask.sum() for batch in read(open_split(-1), 4)
    )


@pytest.mark.slow
def test_eight_devices_with_an_uneven_last_batch_evaluate_to_what_one_does_without_padding(
    kept_programs,
):
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("sharded_eval_program.py"))],
        env={**os.environ, **kept_programs, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["batches"] == 2
    assert found["sharded"] == pytest.approx(found["alone"], rel=1e-5)
    # The data tell: not the mean of the two batches' means.
    assert abs(found["mean_of_means"] - found["alone"]["eval/lm_loss"]) > 1e-3
    assert found["state_unchanged"]
