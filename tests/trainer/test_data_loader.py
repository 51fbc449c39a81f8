"""Global batches do not depend on who reads them, when, or after which restart."""

import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from ds_a_loader import BATCH, DATA, GOLDEN, STEPS, assert_equal, open_loader, process_rows
from ling_trainer.batch import split_microbatches
from ling_trainer.data.loader import Loader, sample_numbers
from ling_trainer.data.order import SampleOrder
from ling_trainer.data.packing import PackedBatch
from ling_trainer.data.source import open_source
from ling_trainer.data_config import DataConfig

pytestmark = pytest.mark.usefixtures("no_thread_and_no_process_is_left")
SAMPLER = json.loads((GOLDEN / "sampler.json").read_text())


# Megatron's sampler.


def test_every_golden_sampler_case_is_tested() -> None:
    assert len(SAMPLER) == 4
    assert {case["consumed_samples"] > 0 for case in SAMPLER} == {True, False}


@pytest.mark.parametrize(
    ("case", "num_microbatches"),
    [
        (case, k)
        for case, golden in enumerate(SAMPLER)
        for k in (1, 2, 3)
        # Only what was consumed in whole steps has a step number.
        if not golden["consumed_samples"]
        % (k * golden["micro_batch_size"] * golden["data_parallel_size"])
    ],
)
def test_golden_sampler_order_is_what_split_microbatches_gives(
    case: int, num_microbatches: int, show_golden: Any
) -> None:
    golden = SAMPLER[case]
    size, ranks = golden["micro_batch_size"], golden["data_parallel_size"]
    batch = num_microbatches * size * ranks
    consumed = golden["consumed_samples"]
    by_rank = np.array(golden["batches_per_rank"])  # [D, micro-batches, mbs]
    steps = by_rank.shape[1] // num_microbatches
    assert steps >= 1
    for step in range(steps):
        numbers = sample_numbers(
            consumed // batch + step,
            range(batch),
            global_batch_size=batch,
            num_microbatches=num_microbatches,
        )
        split = split_microbatches(jnp.asarray(numbers), num_microbatches=num_microbatches)
        ours = np.asarray(split).reshape(num_microbatches, ranks, size)
        first = step * num_microbatches
        theirs = by_rank[:, first : first + num_microbatches].swapaxes(0, 1)
        np.testing.assert_array_equal(ours, theirs)
    cases = f"case {case}, K={num_microbatches}, {steps} steps"
    show_golden("megatron/data/sampler.json", cases=cases, worst=0, tolerance=0)


@pytest.mark.parametrize(
    ("dataset", "name", "settings"),
    [
        ("ds_a", "a_969_30_1_train", {"num_samples": 700, "seed": 1234, "split": "969,30,1"}),
        ("ds_a", "a_sepfinal_yes_train", {"num_samples": 1113, "seed": 1234, "split": "1,0,0"}),
        ("ds_b", "b_ling2_official_train", {"num_samples": 60, "seed": 42, "split": "999,1,0"}),
    ],
)
def test_golden_samples_come_out_of_the_loader(
    dataset: str, name: str, settings: dict[str, Any], show_golden: Any
) -> None:
    ling = dataset == "ds_b"
    with np.load(GOLDEN / f"{name}.npz") as golden:
        numbers = golden["sample_idx"]
        numbers = numbers[numbers < settings["num_samples"]]
        wanted = {
            key: golden[f"sample_{key}"][: len(numbers)]
            for key in ("tokens", "labels", "loss_mask", "position_ids")
        }
    data = DataConfig(
        dataset_path=str(GOLDEN / dataset),
        split=settings["split"],
        data_shuffle_seed=settings["seed"],
        max_target_length=wanted["tokens"].shape[1],
        global_batch_size=1,
        eod_id=156892 if ling else 3,
        pad_id=156892 if ling else 3,
        eod_mask_loss=ling,
    )
    order = SampleOrder((settings["num_samples"],))
    with Loader(
        open_source(data, vocab_size=157184, order=order),
        data,
        rows=range(1),
        global_batch_size=1,
        num_microbatches=1,
        start_step=0,
        num_steps=order.num_samples,
    ) as loader:
        batches = list(loader)
    assert len(batches) == settings["num_samples"]
    assert len(numbers) >= 5
    for place, i in enumerate(numbers.tolist()):
        ours = batches[i]
        fields = (ours.inputs, ours.targets, ours.loss_mask, ours.positions)
        for field, key in zip(fields, wanted, strict=True):
            np.testing.assert_array_equal(field[0], wanted[key][place], err_msg=key)
    cases = f"{len(numbers)} samples of the loader"
    show_golden(f"megatron/data/{name}", cases=cases, worst=0, tolerance=0)


# Who reads, and when.


def test_a_step_reads_its_own_samples_and_each_of_them_once() -> None:
    for microbatches in (1, 2, 3, 4, 6, 12):
        numbers = sample_numbers(
            5, range(BATCH), global_batch_size=BATCH, num_microbatches=microbatches
        )
        assert sorted(numbers.tolist()) == list(range(5 * BATCH, 6 * BATCH))


@pytest.mark.parametrize("dataset_type", ["mmap", "synthetic"])
@pytest.mark.parametrize("process_count", [2, 3, 4])
def test_the_global_batch_does_not_depend_on_the_number_of_processes(
    process_count: int, dataset_type: str
) -> None:
    data = DATA.model_copy(update={"dataset_type": dataset_type})
    with open_loader(data=data) as loader:
        whole = list(loader)
    parts: list[list[PackedBatch]] = []
    for process in range(process_count):
        rows = process_rows(BATCH, process=process, processes=process_count)
        with open_loader(rows, data=data) as loader:
            parts.append(list(loader))
    assert len(whole) == STEPS
    for step, batch in enumerate(whole):
        joined = [np.concatenate(field) for field in zip(*(p[step] for p in parts), strict=True)]
        assert_equal(PackedBatch(*joined), batch)


def test_a_resumed_loader_goes_on_where_the_first_would_have() -> None:
    with open_loader() as loader:
        whole = list(loader)
    with open_loader(start_step=4) as loader:
        rest = list(loader)
        assert_equal(loader.batch_at(1), whole[1])
    assert len(rest) == STEPS - 4
    for ours, theirs in zip(rest, whole[4:], strict=True):
        assert_equal(ours, theirs)


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 2), (3, 6)])
def test_a_resume_on_another_number_of_hosts_goes_on_with_the_same_global_batches(
    before: int, after: int
) -> None:
    data = DATA.model_copy(update={"dataset_path": f"{GOLDEN / 'ds_a'},0.7;{GOLDEN / 'ds_c'},0.3"})

    def read(hosts: int, *, start: int, stop: int) -> list[PackedBatch]:
        """Let every host read its rows, as a process of its own would."""
        parts: list[list[PackedBatch]] = []
        for host in range(hosts):
            rows = process_rows(BATCH, process=host, processes=hosts)
            with open_loader(rows, data=data, start_step=start) as loader:
                parts.append([next(loader) for _ in range(stop - start)])
        steps = zip(*parts, strict=True)
        return [PackedBatch(*map(np.concatenate, zip(*step, strict=True))) for step in steps]

    whole = read(1, start=0, stop=STEPS)
    resumed = read(before, start=0, stop=2) + read(after, start=2, stop=STEPS)
    for ours, theirs in zip(resumed, whole, strict=True):
        assert_equal(ours, theirs)
