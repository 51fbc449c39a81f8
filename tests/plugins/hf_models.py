"""Small Hugging Face directories of every kind that can be converted, with random weights."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from ling_trainer.convert import tensor_shapes
from ling_trainer.hf_config import config_to_hf
from ling_trainer.model.hf_layout import bias_names
from ling_trainer.model_config import ModelConfig

BF16 = np.dtype(ml_dtypes.bfloat16)
_COMMON = {
    "vocab_size": 48, "hidden_size": 32, "num_attention_heads": 2, "head_dim": 16,
    "intermediate_size": 24, "rope_theta": 10000.0, "num_experts": 4, "num_experts_per_tok": 2,
    "n_group": 2, "topk_group": 2, "num_shared_experts": 1, "moe_intermediate_size": 16,
    "initializer_range": 0.02,
}  # fmt: skip
_HYBRID = _COMMON | {
    "layer_group_size": 2, "group_norm_size": 2, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 12, "lightning_slope_layer_offset": 1,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    # Ling 2.0: grouped queries, two dense layers, two prediction depths
    "gqa": _COMMON
    | {
        "attention_type": "gqa", "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_hidden_layers": 5, "first_k_dense_replace": 2, "num_nextn_predict_layers": 2,
    },
    # Ling 2.5: groups, a stacked middle, one prediction depth
    "hybrid": _HYBRID
    | {
        "q_lora_rank": 8, "num_hidden_layers": 6, "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
    },
    # the team's: a shared expert wider than a routed one
    "wide shared expert": _HYBRID
    | {
        "q_lora_rank": 8, "num_hidden_layers": 4, "first_k_dense_replace": 1,
        "moe_shared_expert_intermediate_size": 64, "num_nextn_predict_layers": 1,
    },
    # odd shapes: no query compression, a head count that is no power of two, an incomplete group
    "odd": _HYBRID
    | {
        "num_attention_heads": 6, "q_lora_rank": None, "qk_nope_head_dim": 12, "v_head_dim": 20,
        "layer_group_size": 3, "group_norm_size": 3, "num_hidden_layers": 5,
        "first_k_dense_replace": 1, "rope_theta": 6e5,
    },
    # nothing is stacked, nothing is routed
    "dense": _HYBRID
    | {"q_lora_rank": None, "num_hidden_layers": 3, "first_k_dense_replace": 3},
}  # fmt: skip


def model_config(kind: str) -> ModelConfig:
    """Return the architecture of one of CONFIGS."""
    return ModelConfig.model_validate(CONFIGS[kind], strict=True)


def random_tensors(config: ModelConfig, dtype: Any, *, seed: int = 0) -> dict[str, np.ndarray]:
    """Draw every tensor in `dtype`, routers' biases in float32 as published checkpoints have."""
    random = np.random.default_rng(seed)
    tensors = {
        name: random.normal(size=shape).astype(np.float32).astype(dtype)
        for name, shape in tensor_shapes(config).items()
    }
    return tensors | {name: tensors[name].astype(np.float32) for name in bias_names(config)}


def write_hf(
    path: Path, tensors: dict[str, np.ndarray], config: dict[str, Any], *, shards: int = 1
) -> Path:
    """Write a model directory with the safetensors library."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    names = list(tensors)
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
        return path
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    for i, file in enumerate(files):
        save_file({name: tensors[name] for name in names[i::shards]}, path / file)
    where = {name: files[i % shards] for i, name in enumerate(names)}
    index = {"metadata": {"total_size": 0}, "weight_map": where}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def hf_directory(path: Path, kind: str, dtype: Any = np.float32, *, shards: int = 1) -> Path:
    """Write a whole directory of one of CONFIGS."""
    config = model_config(kind)
    return write_hf(path, random_tensors(config, dtype), config_to_hf(config), shards=shards)
