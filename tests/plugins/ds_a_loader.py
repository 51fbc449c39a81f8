"""A loader of the small golden dataset, in steps of twelve rows."""

from pathlib import Path

import numpy as np

from ling_trainer.data.loader import Loader
from ling_trainer.data.order import SampleOrder
from ling_trainer.data.packing import PackedBatch
from ling_trainer.data.source import SampleSource, open_source
from ling_trainer.data_config import DataConfig

GOLDEN = Path(__file__).parents[1] / "golden" / "megatron" / "data"
BATCH, STEPS = 12, 6
DATA = DataConfig(
    dataset_path=str(GOLDEN / "ds_a"),
    split="1,0,0",
    data_shuffle_seed=7,
    max_target_length=32,
    global_batch_size=BATCH,
    eod_id=3,
    pad_id=3,
    eod_mask_loss=True,
    reset_position_ids=True,
)


def open_loader(
    rows: range = range(BATCH),
    *,
    source: SampleSource | None = None,
    data: DataConfig = DATA,
    start_step: int = 0,
    num_microbatches: int = 3,
) -> Loader:
    return Loader(
        source or open_source(data, vocab_size=1000, order=SampleOrder((BATCH * STEPS,))),
        data,
        rows=rows,
        global_batch_size=BATCH,
        num_microbatches=num_microbatches,
        start_step=start_step,
        num_steps=STEPS,
    )


def assert_equal(ours: PackedBatch, theirs: PackedBatch) -> None:
    for name, value in ours._asdict().items():
        np.testing.assert_array_equal(value, getattr(theirs, name), err_msg=name)


def process_rows(batch_size: int, *, process: int, processes: int) -> range:
    """Return the rows that a process reads where each has a block of the global batch."""
    rows = batch_size // processes
    return range(process * rows, (process + 1) * rows)
