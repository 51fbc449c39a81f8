"""The architecture of a run, under Hugging Face's names. No JAX."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ling_trainer.schema import Count, PositiveInt, Schema, require

type AttentionKind = Literal["mla", "lightning", "gqa"]


class ModelConfig(Schema):
    """The architecture: the hybrid of Ling 2.5, or Ling 2.0's attention, with MoE and MTP.

    layer_group_size to v_head_dim are needed by the hybrid, which has all of them set, and must be
    left out without it.
    """

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    num_hidden_layers: PositiveInt
    """Layers of the backbone; multi-token prediction layers come on top."""
    attention_type: Literal["hybrid", "gqa"] = "hybrid"
    """hybrid: lightning attention and MLA (Ling 2.5, 2.6); gqa: grouped queries (Ling 2.0)."""
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    """Heads of keys and values with attention_type=gqa; the hybrid has num_attention_heads."""
    head_dim: PositiveInt
    """Width of a lightning or gqa head; heads times this need not be hidden_size."""
    intermediate_size: PositiveInt
    """Width of a dense feed-forward layer."""
    first_k_dense_replace: Count
    """The first k layers have a dense feed-forward; all later ones are mixtures of experts."""
    layer_group_size: PositiveInt = 1
    """Every layer_group_size-th layer is MLA, and so is each layer after the last full group."""
    group_norm_size: PositiveInt = 1
    """Number of groups (not their width) of the norm on lightning attention's output."""
    q_lora_rank: PositiveInt | None = None
    """Rank of MLA's query compression; null projects queries directly."""
    kv_lora_rank: Count = 0
    qk_nope_head_dim: Count = 0
    qk_rope_head_dim: Annotated[int, Field(ge=0, multiple_of=2)] = 0
    v_head_dim: Count = 0
    rope_theta: Annotated[float, Field(gt=0)]
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of a lightning or gqa head's width that is rotated."""
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
        )
        require((*rules, *self._attention_rules()))
        return self

    def _attention_rules(self) -> list[tuple[bool, str]]:
        """Return the rules of the attention that was chosen, and refuse settings of the other."""
        if self.attention_type == "gqa":
            fields = type(self).model_fields
            heads = self.num_key_value_heads
            return [
                *(
                    (
                        value == fields[name].default,
                        f"{name}={value} is of attention_type=hybrid, not of gqa; leave it out",
                    )
                    for name, value in self._hybrid_values()
                ),
                (
                    heads is None or self.num_attention_heads % heads == 0,
                    f"num_key_value_heads={heads} does not divide "
                    f"num_attention_heads={self.num_attention_heads}; choose a divisor",
                ),
            ]
        return [
            *(
                (
                    name in self.model_fields_set and value != 0,
                    f"{name} is not set; attention_type=hybrid needs it (or choose a preset)",
                )
                for name, value in self._hybrid_values()
            ),
            (
                self.num_key_value_heads in {None, self.num_attention_heads},
                f"num_key_value_heads={self.num_key_value_heads}: with attention_type=hybrid "
                "every head has its own keys and values; leave it out",
            ),
            (
                self.num_hidden_layers > 1,
                f"num_hidden_layers={self.num_hidden_layers}: the decay of lightning attention "
                "needs at least 2 layers",
            ),
        ]

    def _hybrid_values(self) -> list[tuple[str, int | None]]:
        """List the settings that only the hybrid has."""
        return [
            ("layer_group_size", self.layer_group_size),
            ("group_norm_size", self.group_norm_size),
            ("q_lora_rank", self.q_lora_rank),
            ("kv_lora_rank", self.kv_lora_rank),
            ("qk_nope_head_dim", self.qk_nope_head_dim),
            ("qk_rope_head_dim", self.qk_rope_head_dim),
            ("v_head_dim", self.v_head_dim),
        ]

    @property
    def rotary_dim(self) -> int:
        """Rotated width of a lightning or gqa head."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def key_value_heads(self) -> int:
        """Heads of keys and values with attention_type=gqa."""
        return self.num_key_value_heads or self.num_attention_heads

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
        """Tell whether a hybrid's layer (from 0) is MLA: last of its group, or after full ones."""
        last_full = self.num_hidden_layers // self.layer_group_size * self.layer_group_size
        return (layer + 1) % self.layer_group_size == 0 or layer >= last_full

    def attention_of(self, layer: int) -> AttentionKind:
        """Return a layer's attention; layers from num_hidden_layers on are prediction depths."""
        if self.attention_type == "gqa":
            return "gqa"
        return "mla" if layer >= self.num_hidden_layers or self.is_mla(layer) else "lightning"

    def is_moe(self, layer: int) -> bool:
        """Tell whether layer (0-based) is a mixture of experts."""
        return layer >= self.first_k_dense_replace
