"""The training process from its first line to its exit code."""

import contextlib
import dataclasses
import logging
import threading
import time
import traceback
from collections.abc import Generator
from typing import NoReturn

import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from ling_trainer.checkpoint import (
    Checkpoints,
    check_identity,
    checkpoint_directory,
    newest_checkpoint,
    read_record,
)
from ling_trainer.config import RunConfig
from ling_trainer.console import set_up_logging
from ling_trainer.data.index_file import DataError, StorageError
from ling_trainer.data.loader import read_batches
from ling_trainer.data.order import SampleOrder
from ling_trainer.data.packing import PackedBatch
from ling_trainer.data.source import SampleSource, open_source
from ling_trainer.data.validation import ValidationSplit, open_validation, validation_order
from ling_trainer.distributed import initialize, peers_alive
from ling_trainer.ends import Ending, EndRun, ExitCode, leave, write_termination_message
from ling_trainer.environment import Environment
from ling_trainer.evaluate import Evaluation
from ling_trainer.loop import Run, finished, train
from ling_trainer.progress import resumed_at
from ling_trainer.reporter import Reporter
from ling_trainer.run_record import RunRecord, check_data_content, identity_of
from ling_trainer.schema import ConfigError
from ling_trainer.startup import Program, build_program
from ling_trainer.step import TrainState
from ling_trainer.step_programs import StepPrograms
from ling_trainer.stop_signal import StopSignal
from ling_trainer.warm_start import first_state

log = logging.getLogger("ling_trainer")

UNEXPECTED = 1
"""Exit code of an exception nobody expected."""
_SAVE_WAIT_SECONDS = 90.0
"""How long a diverged process of several waits for an earlier save. JAX aborts it 100 s after a
peer died, and the run would then be restarted."""


def run(config: RunConfig, environment: Environment, signals: StopSignal) -> NoReturn:
    """Train, and end the process with the code that says how it went (see ends.ExitCode).

    Args:
      config: of the run.
      environment: what this process was told.
      signals: installed already.
    """
    set_up_logging(environment.group.process_id)
    reporter = Reporter(config, environment)
    try:
        ending = _train(config, environment, signals, reporter)
    except Exception as error:
        ending = _ending_of(error, reporter)
    signals.phase = "leaving"
    end(ending, config, environment, reporter)


def end(
    ending: Ending, config: RunConfig, environment: Environment, reporter: Reporter
) -> NoReturn:
    """Say why, keep answering scrapes after divergence, and leave."""
    group = environment.group
    level = logging.INFO if ending.code in {ExitCode.FINISHED, ExitCode.STOPPED} else logging.ERROR
    log.log(level, "exit=%d reason=%s %s", ending.code, ending.reason, ending.message)
    write_termination_message(ending, process=group.process_id, path=environment.termination_log)
    if ending.code == ExitCode.DIVERGED:
        time.sleep(config.metrics.metrics_linger_seconds)
    reporter.close()
    leave(ending.code, process=group.process_id, num_processes=group.num_processes)


def _train(
    config: RunConfig, environment: Environment, signals: StopSignal, reporter: Reporter
) -> Ending:
    reporter.serve()
    directory = _directory(config)
    found = _newest(directory, environment)
    if found >= config.steps:
        return finished(config.steps, resumed_at(found))
    initialize(
        environment.group,
        bind_ip=environment.pod_ip,
        start_timeout=config.distributed.start_timeout,
        on_timeout=lambda ending: end(ending, config, environment, reporter),
    )
    program = build_program(config)
    checkpoints = Checkpoints(directory, config.checkpoint) if directory else None
    if environment.group.num_processes > 1:  # their listings of a file system may differ
        with peers_alive("agreeing on the checkpoint"):
            found = int(multihost_utils.broadcast_one_to_all(np.int32(found)))
    record = _record(program, directory, found, environment)
    source = _open_data(config, record)  # before the state: it fails sooner
    validation = _open_validation(program, record) if config.evaluation.enabled else None
    record = dataclasses.replace(record, data_content=source.content)
    state = _state(program, checkpoints, found, environment)
    reporter.begin(step=found)
    size = program.batch_sizes.stage_at(found).batch_size
    steps = StepPrograms(program, with_poison=config.fault.enabled, batch_size=size)
    evaluation = None
    if validation:
        step = program.compile_eval_step()
        evaluation = Evaluation(program=program, step=step, split=validation)
    with contextlib.closing(_batches(program, source, found)) as batches:
        ending = train(
            Run(
                config=config,
                program=program,
                steps=steps,
                batches=batches,
                record=record,
                checkpoints=checkpoints,
                evaluation=evaluation,
                reporter=reporter,
                signals=signals,
            ),
            state,
        )
    if checkpoints:
        _await_save(checkpoints, ending, environment)
        reporter.checkpoint_committed(checkpoints.newest_committed)
    return ending


def _record(
    program: Program, directory: epath.Path | None, found: int, environment: Environment
) -> RunRecord:
    """Say what every checkpoint of this process will say, going on from the one of `found`.

    Raises:
      EndRun: that checkpoint is of another model or batch, or its record is damaged.
    """
    identity = identity_of(program.config, global_batch_size=program.global_batch_size)
    order = SampleOrder((program.batch_sizes.samples_before(program.config.steps),))
    content, valid_order = None, None
    if directory and found:
        saved = read_record(directory, found)
        check_identity(directory, found, ours=identity, theirs=saved.identity)
        order, content = saved.sample_order.extended(order.num_samples), saved.data_content
        valid_order = saved.valid_order
    valid_order = validation_order(
        program.config.evaluation,
        valid_order,
        steps=program.config.steps,
        global_batch_size=program.global_batch_size,
    )
    return RunRecord(
        attempt=environment.attempt,
        sample_order=order,
        identity=identity,
        data_content=content,
        settings=program.config.model_dump(mode="json"),
        valid_order=valid_order,
    )


def _state(
    program: Program, checkpoints: Checkpoints | None, found: int, environment: Environment
) -> TrainState:
    """Restore the checkpoint of step `found`, or make the state before the first step for 0."""
    if checkpoints and found:
        with peers_alive(f"restoring step {found}"):
            state = checkpoints.restore(found, program.abstract_state)
        log.info("restored the checkpoint of step %d", found)
    else:
        state = first_state(program)
    if checkpoints and environment.restore_before_step is not None:
        for step in checkpoints.discard_after(found):
            log.warning("discarded the checkpoint of step %d", step)
    return state


def _open_data(config: RunConfig, record: RunRecord) -> SampleSource:
    """Open the data, and check that they are those of the restored checkpoint."""
    data = config.data
    source = open_source(data, vocab_size=config.model.vocab_size, order=record.sample_order)
    where = data.train_data_path or data.dataset_path or data.dataset_type
    check_data_content(source.content, record.data_content, where)
    return source


def _open_validation(program: Program, record: RunRecord) -> ValidationSplit:
    config = program.config
    return open_validation(
        config.data,
        config.evaluation,
        vocab_size=config.model.vocab_size,
        order=record.valid_order,
        global_batch_size=program.global_batch_size,
        num_microbatches=config.gradient_accumulation_steps,
    )


def _batches(program: Program, source: SampleSource, start: int) -> Generator[PackedBatch]:
    return read_batches(
        source,
        program.config.data,
        sizes=program.batch_sizes,
        rows_of=program.local_rows,
        start_step=start,
        num_steps=program.config.steps,
    )


def _directory(config: RunConfig) -> epath.Path | None:
    base = config.base_output_directory
    if not config.checkpoint.enable_checkpointing or base is None:
        return None
    return checkpoint_directory(base, config.run_name)


def _newest(directory: epath.Path | None, environment: Environment) -> int:
    """Return the step of the checkpoint to restore, 0 without one."""
    if directory is None:
        return 0
    before = environment.restore_before_step
    return newest_checkpoint(directory, before=before, attempt=environment.attempt) or 0


def _await_save(checkpoints: Checkpoints, ending: Ending, environment: Environment) -> None:
    """Wait for the last save; a run that diverged ends as diverged whatever comes of it."""
    if ending.code != ExitCode.DIVERGED:
        checkpoints.wait()
        return
    errors: list[Exception] = []

    def wait() -> None:
        try:
            checkpoints.wait()
        except EndRun as error:
            errors.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(_SAVE_WAIT_SECONDS if environment.group.num_processes > 1 else None)
    if thread.is_alive() or errors:
        log.error("the last save did not complete: %s", errors or "a peer is gone")


def _ending_of(error: Exception, reporter: Reporter) -> Ending:
    """Say how the run ends after an exception."""
    progress = reporter.progress
    if isinstance(error, EndRun):
        known = error.ending
    elif isinstance(error, DataError):
        known = Ending(code=ExitCode.DATA, reason="InvalidData", message=str(error))
    elif isinstance(error, StorageError):
        known = Ending(code=ExitCode.RESTART, reason="StorageFailed", message=str(error))
    elif isinstance(error, ConfigError):
        known = Ending(code=ExitCode.CONFIGURATION, reason="InvalidConfig", message=str(error))
    else:
        traceback.print_exception(error)
        message = f"{type(error).__name__}: {error}"
        known = Ending(code=UNEXPECTED, reason="UnexpectedError", message=message)
    return dataclasses.replace(
        known, step=progress.step, last_finite_step=progress.last_finite_step
    )
