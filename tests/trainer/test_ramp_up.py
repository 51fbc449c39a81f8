"""A batch size that ramps up: Megatron's sizes, and the order of the samples as without it."""

import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from ds_a_loader import process_rows
from ling_trainer.batch import Batch
from ling_trainer.config import RunConfig
from ling_trainer.data.loader import read_batches, sample_numbers
from ling_trainer.data.order import SampleOrder
from ling_trainer.data.packing import PackedBatch
from ling_trainer.data.show import open_samples
from ling_trainer.data.source import open_source
from ling_trainer.ramp_up import BatchSizes, constant_batch, ramp_up_stages
from ling_trainer.run_record import differences, identity_of
from ling_trainer.schedule import full_batches, learning_rate
from ling_trainer.schema import ConfigError
from ling_trainer.settings import resolve
from ling_trainer.sharding import AXES
from ling_trainer.startup import Program, check_rows
from ling_trainer.step import loss_and_gradients
from ling_trainer.step_programs import StepPrograms

GOLDEN = Path(__file__).parents[1] / "golden" / "megatron"
CASES: list[dict[str, Any]] = json.loads(
    (GOLDEN / "optimizer" / "ramp_up.json").read_text()
)["cases"]  # fmt: skip


def run_config(**settings: Any) -> RunConfig:
    data = {} if "dataset_path" in settings else {"dataset_type": "synthetic"}
    base = {"preset": "ling2_tiny", "enable_checkpointing": False}
    return resolve(base | data | settings)


RAMP = run_config(
    dataset_path=str(GOLDEN / "data" / "ds_a"),
    split="1,0,0",
    data_shuffle_seed=7,
    max_target_length=32,
    vocab_size=1000,
    eod_id=3,
    pad_id=3,
    global_batch_size=12,
    gradient_accumulation_steps=6,
    rampup_batch_size=[4, 4, 24],
    steps=8,
)
SIZES = (4, 4, 4, 8, 8, 12, 12, 12)
"""Of the steps of RAMP: 12 samples an increment; the fifth step begins before the 24th."""


def sizes_of(config: RunConfig) -> BatchSizes:
    assert config.ramp_up
    return config.ramp_up


# Megatron's sizes.


@pytest.mark.parametrize("case", range(len(CASES)))
def test_golden_ramp_up_has_megatrons_microbatches_at_every_step(
    case: int, show_golden: Any
) -> None:
    golden = CASES[case]
    size, rows, steps = golden["global_batch_size"], golden["micro_batch_rows"], golden["steps"]
    sizes = ramp_up_stages(
        (golden["start"], golden["increment"], golden["samples"]),
        batch_size=size,
        num_microbatches=size // rows,
    )
    stages = [sizes.stage_at(step) for step in range(steps)]
    assert [stage.num_microbatches for stage in stages] == golden["num_microbatches"]
    assert [stage.batch_size for stage in stages] == [rows * k for k in golden["num_microbatches"]]
    assert sizes.samples_before(steps) == golden["consumed_samples"]
    show_golden(
        "megatron/optimizer/ramp_up.json",
        cases=f"case {case}, {steps} steps", worst=0, tolerance=0,
    )  # fmt: skip


def test_every_golden_ramp_up_reaches_its_full_batch() -> None:
    assert len(CASES) == 6
    for case in CASES:
        full = case["global_batch_size"] // case["micro_batch_rows"]
        assert case["num_microbatches"][-1] == full > case["num_microbatches"][0]


def test_a_stage_ends_with_the_first_step_that_begins_past_its_samples() -> None:
    sizes = sizes_of(RAMP)
    assert tuple(sizes.stage_at(step).batch_size for step in range(8)) == SIZES
    assert [sizes.samples_before(step) for step in range(9)] == [0, *itertools.accumulate(SIZES)]
    spans = [(stage.batch_size, first, end) for stage, first, end in sizes.spans(1, 7)]
    assert spans == [(4, 1, 3), (8, 3, 5), (12, 5, 7)]
    assert [span[1:] for span in sizes.spans(0, 2)] == [(0, 2)]
    assert not list(sizes.spans(7, 7))


def test_without_a_ramp_up_every_step_has_the_batch_and_its_microbatches() -> None:
    sizes = constant_batch(12, num_microbatches=3)
    assert sizes.samples_before(10**7) == 12 * 10**7
    assert [span[1:] for span in sizes.spans(3, 9)] == [(3, 9)]
    assert run_config(global_batch_size=12, gradient_accumulation_steps=3).ramp_up is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"rampup_batch_size": [4, 3, 20]},
            "does not reach .*=12 in increments of 3; .* divides 8",
        ),
        ({"rampup_batch_size": [12, 4, 20]}, "starts at 12 and data.global_batch_size=12"),
        ({"rampup_batch_size": [3, 3, 20]}, "no multiple of the 2 rows of a micro-batch"),
        ({"rampup_batch_size": [4, 4, 2**30]}, "stay below 1073741824"),
        ({"rampup_batch_size": [4, 4]}, "rampup_batch_size=.*at least 3 items"),
        ({"rampup_batch_size": [4, 4, 0]}, r"rampup_batch_size\.2=0: "),
        ({"rampup_batch_size": [4, 4, 2.5]}, r"rampup_batch_size\.2=2\.5: "),
        (
            {"rampup_batch_size": [4, 4, 20], "per_device_batch_size": 2},
            "needs global_batch_size",
        ),
    ],
)
def test_a_ramp_up_that_cannot_be_is_refused_by_field(
    settings: dict[str, Any], message: str
) -> None:
    size = {} if "per_device_batch_size" in settings else {"global_batch_size": 12}
    with pytest.raises(ConfigError, match=message):
        run_config(gradient_accumulation_steps=6, **size, **settings)


def test_a_batch_on_the_way_that_does_not_divide_over_the_mesh_is_refused() -> None:
    mesh = AbstractMesh((4, 1, 1, 1), AXES)
    check_rows(RAMP, 12, cast("Any", mesh))
    with pytest.raises(ConfigError, match=r"a batch of 4 .*rampup_batch_size does not divide"):
        check_rows(RAMP, 12, cast("Any", AbstractMesh((12, 1, 1, 1), AXES)))


def test_another_ramp_up_is_another_run_to_a_checkpoint() -> None:
    steeper = run_config(global_batch_size=12, rampup_batch_size=[6, 6, 20],
                         gradient_accumulation_steps=2)  # fmt: skip
    gentler = run_config(global_batch_size=12, rampup_batch_size=[4, 4, 20],
                         gradient_accumulation_steps=3)  # fmt: skip
    ours, theirs = (identity_of(c, global_batch_size=12) for c in (steeper, gentler))
    assert differences(ours, theirs) == [
        "data.rampup_batch_size is [4, 4, 20] in the checkpoint and [6, 6, 20] now"
    ]


# The order of the samples.


def test_the_microbatches_of_all_steps_hold_the_samples_in_their_order() -> None:
    flat: list[int] = []
    for step in range(12):
        stage = sizes_of(RAMP).stage_at(step)
        numbers = sample_numbers(
            step - stage.first_step,
            range(stage.batch_size),
            global_batch_size=stage.batch_size,
            num_microbatches=stage.num_microbatches,
            first_sample=stage.first_sample,
        )
        flat += numbers.reshape(-1, stage.num_microbatches).T.ravel().tolist()
    assert flat == list(range(len(flat)))


def read(
    sizes: BatchSizes,
    *,
    start_step: int = 0,
    num_steps: int = RAMP.steps,
    rows_of: Callable[[int], range] = range,
) -> list[PackedBatch]:
    order = SampleOrder((sizes_of(RAMP).samples_before(RAMP.steps),))
    return list(
        read_batches(
            open_source(RAMP.data, vocab_size=1000, order=order),
            RAMP.data,
            sizes=sizes,
            rows_of=rows_of,
            start_step=start_step,
            num_steps=num_steps,
        )
    )


@pytest.fixture(scope="module")
def whole() -> list[PackedBatch]:
    return read(sizes_of(RAMP))


def in_order(batch: PackedBatch, num_microbatches: int) -> np.ndarray:
    """Return the rows of a batch micro-batch by micro-batch."""
    return np.concatenate([batch.inputs[k::num_microbatches] for k in range(num_microbatches)])


def test_ramping_up_reads_what_a_constant_batch_reads_in_the_same_order(whole: Any) -> None:
    stages = [sizes_of(RAMP).stage_at(step) for step in range(RAMP.steps)]
    ours = [
        in_order(batch, stage.num_microbatches) for batch, stage in zip(whole, stages, strict=True)
    ]
    assert tuple(map(len, ours)) == SIZES
    constant = read(constant_batch(4, num_microbatches=2), num_steps=sum(SIZES) // 4)
    theirs = [in_order(batch, 2) for batch in constant]
    np.testing.assert_array_equal(np.concatenate(ours), np.concatenate(theirs))


@pytest.mark.parametrize("start_step", [1, 3, 4, 7])
def test_a_run_resumed_while_it_ramps_up_reads_the_same_batches(
    whole: Any, start_step: int
) -> None:
    rest = read(sizes_of(RAMP), start_step=start_step)
    assert len(rest) == RAMP.steps - start_step
    for ours, theirs in zip(rest, whole[start_step:], strict=True):
        np.testing.assert_equal(ours._asdict(), theirs._asdict())


def test_each_process_reads_its_own_rows_of_every_batch_size(whole: Any) -> None:
    parts = [
        read(
            sizes_of(RAMP),
            rows_of=functools.partial(process_rows, process=process, processes=2),
        )
        for process in (0, 1)
    ]
    for batch, first, second in zip(whole, *parts, strict=True):
        np.testing.assert_array_equal(np.concatenate([first.inputs, second.inputs]), batch.inputs)


def test_data_show_makes_the_order_for_the_samples_that_the_steps_read() -> None:
    data = RAMP.data.model_copy(update={"rampup_batch_size": None})
    ramping = RAMP.model_copy(update={"steps": 22})  # 232 samples: one epoch of 242 is enough
    constant = ramping.model_copy(update={"data": data})  # 264
    sizes = [
        len(open_samples(c, num_samples=None, split_name="train")) for c in (ramping, constant)
    ]
    assert sizes == [242, 484]


# The step.


def test_the_step_of_a_small_batch_is_that_of_a_run_with_fewer_microbatches(
    product: Any, toy: SimpleNamespace, step_config: Callable[..., RunConfig]
) -> None:
    model = toy.build(product())
    rows = jnp.zeros((24, 5), jnp.int32)
    batch = Batch(
        inputs=rows, targets=rows, positions=rows, segment_ids=rows + 1, loss_mask=rows == 0
    )
    ramping = step_config(gradient_accumulation_steps=4, rampup_batch_size=[12, 12, 100])
    constant = step_config(gradient_accumulation_steps=2, global_batch_size=24)
    whole = step_config(gradient_accumulation_steps=4, global_batch_size=24)

    def program(config: RunConfig) -> str:
        gradients = functools.partial(loss_and_gradients, config=config, **model)
        return str(jax.make_jaxpr(gradients)(toy.params, toy.bias, batch))

    assert program(ramping) == program(constant)
    assert program(ramping) != program(whole)


def test_a_position_in_full_batches_is_exact_after_a_million_steps() -> None:
    # 7 steps of 3 samples more than the increment needs: full batches no longer end with steps.
    sizes = ramp_up_stages((30, 15, 2**29), batch_size=6000, num_microbatches=400)
    assert len(sizes.stages) == 399
    inside = [stage.first_step + n for stage in sizes.stages for n in (0, 1)]
    last = sizes.full.first_step
    steps = np.array(sorted({0, 1, *inside[::40], last - 1, last, last + 1_000_000}))
    wholes, rests = jax.jit(jax.vmap(functools.partial(full_batches, sizes)))(
        jnp.asarray(steps, jnp.int32)
    )
    for step, whole, rest in zip(steps.tolist(), wholes.tolist(), rests.tolist(), strict=True):
        samples = sizes.samples_before(step)
        assert whole == samples // 6000
        assert rest == pytest.approx(samples % 6000 / 6000, abs=1e-7)
    assert sizes.samples_before(last + 1_000_000) > 2**31


def test_a_schedule_counts_samples_while_the_batch_size_ramps_up() -> None:
    optimizer = run_config(warmup_steps=4).optimizer
    rates = [
        float(learning_rate(optimizer, whole, fraction=rest))
        for whole, rest in (full_batches(sizes_of(RAMP), jnp.int32(step)) for step in range(8))
    ]
    consumed = np.array([sizes_of(RAMP).samples_before(step) for step in range(8)])
    peak = optimizer.learning_rate
    np.testing.assert_allclose(rates, peak * np.minimum(1, consumed / (4 * 12)), rtol=3e-7)


def test_a_step_is_compiled_when_the_first_batch_of_its_size_comes() -> None:
    compiled: list[int] = []

    def compile_step(*, with_poison: bool, batch_size: int) -> str:
        assert with_poison
        compiled.append(batch_size)
        return f"step of {batch_size}"

    program = cast("Program", SimpleNamespace(compile=compile_step))
    steps = StepPrograms(program, with_poison=True, batch_size=4)
    for rows in SIZES:
        batch = cast("Batch", SimpleNamespace(loss_mask=np.zeros((rows, 2))))
        assert cast("str", steps.of(batch)) == f"step of {rows}"
    assert compiled == [4, 8, 12]
