"""Tell the outside about a run: metrics page, metrics.jsonl, log line and bar, step by step."""

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from ling_trainer.config import RunConfig
from ling_trainer.console import Console
from ling_trainer.environment import Environment, installed_version
from ling_trainer.exporter import Exporter, Identity, Snapshot
from ling_trainer.journal import Journal
from ling_trainer.progress import Progress, fold, resumed_at
from ling_trainer.report import NonFiniteStep, StepReport, nonfinite, to_log

log = logging.getLogger("ling_trainer")
JOURNAL_NAME = "metrics.jsonl"


class Reporter:
    """Hold a run's progress, and show it. Only process 0 has a journal and a bar."""

    def __init__(self, config: RunConfig, environment: Environment) -> None:
        """Start with nothing done; the page says so at once."""
        group = environment.group
        self._config = config
        self._environment = environment
        self._checkpoint_step = 0
        self._checkpoint_time = 0.0
        self._log: dict[str, float] = {}
        self._evaluation: Mapping[str, float] = {}
        self._journal: Journal | None = None
        self._console: Console | None = None
        self._heartbeat = time.time()
        self.progress = Progress()
        self._exporter = Exporter(
            Identity(
                run=environment.run or config.run_name,
                run_namespace=environment.run_namespace,
                pod_uid=environment.pod_uid,
                process=group.process_id,
                processes=group.num_processes,
                attempt=environment.attempt,
                preset=config.preset or "",
                version=installed_version(),
            )
        )
        self._publish()

    def serve(self) -> None:
        """Answer scrapes from now on.

        Raises:
          EndRun: the port is taken (exit code 5).
        """
        port = self._config.metrics.metrics_port
        url = self._exporter.serve(
            address=self._environment.metrics_address,
            port=port + self._environment.container_index if port else 0,
        )
        log.info("metrics=%s", url)

    def begin(self, *, step: int) -> None:
        """Say where the run goes on: after this step, 0 for a new one."""
        self.progress = resumed_at(step)
        self._checkpoint_step, self._checkpoint_time = step, time.time()
        process = self._environment.group.process_id
        self._console = Console(process=process, start=step, target_steps=self._config.steps)
        base = self._config.base_output_directory
        if process == 0 and base is not None:
            if "://" in base:
                log.warning("%s is written to file systems only, not to %s", JOURNAL_NAME, base)
            else:
                path = Path(base) / self._config.run_name / JOURNAL_NAME
                self._journal = Journal(path, resumed_step=step)
        self._publish()

    def finish_step(
        self, report: StepReport, *, seconds: float, tokens: int
    ) -> NonFiniteStep | None:
        """Show a step; record_step then writes its line.

        Args:
          report: on the host.
          seconds: wall time of the step.
          tokens: of its batch, padding included.

        Returns:
          What was not finite, or None.
        """
        now, step, bad = time.time(), int(report.step), nonfinite(report)
        with_loss = int(report.total_weights)
        self.progress = fold(self.progress, step=step, tokens=with_loss, bad=bad, now=now)
        speed = {"perf/step_time_seconds": seconds, "perf/tokens_per_second": tokens / seconds}
        self._log = {**to_log(report), **speed}
        self._heartbeat = now
        self._publish()
        self._print(step, bad)
        return bad

    def beat(self) -> None:
        """Say that the process gets on, between two steps."""
        self._heartbeat = time.time()
        self._publish()

    def record_step(self, evaluation: Mapping[str, float]) -> None:
        """Write the line of the step that finish_step showed, and show its evaluation.

        Args:
          evaluation: log keys and values, those of the step apart; empty without one.
        """
        step, values = self.progress.step, {**self._log, **evaluation}
        if self._journal:
            self._journal.append(step, self.progress.last_step_time, values)
        if evaluation:
            self._evaluation = evaluation
            self._publish()
            if self._environment.group.process_id == 0 and self._console:
                self._console.evaluation(step, evaluation)

    def checkpoint_committed(self, step: int) -> None:
        """Show the newest complete checkpoint; 0 while there is none."""
        if step != self._checkpoint_step:
            self._checkpoint_step, self._checkpoint_time = step, time.time()
            self._publish()

    def close(self) -> None:
        """Give the terminal back, close the journal, stop answering scrapes."""
        if self._console:
            self._console.close()
        if self._journal:
            self._journal.close()
        self._exporter.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _print(self, step: int, bad: NonFiniteStep | None) -> None:
        if self._environment.group.process_id != 0 or not self._console:
            return
        self._console.advance(step, self._log["learning/loss"])
        if step % self._config.metrics.log_period == 0 or step == self._config.steps or bad:
            self._console.step(step, self._log)
        if bad:
            log.warning("step=%d reason=%s value=%s", step, bad.signal, bad.kind)

    def _publish(self) -> None:
        checkpoint = self._config.checkpoint
        self._exporter.publish(
            Snapshot(
                heartbeat=self._heartbeat,
                progress=self.progress,
                target_steps=self._config.steps,
                checkpoint_step=self._checkpoint_step,
                checkpoint_time=self._checkpoint_time,
                checkpoint_period=(
                    checkpoint.checkpoint_period if checkpoint.enable_checkpointing else 0
                ),
                log={**self._log, **self._evaluation},
            )
        )
