"""Hugging Face's config.json of BailingMoeV2 and BailingMoeV2_5, to and from section `model`.

No JAX.
"""

from collections.abc import Mapping
from typing import Any

from ling_trainer.model_config import ModelConfig
from ling_trainer.presets import Settings

_ATTENTION = {"BailingMoeV2_5ForCausalLM": "hybrid", "BailingMoeV2ForCausalLM": "gqa"}
_MODEL_TYPES = {"hybrid": "bailing_hybrid", "gqa": "bailing_moe"}
_REQUIRED = {
    "hidden_act": "silu",
    "use_qkv_bias": False,
    "use_bias": False,
    "tie_word_embeddings": False,
    "rope_scaling": None,
    "use_qk_norm": True,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
_REQUIRED_OF_HYBRID = {"rope_interleave": True, "linear_silu": False}
_SAME_NAME = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "intermediate_size",
    "first_k_dense_replace",
    "rope_theta",
    "rms_norm_eps",
    "num_experts",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
    "num_shared_experts",
    "moe_intermediate_size",
    "routed_scaling_factor",
)
_OPTIONAL = ("num_nextn_predict_layers", "initializer_range")
_SAME_NAME_OF = {
    "hybrid": (
        "layer_group_size",
        "group_norm_size",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
    ),
    "gqa": ("num_key_value_heads",),
}


def config_from_hf(config: Mapping[str, Any]) -> Settings:
    """Return the settings of section `model` for a Hugging Face config.json.

    The file does not say how lightning attention's decay counts layers. Unless it holds our own
    `lightning_slope_layer_offset`, the offset is 1, as in the modeling code that it names.

    Raises:
      ValueError: another architecture, a missing field, or a feature this model does not have.
    """
    architectures = config.get("architectures")
    attention = _ATTENTION.get(architectures[0]) if architectures else None
    if attention is None:
        msg = (
            f"config.json: architectures={architectures} (model_type="
            f"{config.get('model_type')!r}) cannot be read; only {' and '.join(_ATTENTION)} can"
        )
        raise ValueError(msg)
    required = _REQUIRED | (_REQUIRED_OF_HYBRID if attention == "hybrid" else {})
    problems = [
        f"{name}={config[name]!r} is not supported; it must be {value!r}"
        for name, value in required.items()
        if config.get(name, value) != value
    ]
    names = (*_SAME_NAME, *_SAME_NAME_OF[attention])
    missing = sorted(name for name in names if name not in config)
    if missing:
        problems.append(f"fields are missing: {', '.join(missing)}")
    if problems:
        raise ValueError("config.json: " + "; ".join(problems))
    there = (*names, *(name for name in _OPTIONAL if name in config))
    settings: Settings = {"attention_type": attention} | {name: config[name] for name in there}
    for name in ("rope_theta", "routed_scaling_factor"):
        settings[name] = float(settings[name])
    shared = config.get("moe_shared_expert_intermediate_size")
    settings["moe_shared_expert_intermediate_size"] = shared
    settings["partial_rotary_factor"] = _partial_rotary_factor(config, attention)
    if attention == "hybrid":
        settings["lightning_slope_layer_offset"] = config.get("lightning_slope_layer_offset", 1)
    return settings


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return a config.json of this architecture; the inverse of config_from_hf.

    Token ids are no part of an architecture, and are null; the code that reads the file then
    needs them given. The decay's layer offset is there under our own name, which Hugging Face's
    code does not read: it always counts as offset 1 does.

    Raises:
      ValueError: the routers' scores are not those of this architecture.
    """
    if config.score_function != _REQUIRED["score_function"]:
        raise ValueError(
            f"score_function={config.score_function!r} is no router of Hugging Face's "
            f"{' or '.join(_ATTENTION)}; it can be trained but not exported"
        )
    attention = config.attention_type
    hybrid = attention == "hybrid"
    names = (*_SAME_NAME, *_OPTIONAL, *_SAME_NAME_OF[attention])
    values = config.model_dump(mode="json")
    code = "v2_5" if hybrid else "v2"
    model = code.upper()
    return {
        "architectures": [next(a for a, kind in _ATTENTION.items() if kind == attention)],
        "model_type": _MODEL_TYPES[attention],
        "auto_map": {
            "AutoConfig": f"configuration_bailing_moe_{code}.BailingMoe{model}Config",
            "AutoModelForCausalLM": f"modeling_bailing_moe_{code}.BailingMoe{model}ForCausalLM",
        },
        **_REQUIRED,
        **(_REQUIRED_OF_HYBRID if hybrid else {}),
        **{name: values[name] for name in names},
        "num_key_value_heads": config.key_value_heads,
        "partial_rotary_factor": config.partial_rotary_factor,
        "moe_shared_expert_intermediate_size": config.moe_shared_expert_intermediate_size
        or config.moe_intermediate_size,
        "norm_topk_prob": True,
        "router_dtype": "fp32",
        "pad_token_id": None,
        "eos_token_id": None,
        **(
            {"lightning_slope_layer_offset": config.lightning_slope_layer_offset} if hybrid else {}
        ),
    }


def _partial_rotary_factor(config: Mapping[str, Any], attention: str) -> float:
    """Return the rotated share of a head; files that lack it may have rotary_dim (Ling-1T)."""
    head, factor = config["head_dim"], config.get("partial_rotary_factor")
    if factor is None:
        factor = config.get("rotary_dim", head) / head
    if attention == "hybrid" and round(head * factor) != config["qk_rope_head_dim"]:
        msg = (
            f"config.json: head_dim x partial_rotary_factor = {head * factor:g} differs from "
            f"qk_rope_head_dim={config['qk_rope_head_dim']}; the modeling code has one rotation "
            "table for both kinds of attention, so no such checkpoint can exist"
        )
        raise ValueError(msg)
    return float(factor)
