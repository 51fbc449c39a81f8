"""The wire contract: every series the trainer exports and the operator reads. No JAX.

A log key becomes a series by one rule: prefix `ling_`, slash to underscore. Series without a log
key are listed once below. Levels are gauges; events are counters, created at 0 before the first
step, so that no scrape can miss one. Every series carries the labels `run` and `run_namespace`.
"""

from collections.abc import Container
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import count, takewhile

PREFIX = "ling_"
RUN_LABELS = ("run", "run_namespace")
DEFAULT_PORT = 9464


class Kind(StrEnum):
    """Prometheus kinds."""

    GAUGE = "gauge"
    COUNTER = "counter"


class Signal(StrEnum):
    """What of a step was not finite; also the reason in messages, conditions and events."""

    NON_FINITE_LOSS = "NonFiniteLoss"
    NON_FINITE_GRADIENT = "NonFiniteGradient"


class NonFinite(StrEnum):
    """How it was not finite; NaN wins where both occur."""

    NAN = "nan"
    INF = "inf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One exported series.

    Attributes:
      name: Prometheus name, for counters with its `_total`.
      log_key: key in logs and JSONL, or None for series that exist only on the wire.
      labels: names besides RUN_LABELS.
      every_process: exported by each process; otherwise by global process 0 alone.
      optional: absent where the model or the configuration has no such thing.
    """

    name: str
    log_key: str | None
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    every_process: bool = False
    optional: bool = False


def series_name(log_key: str) -> str:
    """Return the series of a log key: 'learning/is_nan' -> 'ling_learning_is_nan'."""
    return PREFIX + log_key.replace("/", "_")


def _gauge(log_key: str, unit: str, text: str) -> Metric:
    return Metric(
        name=series_name(log_key), log_key=log_key, kind=Kind.GAUGE, unit=unit, help=text
    )


def _optional(log_key: str, unit: str, text: str) -> Metric:
    return replace(_gauge(log_key, unit, text), optional=True)


LOSS = _gauge("learning/loss", "nats", "Sum of every reported loss part.")
LM_LOSS = _gauge("learning/lm_loss", "nats per token", "Cross-entropy alone, by the loss mode.")
LM_LOSS_TOKEN_AVG = _gauge(
    "learning/lm_loss_token_avg", "nats per token", "Cross-entropy over all tokens of the step."
)
RAW_GRAD_NORM = _gauge("learning/raw_grad_norm", "1", "Global gradient norm before clipping.")
NUM_ZEROS = _optional("learning/num_zeros", "elements", "Gradient elements equal to zero.")
NUM_GRAD_ELEMENTS = _optional(
    "learning/num_grad_elements", "elements", "Gradient elements in all."
)
TOTAL_WEIGHTS = _gauge("learning/total_weights", "tokens", "Tokens with a loss in the step.")
IS_NAN = _gauge("learning/is_nan", "0 or 1", "lm_loss is NaN.")
IS_INF = _gauge("learning/is_inf", "0 or 1", "lm_loss is infinite.")
GRAD_IS_NONFINITE = _gauge(
    "learning/grad_is_nonfinite", "0 or 1", "raw_grad_norm is NaN or infinite."
)
MTP_DEPTH_LOSS = _gauge(
    "learning/mtp_{depth}_loss", "nats per token", "Loss of one prediction depth, no factor."
)
"""Of each depth from 1; `{depth}` stands for it. The one family of series without a fixed name."""
STEP_TIME = _gauge("perf/step_time_seconds", "seconds", "Wall time of the last step.")
TOKENS_PER_SECOND = _gauge("perf/tokens_per_second", "tokens per second", "Tokens over step time.")

LOGGED: tuple[Metric, ...] = (
    LOSS,
    LM_LOSS,
    LM_LOSS_TOKEN_AVG,
    _gauge("learning/objective", "nats", "What the gradient is the derivative of."),
    _gauge("learning/z_loss", "nats", "Output head's z-loss, coefficient inside."),
    _gauge("learning/moe_lb_loss", "nats", "Balance loss, coefficient inside."),
    _gauge("learning/load_balancing_loss", "1", "Balance loss a layer, no coefficient."),
    _gauge("learning/moe_z_loss", "nats", "Router z-loss, coefficient inside."),
    _gauge("learning/raw_moe_z_loss", "1", "Router z-loss a layer, no coefficient."),
    _gauge("learning/mtp_loss", "nats", "Multi-token prediction loss, factor inside."),
    _gauge("learning/raw_mtp_loss", "nats per token", "Multi-token prediction loss, no factor."),
    _optional("learning/indexer_loss", "nats", "Sparse attention indexers' loss, factor inside."),
    _optional("learning/router_bias_mean", "1", "Mean of the routers' expert biases."),
    _optional("learning/router_bias_std", "1", "Deviation of a router's expert biases."),
    _optional(
        "learning/router_topk_weight_mean",
        "1",
        "Mean over tokens and chosen experts of the softmax of biased scores.",
    ),
    _optional(
        "learning/router_probs_std",
        "1",
        "Deviation over experts of the softmax of biased scores, averaged over tokens.",
    ),
    TOTAL_WEIGHTS,
    _gauge("learning/grad_norm", "1", "Global gradient norm after clipping."),
    RAW_GRAD_NORM,
    _gauge("learning/param_norm", "1", "Global norm of the parameters after the update."),
    _gauge("learning/learning_rate", "1", "Learning rate of the step."),
    NUM_ZEROS,
    NUM_GRAD_ELEMENTS,
    IS_NAN,
    IS_INF,
    GRAD_IS_NONFINITE,
    STEP_TIME,
    TOKENS_PER_SECOND,
)
EVALUATED: tuple[Metric, ...] = (
    _gauge("eval/lm_loss", "nats per token", "Cross-entropy over all tokens of an evaluation."),
    _gauge("eval/mtp_loss", "nats per token", "Multi-token prediction likewise, no factor."),
    _gauge("eval/perplexity", "1", "e to the evaluation's lm_loss."),
    _gauge("eval/total_weights", "tokens", "Tokens with a loss in the evaluation."),
)

STEP = Metric(
    name="ling_step",
    log_key=None,
    kind=Kind.GAUGE,
    unit="step",
    help="Last finished step; the first is 1.",
)
TARGET_STEPS = Metric(
    name="ling_target_steps", log_key=None, kind=Kind.GAUGE, unit="steps", help="Steps asked for."
)
LAST_FINITE_STEP = Metric(
    name="ling_last_finite_step",
    log_key=None,
    kind=Kind.GAUGE,
    unit="step",
    help="Last step with finite loss and gradients; 0 before the first.",
)
LAST_NONFINITE_STEP = Metric(
    name="ling_last_nonfinite_step",
    log_key=None,
    kind=Kind.GAUGE,
    unit="step",
    help="Last step with a NaN or infinite loss or gradient; 0 while there is none.",
)
LAST_STEP_TIMESTAMP = Metric(
    name="ling_last_step_timestamp_seconds",
    log_key=None,
    kind=Kind.GAUGE,
    unit="seconds since the epoch",
    help="When the last step finished; 0 before the first.",
)
LAST_FINITE_CHECKPOINT = Metric(
    name="ling_last_finite_checkpoint_step",
    log_key=None,
    kind=Kind.GAUGE,
    unit="step",
    help="Step of the newest committed checkpoint; 0 while there is none.",
)
LAST_CHECKPOINT_TIMESTAMP = Metric(
    name="ling_last_checkpoint_timestamp_seconds",
    log_key=None,
    kind=Kind.GAUGE,
    unit="seconds since the epoch",
    help="When this process last saw a checkpoint complete, or began to train; 0 before.",
)
CHECKPOINT_PERIOD = Metric(
    name="ling_checkpoint_period_steps",
    log_key=None,
    kind=Kind.GAUGE,
    unit="steps",
    help="Steps asked for between checkpoints; 0 where none are made.",
)
CONSECUTIVE_MAX = Metric(
    name="ling_nonfinite_steps_consecutive_max",
    log_key=None,
    kind=Kind.GAUGE,
    unit="steps",
    help="Longest row of non-finite steps since the process started.",
)
NONFINITE_STEPS = Metric(
    name="ling_nonfinite_steps_total",
    log_key=None,
    kind=Kind.COUNTER,
    unit="steps",
    help="Steps whose loss or gradients were not finite.",
    labels=("kind", "signal"),
)
STEPS = Metric(
    name="ling_steps_total", log_key=None, kind=Kind.COUNTER, unit="steps", help="Steps finished."
)
TOKENS = Metric(
    name="ling_tokens_total",
    log_key=None,
    kind=Kind.COUNTER,
    unit="tokens",
    help="Tokens with a loss consumed.",
)
EMPTY_STEPS = Metric(
    name="ling_empty_steps_total",
    log_key=None,
    kind=Kind.COUNTER,
    unit="steps",
    help="Steps without a single token with a loss; they change no parameter.",
)
HEARTBEAT = Metric(
    name="ling_heartbeat_timestamp_seconds",
    log_key=None,
    kind=Kind.GAUGE,
    unit="seconds since the epoch",
    help="When this process last passed the end of a step or validation batch, or started.",
    every_process=True,
)
RUN_INFO = Metric(
    name="ling_run_info",
    log_key=None,
    kind=Kind.GAUGE,
    unit="1",
    help="Constant 1; what runs where.",
    labels=("pod_uid", "process", "processes", "attempt", "preset", "version"),
    every_process=True,
)

ON_WIRE_ONLY: tuple[Metric, ...] = (
    STEP,
    TARGET_STEPS,
    LAST_FINITE_STEP,
    LAST_NONFINITE_STEP,
    LAST_STEP_TIMESTAMP,
    LAST_FINITE_CHECKPOINT,
    LAST_CHECKPOINT_TIMESTAMP,
    CHECKPOINT_PERIOD,
    CONSECUTIVE_MAX,
    NONFINITE_STEPS,
    STEPS,
    TOKENS,
    EMPTY_STEPS,
    HEARTBEAT,
    RUN_INFO,
)
ALL: tuple[Metric, ...] = LOGGED + EVALUATED + ON_WIRE_ONLY


def mtp_depth_loss(depth: int) -> Metric:
    """Return the series of one prediction depth: 1 -> 'ling_learning_mtp_1_loss'."""
    template = MTP_DEPTH_LOSS
    log_key = str(template.log_key).format(depth=depth)
    return replace(template, name=series_name(log_key), log_key=log_key)


def logged_in(log: Container[str | None]) -> tuple[Metric, ...]:
    """Return the series of a log: those of ALL whose key it has, and one for each depth."""
    depths = takewhile(lambda m: m.log_key in log, map(mtp_depth_loss, count(1)))
    return (*(m for m in ALL if m.log_key in log), *depths)
