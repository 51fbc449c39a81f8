"""The architecture of a run, under Hugging Face's names. No JAX."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ling_trainer.schema import Count, PositiveInt, Schema, require


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
    score_function: Literal["sigmoid", "softmax"] = "sigmoid"
    """sigmoid: expert biases take part in the choice, weights are normalised over the chosen
    experts. softmax: no expert biases; weights are a softmax over the chosen experts."""
    moe_router_pre_softmax: bool = False
    """With score_function=softmax, take the softmax over all experts, before the choice."""
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
                self.score_function == "softmax" or not self.moe_router_pre_softmax,
                "moe_router_pre_softmax=true needs score_function=softmax; leave it out",
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
