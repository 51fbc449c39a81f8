"""The optimizer and the schedule of its learning rate. No JAX."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ling_trainer.schema import Count, Fraction, NonNegative, PositiveInt, Schema, require


class OptimizerConfig(Schema):
    """AdamW, its schedule, and the routers' bias rule."""

    learning_rate: Annotated[float, Field(gt=0)]
    """Peak learning rate."""
    warmup_steps: Count = 0
    """Steps of linear warm-up: step t, from 0, runs at lr_warmup_init + (learning_rate -
    lr_warmup_init) * t / warmup_steps, up to t = warmup_steps."""
    lr_warmup_init: NonNegative = 0.0
    """Learning rate that the warm-up begins at."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = (
        "constant"
    )
    """How the learning rate falls after the warm-up. WSD keeps the peak, then anneals for
    wsd_decay_steps."""
    min_lr: NonNegative = 0.0
    """Learning rate at learning_rate_schedule_steps and after; constant does not use it."""
    learning_rate_schedule_steps: PositiveInt | None = None
    """Step at which the decay ends. Every lr_decay_style but constant needs it: taken from steps,
    the curve would change where a run is extended."""
    wsd_decay_steps: PositiveInt | None = None
    """With WSD: steps of annealing, the last ones of learning_rate_schedule_steps."""
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "exponential"
    """With WSD: how the learning rate falls while annealing."""
    adam_b1: Fraction = 0.9
    adam_b2: Fraction = 0.95
    adam_eps: Annotated[float, Field(gt=0)] = 1e-8
    adam_weight_decay: NonNegative = 0.1
    """Decoupled, times the learning rate, on matrices and embeddings only."""
    gradient_clipping_threshold: NonNegative = 1.0
    """Largest global gradient norm; 0 does not clip."""
    optimizer_memory_host_offload: bool = False
    """Keep the optimizer's state in the hosts' memory between updates: room on the devices for
    slower steps. num_zeros and num_grad_elements are then not reported."""
    routed_bias_update_rate: NonNegative = 1e-3
    """Step of each router's expert bias against its load; 0 leaves the biases alone."""
    bias_update: Literal["megatron", "ling_zero_mean"] = "ling_zero_mean"
    """megatron: rate * sign(mean - count); ling_zero_mean subtracts the mean of the signs."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        peak, style = self.learning_rate, self.lr_decay_style
        length, decays = self.learning_rate_schedule_steps, style != "constant"
        require((
            (
                self.min_lr <= peak,
                f"min_lr={self.min_lr} is above learning_rate={peak}; lower it",
            ),
            (
                self.lr_warmup_init <= peak,
                f"lr_warmup_init={self.lr_warmup_init} is above learning_rate={peak}; lower it",
            ),
            (
                not decays or length is not None,
                f"learning_rate_schedule_steps is not set; lr_decay_style={style} needs the step "
                "at which min_lr is reached, usually steps",
            ),
            (
                not decays or length is None or self.warmup_steps < length,
                f"warmup_steps={self.warmup_steps} must be below learning_rate_schedule_steps="
                f"{length}; shorten the warm-up",
            ),
            (
                style != "WSD" or self.wsd_decay_steps is not None,
                "wsd_decay_steps is not set; lr_decay_style=WSD needs the steps of its annealing",
            ),
        ))  # fmt: skip
        return self
