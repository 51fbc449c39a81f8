"""Presets: functions that return the settings of a named model. No JAX."""

from collections.abc import Callable
from typing import Any

type Settings = dict[str, Any]


def ling2_tiny() -> Settings:
    """Return a hybrid small enough for two CPU cores, with every kind of layer of ling2."""
    return {
        "steps": 200,
        "model": {
            "vocab_size": 512,
            "hidden_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "head_dim": 32,
            "intermediate_size": 256,
            "first_k_dense_replace": 2,
            "layer_group_size": 2,
            "group_norm_size": 4,
            "q_lora_rank": 64,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "rope_theta": 10000.0,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "num_shared_experts": 1,
            "moe_intermediate_size": 64,
            "num_nextn_predict_layers": 1,
            "initializer_range": 0.02,
        },
        "data": {
            "max_target_length": 256,
            "global_batch_size": 4,
            "eod_id": 256,
            "pad_id": 256,
            "eod_mask_loss": True,
        },
        "optimizer": {"learning_rate": 3e-3, "warmup_steps": 20},
        "loss": _LING2_LOSS,
        "checkpoint": {"checkpoint_period": 50, "protect_steps": 50},
    }


def ling2() -> Settings:
    """Return Ling2 as its team runs it: 20 layers, 256 experts, 16.6 B parameters and one MTP."""
    return {
        "steps": 100_000,
        "model": {
            "vocab_size": 157_184,
            "hidden_size": 2048,
            "num_hidden_layers": 20,
            "num_attention_heads": 16,
            "head_dim": 128,
            "intermediate_size": 5120,
            "first_k_dense_replace": 1,
            "layer_group_size": 5,
            "group_norm_size": 4,
            "q_lora_rank": 256,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "rope_theta": 10000.0,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "num_shared_experts": 1,
            "moe_intermediate_size": 512,
            "moe_shared_expert_intermediate_size": 2048,
            "num_nextn_predict_layers": 1,
            "dtype": "bfloat16",
            "remat_policy": "full",
        },
        "data": {
            "max_target_length": 4096,
            "per_device_batch_size": 2,
            "eod_id": 156_892,
            "pad_id": 156_892,
            "eod_mask_loss": True,
        },
        "optimizer": {"learning_rate": 3.36e-4, "warmup_steps": 250},
        "loss": _LING2_LOSS | {"num_vocab_tiling": 8},
        "mesh": {"ici_expert_parallelism": 8},
        "evaluation": {"eval_interval": 1490, "eval_steps": 1},
    }


_LING2_LOSS: Settings = {
    "calculate_per_token_loss": False,
    "moe_z_loss_weight": 3.5e-6,
    "mtp_per_layer_loss_norm": True,
}
PRESETS: dict[str, Callable[[], Settings]] = {"ling2_tiny": ling2_tiny, "ling2": ling2}
