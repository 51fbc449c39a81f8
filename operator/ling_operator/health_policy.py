"""spec.health: when a run is stopped, when people are told, and by which thresholds.

Every rule has an action. Halt stops the run; Alert sets a condition to False and posts an event,
once for each time it begins; Ignore looks away. Rules other than nonFinite see the steps that a
scrape happens to meet: "steps in a row" are then distinct steps that were seen, one after another.
"""

from typing import Annotated, Literal

from pydantic import Field

from ling_operator.api_names import PositiveInt
from ling_trainer.schema import Schema

type RuleAction = Literal["Halt", "Alert", "Ignore"]
type HaltMode = Literal["Suspend", "Fail"]
type Seconds = Annotated[int, Field(ge=1, le=604_800)]
type Positive = Annotated[float, Field(gt=0, le=1e6)]
type Window = Annotated[int, Field(ge=10, le=128)]


class NonFinitePolicy(Schema):
    """NaN or infinity in loss or gradients. Reason NonFiniteLoss or NonFiniteGradient."""

    consecutive_steps: PositiveInt = 1
    """Non-finite steps in a row that make the run diverged."""
    action: RuleAction = "Halt"
    """Halt stops the run; Alert only sets the condition Healthy to False; Ignore looks away."""


class LossSpikePolicy(Schema):
    """lm_loss far above its recent median. Reason LossSpike."""

    window: Window = 40
    """Steps seen that median and MAD (median absolute deviation) are of; none is judged before 10.

    Suspicious steps stay out of it, so that a spike that lasts for hours is one to its end.
    """
    deviations: Positive = 6.0
    """Rise over the median, in MADs times 1.4826 (a normal distribution's standard deviation)."""
    floor: Positive = 1.0
    """Rise over the median, in nats, below which nothing is a spike, however calm the run is."""
    consecutive_steps: PositiveInt = 3
    """Steps in a row that must lie above both."""
    action: RuleAction = "Alert"
    """Alert, because most spikes pass; after a Halt the next attempt restores from before it."""


class GradNormSpikePolicy(Schema):
    """raw_grad_norm (before clipping) far above its recent median. Reason GradNormSpike."""

    window: Window = 40
    """Steps seen that median and MAD are of; none is judged before 10."""
    deviations: Positive = 6.0
    """Rise of the norm's logarithm over the median's, in MADs of the logarithm times 1.4826."""
    factor: Annotated[float, Field(gt=1, le=1e6)] = 10.0
    """Multiple of the median below which nothing is a spike."""
    consecutive_steps: PositiveInt = 3
    """Steps in a row that must lie above both."""
    action: RuleAction = "Alert"
    """Alert, because clipping bounds what a large gradient can do."""


class NumZerosPolicy(Schema):
    """More gradient elements are zero than used to be. Reason ZeroGradients.

    Judged against the highest median seen in the attempt: experts that no token reaches have zero
    gradients, which comes and goes, and a share that is high from the start is no alarm. Needs
    num_zeros and num_grad_elements; a trainer with optimizerMemoryHostOffload exports neither.
    """

    window: Window = 40
    """Steps seen that the median share of zeros and its MAD are of; none is judged before 10."""
    deviations: Positive = 6.0
    """Rise of the share of zeros over its highest median, in MADs times 1.4826."""
    lost_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.6
    """Of the elements that used not to be zero, the fraction that must have become zero."""
    consecutive_steps: PositiveInt = 5
    """Steps in a row that must lie above both."""
    action: RuleAction = "Alert"
    """Alert: what has died shows in the loss later, if at all."""


class TotalWeightsPolicy(Schema):
    """Far fewer tokens with a loss in a step than used to be. Reason LossMaskCollapse.

    Judged against the highest median seen in the attempt, so that a mask that is lost little by
    little is noticed too.
    """

    window: Window = 40
    """Steps seen that the median is of; none is judged before 10."""
    min_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Fraction of the highest median that a step has to reach."""
    consecutive_steps: PositiveInt = 5
    """Steps in a row below it."""
    action: RuleAction = "Alert"
    """Alert, because data may be like that; set Halt for packed data, where it is a bug."""


class ZeroLossPolicy(Schema):
    """lm_loss stuck at 0: nothing is learned, for want of tokens that count. Reason ZeroLoss."""

    floor: Annotated[float, Field(gt=0, le=1)] = 1e-6
    """A loss no further from 0 than this, in nats, counts as 0."""
    consecutive_steps: PositiveInt = 10
    """Steps in a row."""
    action: RuleAction = "Halt"
    """Halt, because such steps only spend data and machines."""


class StallPolicy(Schema):
    """No sign of life from process 0: neither a step nor a validation batch. Reason Stalled."""

    factor: Annotated[float, Field(ge=1, le=1000)] = 3.0
    """Multiple of the median time of a step that may pass without one."""
    floor_seconds: Seconds = 600
    """Time that may pass in any case: a checkpoint, a slow read."""
    compile_grace_seconds: Seconds = 1800
    """Time that may pass before the first step of a process: start, restore, compilation."""
    action: RuleAction = "Alert"
    """Alert, because it may be the storage, and the state in memory is good: a halt cures nothing.

    A lost peer or host ends the trainer by itself, and is restarted.
    """


class StragglerPolicy(Schema):
    """A host whose heartbeat is behind the others'. Reason StragglerHost."""

    factor: Annotated[float, Field(ge=1, le=1000)] = 3.0
    """Multiple of the median time of a step that a host may be behind."""
    floor_seconds: Seconds = 180
    """Time that it may be behind in any case; all hosts but the first are read once a minute."""
    action: RuleAction = "Alert"
    """Alert, with the host's name: the run may still be moving."""


class MetricsMissingPolicy(Schema):
    """No page of process 0 while all pods run. Reason MetricsMissing, in MetricsAvailable."""

    factor: Annotated[float, Field(ge=1, le=1000)] = 3.0
    """Multiple of scrapeIntervalSeconds that may pass without a page."""
    floor_seconds: Seconds = 15
    """Time that may pass in any case."""
    action: RuleAction = "Alert"
    """Alert, because a network that is down says nothing of the run behind it."""


class HealthPolicy(Schema):
    """When a run is stopped. Thresholds act at once; trainerStops from the next attempt on."""

    scrape_interval_seconds: Annotated[int, Field(ge=1, le=3600)] = 5
    """Seconds between two reads of the trainer's metrics."""
    trainer_stops: bool = True
    """The trainer itself stops after nonFinite.consecutiveSteps, without waiting for a scrape."""
    halt_mode: HaltMode = "Suspend"
    """Suspend keeps a halted run's JobSet, suspended, and its ended pods as evidence.

    Fail deletes it with its pods once the status says why. Either way quota and nodes are free;
    with Fail those who wait for the JobSet's end see it too. Not with spec.watch.
    """
    non_finite: NonFinitePolicy = NonFinitePolicy()
    loss_spike: LossSpikePolicy = LossSpikePolicy()
    grad_norm_spike: GradNormSpikePolicy = GradNormSpikePolicy()
    num_zeros: NumZerosPolicy = NumZerosPolicy()
    total_weights: TotalWeightsPolicy = TotalWeightsPolicy()
    zero_loss: ZeroLossPolicy = ZeroLossPolicy()
    stall: StallPolicy = StallPolicy()
    straggler: StragglerPolicy = StragglerPolicy()
    metrics_missing: MetricsMissingPolicy = MetricsMissingPolicy()

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names of the rules with action Ignore, as the object spells them."""
        rules = ((field.alias, getattr(self, name)) for name, field in _FIELDS.items())
        return tuple(str(n) for n, rule in rules if getattr(rule, "action", None) == "Ignore")


_FIELDS = HealthPolicy.model_fields
