"""How much memory does a conversion need, against the size of the checkpoint?

Makes a bfloat16 checkpoint of random weights, converts it there and back in processes of their
own, and reports each one's peak resident memory above that of the same process with nothing to do.

    python benchmarks/convert_memory.py > benchmarks/results/DATE-convert-memory.json
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from provenance import provenance

from ling_trainer.convert import places, tensor_shapes
from ling_trainer.hf_config import config_to_hf
from ling_trainer.model.hf_layout import bias_names
from ling_trainer.model_config import ModelConfig
from ling_trainer.safetensors_file import TensorWriter

MODEL = {
    "vocab_size": 16_384, "hidden_size": 1024, "num_hidden_layers": 20, "num_attention_heads": 8,
    "head_dim": 128, "intermediate_size": 2560, "first_k_dense_replace": 1, "layer_group_size": 5,
    "group_norm_size": 4, "q_lora_rank": 256, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_theta": 1e4, "num_experts": 32,
    "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "num_shared_experts": 1,
    "moe_intermediate_size": 512, "num_nextn_predict_layers": 1, "lightning_slope_layer_offset": 1,
}  # fmt: skip
SHARD = 200 * 10**6
PEAK = "import resource, sys; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)"
RUN = (
    "import sys; from ling_trainer.cli import main; code = main(sys.argv[1:]); "
    f"{PEAK}; sys.exit(code)"
)
IDLE = (
    "import ling_trainer.convert_files, ling_trainer.convert_report, ling_trainer.hf_files, "
    f"ling_trainer.parameters; {PEAK}"
)


def write_checkpoint(path: Path, config: ModelConfig) -> int:
    """Write a directory of one file, tensor by tensor, and return the bytes of its tensors."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config_to_hf(config)))
    biases, random = set(bias_names(config)), np.random.default_rng(0)
    kinds = {True: np.dtype(np.float32), False: np.dtype(ml_dtypes.bfloat16)}
    tensors = {n: (s, kinds[n in biases]) for n, s in tensor_shapes(config).items()}
    with TensorWriter(path / "model.safetensors", tensors) as writer:
        for name, (shape, dtype) in tensors.items():
            writer.write(name, random.standard_normal(shape, np.float32).astype(dtype))
    return sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in tensors.values())


def measure(*arguments: str) -> tuple[int, float]:
    """Run the command line; return its peak resident bytes and seconds."""
    began = time.monotonic()
    command = [sys.executable, "-c", RUN if arguments else IDLE, *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stdout.splitlines()[-1]), time.monotonic() - began


def main() -> None:
    """Measure and print JSON."""
    config = ModelConfig.model_validate(MODEL)
    each: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = write_checkpoint(folder / "hf", config)
        hf, ling, back = (str(folder / name) for name in ("hf", "ling", "back"))
        idle, _ = measure()
        verbs = {
            "hf-to-ling": (hf, ling),
            "ling-to-hf": (ling, back, "--max-shard-size", str(SHARD)),
        }
        for verb, arguments in verbs.items():
            peak, seconds = measure("convert", verb, *arguments)
            each[verb] = {"peak_bytes": peak, "above_idle_bytes": peak - idle, "seconds": seconds}
    layers = [4 * int(np.prod(p.leaf.shape)) for p in places(config)]
    result = {
        "question": "peak memory of a conversion against the size of the checkpoint",
        **provenance("jax", "tensorstore", "numpy"),
        "load_average": os.getloadavg()[0],
        "checkpoint_bytes": size,
        "float32_bytes": sum(layers),
        "largest_leaf_of_a_layer_bytes": max(layers),
        "idle_bytes": idle,
        **each,
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
