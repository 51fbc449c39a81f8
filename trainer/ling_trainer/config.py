"""What a run is: the one schema behind the command line, the YAML file and the CRD. No JAX.

Architecture fields carry Hugging Face's names (BailingMoeV2_5 config.json); training fields carry
MaxText's where MaxText has one. Megatron's flags map as follows:

| Megatron                          | here                                            |
|-----------------------------------|-------------------------------------------------|
| --num-layers                      | num_hidden_layers                               |
| --ffn-hidden-size                 | intermediate_size                               |
| --moe-ffn-hidden-size             | moe_intermediate_size                           |
| --moe-router-topk                 | num_experts_per_tok                             |
| --moe-router-num-groups           | n_group                                         |
| --moe-router-group-topk           | topk_group                                      |
| --moe-router-topk-scaling-factor  | routed_scaling_factor                           |
| --moe-router-bias-update-rate     | routed_bias_update_rate                         |
| --bias-zero-mean-update (Ling)    | bias_update=ling_zero_mean                      |
| --moe-aux-loss-coeff              | load_balance_loss_weight                        |
| --moe-router-load-balancing-type  | moe_router_load_balancing_type                  |
| --moe-z-loss-coeff                | moe_z_loss_weight                               |
| --moe-router-score-function       | score_function                                  |
| --moe-router-pre-softmax          | moe_router_pre_softmax                          |
| --mtp-num-layers                  | num_nextn_predict_layers                        |
| --mtp-loss-scaling-factor         | mtp_loss_scaling_factor                         |
| --calculate-per-token-loss        | calculate_per_token_loss=true (absent: false)   |
| --train-iters                     | steps                                           |
| --global-batch-size               | global_batch_size                               |
| --rampup-batch-size               | rampup_batch_size=[start, increment, samples]   |
| --seq-length                      | max_target_length                               |
| --data-path, --split, --seed      | dataset_path, split, data_shuffle_seed          |
| --train-data-path, --valid-...    | train_data_path, valid_data_path, test_data_path |
| --dataloader-inter-document-masking | inter_document_masking                        |
| --data-cache-path                 | blend_cache_dir                                 |
| --eval-interval, --eval-iters     | eval_interval, eval_steps                       |
| --full-validation                 | eval_steps=-1                                   |
| --eod-mask-loss                   | eod_mask_loss                                   |
| --reset-attention-mask            | reset_attention_mask                            |
| --lr, --min-lr                    | learning_rate, min_lr                           |
| --lr-warmup-iters, --lr-warmup-init | warmup_steps, lr_warmup_init                  |
| --lr-decay-style                  | lr_decay_style                                  |
| --lr-decay-iters                  | learning_rate_schedule_steps                    |
| --lr-wsd-decay-style, -iters      | lr_wsd_decay_style, wsd_decay_steps             |
| --adam-beta1/2, --adam-eps        | adam_b1, adam_b2, adam_eps                      |
| --weight-decay, --clip-grad       | adam_weight_decay, gradient_clipping_threshold  |
| --init-method-std                 | initializer_range                               |
| data-parallel x context-parallel  | loss_groups                                     |
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ling_trainer.data_config import DataConfig
from ling_trainer.eval_config import EvalConfig
from ling_trainer.model_config import ModelConfig
from ling_trainer.optimizer_config import OptimizerConfig
from ling_trainer.ramp_up import BatchSizes, ramp_up_rules, ramp_up_stages
from ling_trainer.schema import Count, NonNegative, PositiveInt, Rules, Schema, require


class LossConfig(Schema):
    """How the loss terms are normalised and summed."""

    calculate_per_token_loss: bool = True
    """True: divide by all tokens of the step. False: average inside each micro-batch, then
    average the micro-batches (Megatron's default)."""
    loss_groups: PositiveInt = 1
    """Virtual Megatron ranks (data x context parallel) that a micro-batch is averaged over."""
    use_tunix_gradient_accumulation: bool = False
    """Weights as with calculate_per_token_loss=false, reported lm_loss the token average."""
    z_loss_multiplier: NonNegative = 0.0
    """Coefficient of logsumexp(logits)^2 of the output head."""
    num_vocab_tiling: PositiveInt = 1
    """Chunks of tokens in which an output head's loss is computed, so that the logits of all
    tokens never exist at once; the numbers are the same. 1: not chunked, which is better where
    the logits of a micro-batch are smaller than the head's own gradient."""
    load_balance_loss_weight: NonNegative = 0.0
    """Coefficient of the routers' balance loss."""
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "global_aux_loss"] = (
        "aux_loss"
    )
    """What is balanced: a micro-batch of each loss group (aux_loss), each sequence alone
    (seq_aux_loss), or the mean of the step's micro-batches so far, over all groups."""
    moe_z_loss_weight: NonNegative = 0.0
    """Coefficient of logsumexp(router logits)^2."""
    indexer_loss_scaling_factor: NonNegative = 0.0
    """Coefficient of the loss of a sparse attention's indexers; ling2 has none, and refuses it."""
    mtp_loss_scaling_factor: NonNegative = 0.1
    mtp_per_layer_loss_norm: bool = False
    """True: average each depth by its own tokens, then the depths. False: pool them."""
    mtp_roll: Literal["segment", "plain"] = "segment"
    """segment: no target or input across a document; plain: as Megatron without packing."""


class MeshConfig(Schema):
    """How devices are laid out; -1 for ici_data_parallelism takes what the others leave."""

    ici_data_parallelism: Annotated[int, Field(ge=-1)] = -1
    ici_fsdp_parallelism: PositiveInt = 1
    ici_expert_parallelism: PositiveInt = 1
    ici_tensor_parallelism: PositiveInt = 1

    @model_validator(mode="after")
    def _check(self) -> Self:
        value = self.ici_data_parallelism
        require(
            (
                (
                    value != 0,
                    f"ici_data_parallelism={value}: use -1 or a positive number",
                ),
            )
        )
        return self


class CheckpointConfig(Schema):
    """When state is saved, and how much of it is kept."""

    enable_checkpointing: bool = True
    checkpoint_period: PositiveInt = 100
    """Steps between checkpoints; the last step is saved too."""
    async_checkpointing: bool = True
    max_num_checkpoints_to_keep: PositiveInt = 3
    protect_steps: Count = 100
    """One checkpoint at least this many steps old is always kept besides the newest."""
    load_parameters_path: str | None = None
    """Directory of parameters to start from, while the run has no checkpoint: of
    `ling-train convert hf-to-ling`, or of another run. The optimizer starts anew."""


class MetricsConfig(Schema):
    """What is told to the outside, and for how long."""

    metrics_port: Annotated[int, Field(ge=0, le=65535)] = 9464
    """Port of /metrics, plus the container's index; 0 lets the system choose."""
    metrics_linger_seconds: NonNegative = 10.0
    """After divergence, keep answering scrapes this long before the process ends."""
    log_period: PositiveInt = 1
    """Steps between log lines; metrics and JSONL have every step."""


class HealthConfig(Schema):
    """When the trainer stops itself. Every other rule is the operator's."""

    trainer_stops: bool = True
    """Stop with exit code 90 after non_finite_consecutive_steps; false only counts and exports."""
    non_finite_consecutive_steps: PositiveInt = 1


class FaultConfig(Schema):
    """Fault injection for drills; also needs LING_ALLOW_FAULT_INJECTION=1 in the environment."""

    enabled: bool = False
    fault_kind: Literal["nan_loss", "inf_loss", "nan_gradient", "sigkill", "hang"] = "nan_loss"
    fault_step: PositiveInt = 1
    """First step that is hit, on every process; the first step of a run is 1."""
    fault_count: PositiveInt = 1
    """Steps in a row that are hit."""


class DistributedConfig(Schema):
    """Several processes."""

    start_timeout: PositiveInt = 600
    """Seconds to wait for every process to arrive before ending with code 42."""


class RunConfig(Schema):
    """One pre-training run."""

    preset: str | None = None
    """Name of the preset that the other settings refine (alias: model_name)."""
    run_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")] = "ling2"
    base_output_directory: str | None = None
    """Directory (or gs:// bucket) under which run_name/ holds checkpoints and metrics."""
    steps: PositiveInt
    seed: Count = 42
    """Seed of the initial parameters."""
    gradient_accumulation_steps: PositiveInt = 1
    """Micro-batches a step (K). Row i of the global batch belongs to micro-batch i mod K."""
    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    loss: LossConfig = LossConfig()
    mesh: MeshConfig = MeshConfig()
    evaluation: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    metrics: MetricsConfig = MetricsConfig()
    health: HealthConfig = HealthConfig()
    fault: FaultConfig = FaultConfig()
    distributed: DistributedConfig = DistributedConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        k, groups = self.gradient_accumulation_steps, self.loss.loss_groups
        batch = self.data.global_batch_size
        require((
            *self._evaluation_rules(),
            *self._ramp_up_rules(),
            (
                batch is None or batch % (k * groups) == 0,
                f"data.global_batch_size={batch} is not a multiple of "
                f"gradient_accumulation_steps={k} x loss.loss_groups={groups}; "
                "choose a multiple",
            ),
            (
                max(self.data.eod_id, self.data.pad_id) < self.model.vocab_size,
                f"data.eod_id={self.data.eod_id} and data.pad_id={self.data.pad_id} must be "
                f"below model.vocab_size={self.model.vocab_size}; correct the id or the size",
            ),
            (
                self.model.num_nextn_predict_layers < self.data.max_target_length,
                f"model.num_nextn_predict_layers={self.model.num_nextn_predict_layers} must be "
                f"below data.max_target_length={self.data.max_target_length}; lower the depth",
            ),
            (
                self.model.score_function == "sigmoid"
                or not self.optimizer.routed_bias_update_rate,
                f"optimizer.routed_bias_update_rate={self.optimizer.routed_bias_update_rate}: "
                "with model.score_function=softmax a router has no expert bias; set it to 0",
            ),
            (
                self.model.num_routers > 0 or not self.checkpoint.enable_checkpointing,
                f"model.first_k_dense_replace={self.model.first_k_dense_replace} leaves no layer "
                "with experts, and such a model cannot be checkpointed; lower it (or set "
                "checkpoint.enable_checkpointing=false)",
            ),
            (
                self.base_output_directory is not None
                or not self.checkpoint.enable_checkpointing,
                "base_output_directory is not set; checkpoints need one (or set "
                "checkpoint.enable_checkpointing=false)",
            ),
        ))  # fmt: skip
        return self

    @property
    def ramp_up(self) -> BatchSizes | None:
        """Batch sizes of a run that ramps up; None where every step has the same."""
        rampup, size = self.data.rampup_batch_size, self.data.global_batch_size
        if rampup is None or size is None:
            return None
        k = self.gradient_accumulation_steps
        return ramp_up_stages(rampup, batch_size=size, num_microbatches=k)

    def num_microbatches_of(self, rows: int) -> int:
        """Return the micro-batches of a step of so many rows: K, fewer while ramping up."""
        k, size = self.gradient_accumulation_steps, self.data.global_batch_size
        if size is None or self.data.rampup_batch_size is None:
            return k
        return rows * k // size

    def _ramp_up_rules(self) -> Rules:
        rampup, size = self.data.rampup_batch_size, self.data.global_batch_size
        k = self.gradient_accumulation_steps
        if rampup is None or size is None or size % k:
            return ()
        return ramp_up_rules(rampup, batch_size=size, num_microbatches=k)

    def _evaluation_rules(self) -> Rules:
        data, on = self.data, self.evaluation.enabled
        interval = self.evaluation.eval_interval
        return (
            (
                not (on and data.dataset_type == "synthetic" and self.evaluation.whole_split),
                f"evaluation.eval_steps=-1 with eval_interval={interval} and "
                "data.dataset_type=synthetic: random text has no end; set a positive number",
            ),
            (
                not (on and data.dataset_type == "mmap" and data.train_data_path is not None)
                or data.valid_data_path is not None,
                f"data.valid_data_path is not set and evaluation.eval_interval={interval}; name "
                "the validation data, or set eval_interval=-1",
            ),
            (
                not (on and data.dataset_type == "mmap_npy") or data.valid_data_path is not None,
                f"data.valid_data_path is not set and evaluation.eval_interval={interval}; "
                "dataset_type=mmap_npy has one order, that of training: name validation data "
                "with indices of their own, or set eval_interval=-1",
            ),
        )
