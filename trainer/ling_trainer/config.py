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
| --moe-z-loss-coeff                | moe_z_loss_weight                               |
| --mtp-num-layers                  | num_nextn_predict_layers                        |
| --mtp-loss-scaling-factor         | mtp_loss_scaling_factor                         |
| --calculate-per-token-loss        | calculate_per_token_loss=true (absent: false)   |
| --train-iters                     | steps                                           |
| --global-batch-size               | global_batch_size                               |
| --seq-length                      | max_target_length                               |
| --data-path, --split, --seed      | dataset_path, split, data_shuffle_seed          |
| --train-data-path, --valid-...    | train_data_path, valid_data_path, test_data_path |
| --dataloader-inter-document-masking | inter_document_masking                        |
| --data-cache-path                 | blend_cache_dir                                 |
| --eod-mask-loss                   | eod_mask_loss                                   |
| --reset-attention-mask            | reset_attention_mask                            |
| --lr, --lr-warmup-iters           | learning_rate, warmup_steps                     |
| --adam-beta1/2, --adam-eps        | adam_b1, adam_b2, adam_eps                      |
| --weight-decay, --clip-grad       | adam_weight_decay, gradient_clipping_threshold  |
| --init-method-std                 | initializer_range                               |
| data-parallel x context-parallel  | loss_groups                                     |
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ling_trainer.schema import Schema, require

type PositiveInt = Annotated[int, Field(ge=1)]
type Count = Annotated[int, Field(ge=0)]
type NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
type Fraction = Annotated[float, Field(ge=0, lt=1)]


class ModelConfig(Schema):
    """The architecture: a hybrid of MLA and lightning attention with MoE and MTP."""

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    num_hidden_layers: PositiveInt
    """Layers of the backbone; multi-token prediction layers come on top."""
    num_attention_heads: PositiveInt
    head_dim: PositiveInt
    """Width of a lightning-attention head; heads times this need not be hidden_size."""
    intermediate_size: PositiveInt
    """Width of a dense feed-forward layer."""
    first_k_dense_replace: Count
    """The first k layers have a dense feed-forward; all later ones are mixtures of experts."""
    layer_group_size: PositiveInt
    """Every layer_group_size-th layer is MLA, and so is each layer after the last full group."""
    group_norm_size: PositiveInt
    """Number of groups (not their width) of the norm on lightning attention's output."""
    q_lora_rank: Annotated[int, Field(ge=1)] | None
    """Rank of MLA's query compression; null projects queries directly."""
    kv_lora_rank: PositiveInt
    qk_nope_head_dim: PositiveInt
    qk_rope_head_dim: Annotated[int, Field(ge=2, multiple_of=2)]
    v_head_dim: PositiveInt
    rope_theta: Annotated[float, Field(gt=0)]
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of a lightning head's width that is rotated."""
    rms_norm_eps: Annotated[float, Field(gt=0)] = 1e-6
    lightning_slope_layer_offset: Literal[0, 1] = 0
    """Decay of layer l scales with 1 - (l - offset)/(N - 1): 0 is Megatron's, 1 Hugging Face's."""
    chunk_size: PositiveInt = 64
    """Tokens a chunk of lightning attention; changes speed and memory, not the result."""
    num_experts: PositiveInt
    num_experts_per_tok: PositiveInt
    n_group: PositiveInt
    topk_group: PositiveInt
    num_shared_experts: Count
    moe_intermediate_size: PositiveInt
    moe_shared_expert_intermediate_size: PositiveInt | None = None
    """Width of one shared expert; null takes moe_intermediate_size."""
    routed_scaling_factor: Annotated[float, Field(gt=0)] = 2.5
    num_nextn_predict_layers: Count = 0
    """Depth of multi-token prediction; 0 switches it off."""
    initializer_range: Annotated[float, Field(gt=0)] = 0.006
    """Standard deviation of every initial matrix."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type; weights, router, norms, softmax and gradients are float32 in any case."""
    scan_layers: bool = True
    """Scan over the groups of layers (fast to compile) or unroll them; the result is the same."""
    remat_policy: Literal["none", "full"] = "none"
    """full: keep only each layer's input for the backward pass; none: keep everything."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        rules = (
            (
                self.num_experts % self.n_group == 0,
                f"n_group={self.n_group} does not divide num_experts={self.num_experts}; "
                "choose a divisor",
            ),
            (
                self.topk_group <= self.n_group,
                f"topk_group={self.topk_group} exceeds n_group={self.n_group}; lower it",
            ),
            (
                self.num_experts_per_tok
                <= self.topk_group * (self.num_experts // max(self.n_group, 1)),
                f"num_experts_per_tok={self.num_experts_per_tok} exceeds the experts of "
                f"topk_group={self.topk_group} groups; lower it or raise topk_group",
            ),
            (
                self.num_experts_per_tok % self.topk_group == 0,
                f"topk_group={self.topk_group} does not divide "
                f"num_experts_per_tok={self.num_experts_per_tok}; a group is scored by its "
                "num_experts_per_tok / topk_group best experts",
            ),
            (
                self.num_experts_per_tok // max(self.topk_group, 1)
                <= self.num_experts // max(self.n_group, 1),
                f"num_experts_per_tok / topk_group = "
                f"{self.num_experts_per_tok // max(self.topk_group, 1)} exceeds the "
                f"{self.num_experts // max(self.n_group, 1)} experts of a group; lower it",
            ),
            (
                (self.num_attention_heads * self.head_dim) % self.group_norm_size == 0,
                f"group_norm_size={self.group_norm_size} does not divide num_attention_heads x "
                f"head_dim = {self.num_attention_heads * self.head_dim}; choose a divisor",
            ),
            (
                self.rotary_dim % 2 == 0,
                f"partial_rotary_factor={self.partial_rotary_factor} rotates "
                f"{self.rotary_dim} of head_dim={self.head_dim}; the number must be even",
            ),
            (
                self.first_k_dense_replace <= self.num_hidden_layers,
                f"first_k_dense_replace={self.first_k_dense_replace} exceeds "
                f"num_hidden_layers={self.num_hidden_layers}; lower it",
            ),
            (
                self.num_hidden_layers > 1,
                f"num_hidden_layers={self.num_hidden_layers}: the decay of lightning attention "
                "needs at least 2 layers",
            ),
        )
        require(rules)
        return self

    @property
    def rotary_dim(self) -> int:
        """Rotated width of a lightning head."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def shared_expert_width(self) -> int:
        """Width of the shared expert, all of them together; 0 without one."""
        width = self.moe_shared_expert_intermediate_size or self.moe_intermediate_size
        return width * self.num_shared_experts

    @property
    def num_moe_layers(self) -> int:
        """MoE layers of the backbone, multi-token prediction blocks not counted."""
        return self.num_hidden_layers - self.first_k_dense_replace

    @property
    def num_routers(self) -> int:
        """Routers: MoE layers, then one a multi-token prediction block."""
        return self.num_moe_layers + self.num_nextn_predict_layers

    def is_mla(self, layer: int) -> bool:
        """Tell whether layer (0-based) is MLA: last of its group, or past the last full group."""
        last_full = self.num_hidden_layers // self.layer_group_size * self.layer_group_size
        return (layer + 1) % self.layer_group_size == 0 or layer >= last_full

    def is_moe(self, layer: int) -> bool:
        """Tell whether layer (0-based) is a mixture of experts."""
        return layer >= self.first_k_dense_replace


class DataConfig(Schema):
    """Where tokens come from and how they become batches."""

    dataset_type: Literal["mmap", "mmap_npy", "synthetic"] = "mmap"
    """mmap: Megatron .bin/.idx files; mmap_npy: with ready-made sample indices beside them;
    synthetic: random tokens from the seed, for dry runs."""
    dataset_path: str | None = None
    """Path of the .bin and .idx files without their endings. A blend is written
    path,weight;path,weight, or path;path to take each as long as it is; with mmap_npy each path
    is npy_dir|path, npy_dir holding {document,sample,shuffle}_index.npy."""
    train_data_path: str | None = None
    """Training data, as dataset_path, where the splits have data of their own; split is then
    not used."""
    valid_data_path: str | None = None
    """Validation data, as train_data_path."""
    test_data_path: str | None = None
    """Test data, as train_data_path."""
    split: Annotated[str, Field(pattern=r"^[0-9.]+(,[0-9.]+){0,2}$")] = "999,1,0"
    """Shares of train, validation and test documents, as Megatron's --split."""
    data_shuffle_seed: Count = 42
    max_target_length: Annotated[int, Field(ge=2)]
    """Tokens a sequence."""
    global_batch_size: PositiveInt | None = None
    """Sequences an optimizer step, over all micro-batches. This or per_device_batch_size."""
    per_device_batch_size: PositiveInt | None = None
    """Sequences a device in one micro-batch. This or global_batch_size."""
    eod_id: Count
    """End-of-document token."""
    pad_id: Count
    """Padding token. Equal to eod_id, no label is masked as padding (Ling2)."""
    eod_mask_loss: bool = False
    """Give no loss to positions whose input is eod_id."""
    reset_attention_mask: bool = False
    """Keep attention inside a document; false lets documents of a sequence see each other."""
    reset_position_ids: bool = False
    """Restart positions after each eod_id."""
    inter_document_masking: bool = False
    """Keep attention inside a document and restart positions, documents being those of the .idx
    instead of what lies between eod_id tokens."""
    add_extra_token_to_sequence: bool = True
    """Cut samples of max_target_length + 1 tokens. False leaves the last target out."""
    drop_last_partial_validation_sequence: bool = True
    """False keeps a last validation sample that is too short, padded."""
    mid_level_dataset_surplus: NonNegative = 0.005
    """Share of samples that a weighted blend asks each of its datasets for beyond its turns."""
    allow_ambiguous_pad_tokens: bool = False
    """Mask pad_id as padding even if it is eod_id, as Megatron did before 0.16: no end of document
    is then learned."""
    reproduce_cached_loss_mask: bool = False
    """Take the loss from every position that is padding in the first sample of its dataset, as a
    fault of Megatron does where eod_mask_loss and both resets are off. For comparisons."""
    blend_cache_dir: str | None = None
    """Folder where indices are kept for the next start, by content and settings, and the .idx of
    remote data; null builds indices anew each time."""
    blend_index_dir: str | None = None
    """With mmap_npy: folder of a blend's ready-made dataset_index.npy and
    dataset_sample_index.npy; null makes them from the weights."""
    storage_timeout: PositiveInt = 120
    """Seconds after which a read of gs:// data is given up, retries included."""
    prefetch: PositiveInt = 2
    """Global batches read ahead of the step."""
    grain_worker_count: Count = 0
    """Processes that read ahead, each of them seconds in starting; 0 reads in threads of the
    training process."""
    grain_num_threads: PositiveInt = 2
    """Threads that read samples, in each process that reads; more of them hide the latency of
    remote storage."""

    @property
    def attention_resets(self) -> bool:
        """Whether attention stays inside a document."""
        return self.reset_attention_mask or self.inter_document_masking

    def split_path(self, name: Literal["train", "valid", "test"]) -> str | None:
        """Return the data path that a split has of its own."""
        paths = {
            "train": self.train_data_path,
            "valid": self.valid_data_path,
            "test": self.test_data_path,
        }
        return paths[name]

    @model_validator(mode="after")
    def _check(self) -> Self:
        own_paths = (self.train_data_path, self.valid_data_path, self.test_data_path)
        has_own = any(path is not None for path in own_paths)
        require((
            (
                (self.global_batch_size is None) != (self.per_device_batch_size is None),
                f"global_batch_size={self.global_batch_size} and per_device_batch_size="
                f"{self.per_device_batch_size}: set exactly one",
            ),
            (
                self.dataset_type == "synthetic" or has_own or self.dataset_path is not None,
                f"dataset_path is not set; dataset_type={self.dataset_type} needs the prefix of a "
                ".bin/.idx pair",
            ),
            (
                not (self.blend_cache_dir or "").startswith("gs://"),
                f"blend_cache_dir={self.blend_cache_dir} is not a local folder; name one",
            ),
            (
                self.blend_index_dir is None or self.dataset_type == "mmap_npy",
                f"blend_index_dir={self.blend_index_dir} needs dataset_type=mmap_npy; set it, or "
                "use blend_cache_dir",
            ),
            (
                not (has_own and self.dataset_path is not None),
                "dataset_path is set and so is a path of one split; name the data once",
            ),
        ))  # fmt: skip
        return self


class OptimizerConfig(Schema):
    """AdamW, its schedule, and the routers' bias rule."""

    learning_rate: Annotated[float, Field(gt=0)]
    """Peak learning rate."""
    warmup_steps: Count = 0
    """Steps of linear warm-up from 0; step t runs at learning_rate * min(1, t / warmup_steps)."""
    lr_schedule: Literal["constant"] = "constant"
    adam_b1: Fraction = 0.9
    adam_b2: Fraction = 0.95
    adam_eps: Annotated[float, Field(gt=0)] = 1e-8
    adam_weight_decay: NonNegative = 0.1
    """Decoupled, times the learning rate, on matrices and embeddings only."""
    gradient_clipping_threshold: NonNegative = 1.0
    """Largest global gradient norm; 0 does not clip."""
    routed_bias_update_rate: NonNegative = 1e-3
    """Step of each router's expert bias against its load; 0 leaves the biases alone."""
    bias_update: Literal["megatron", "ling_zero_mean"] = "ling_zero_mean"
    """megatron: rate * sign(mean - count); ling_zero_mean subtracts the mean of the signs."""


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
    load_balance_loss_weight: NonNegative = 0.0
    moe_z_loss_weight: NonNegative = 0.0
    """Coefficient of logsumexp(router logits)^2."""
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
                self.base_output_directory is not None
                or not self.checkpoint.enable_checkpointing,
                "base_output_directory is not set; checkpoints need one (or set "
                "checkpoint.enable_checkpointing=false)",
            ),
        ))  # fmt: skip
        return self
