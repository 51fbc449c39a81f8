"""Single operations of Ling2 against captures from the public reference code, key by key."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from ling_trainer import convert
from ling_trainer.hf_files import open_hf
from ling_trainer.model import gla, mla, moe
from ling_trainer.model.block import Block
from ling_trainer.model.hf_layout import block_leaves
from ling_trainer.model.layers import Tokens, rotate_half_split
from ling_trainer.model.mtp import PredictionDepth
from ling_trainer.model_config import ModelConfig

GOLDEN = Path(__file__).parents[1] / "golden" / "ling"
FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
COUNTS = {"ling_v2_5_tiny": 38, "ling_v2_tiny": 30}
OPS = {folder: load_file(GOLDEN / folder / "ops.safetensors") for folder in COUNTS}
KEYS = [(folder, key) for folder, ops in OPS.items() for key in ops]


@pytest.fixture(scope="module")
def captures() -> Iterator[dict[str, dict[str, np.ndarray]]]:
    """What our layers give for each capture's inputs, by the captures' own names."""
    with pytest.MonkeyPatch.context() as patch:
        yield {folder: capture(GOLDEN / folder, patch) for folder in COUNTS}


def capture(folder: Path, patch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    hf = open_hf(folder)
    config = ModelConfig.model_validate(convert.config_from_hf(hf.config), strict=True)
    params, router_bias = convert.hf_to_params(hf.tensors, config)
    expected = load_file(folder / "expected.safetensors")
    ids = jnp.asarray(expected["input_ids"].astype(np.int32))
    tokens = Tokens(
        positions=jnp.tile(jnp.arange(ids.shape[1]), (ids.shape[0], 1)),
        documents=None,
        valid=jnp.asarray(expected["attention_mask"] == 1),
        loss_groups=1,
    )
    ops = {name: jnp.asarray(value) for name, value in OPS[folder.name].items()}
    params = jax.tree.map(jnp.asarray, params)
    recorder = Recorder(config, tokens, params, router_bias, ops, patch)
    return jax.device_get(jax.jit(recorder.run, compiler_options=FAST_COMPILE)(ids))


class Recorder:
    """Run layer after layer and write down what happens inside."""

    def __init__(
        self,
        config: ModelConfig,
        tokens: Tokens,
        params: Any,
        router_bias: np.ndarray,
        ops: dict[str, Any],
        patch: pytest.MonkeyPatch,
    ) -> None:
        self.config, self.tokens, self.ops, self.patch = config, tokens, ops, patch
        self.params, self.biases = params, router_bias
        self.tensors = convert.params_to_hf(params, config)
        self.inside: dict[str, Any] = {}
        self.found: dict[str, Any] = {}

    def run(self, ids: Any) -> dict[str, Any]:
        params, last = self.params, self.config.num_hidden_layers
        for module, name in (
            (gla, "lightning_attention"),
            (mla, "causal_attention"),
            (moe, "route"),
        ):
            self.spy(module, name)
        embedding = jnp.asarray(params["embedding"])
        x = embedding[ids]
        for layer in range(last):
            x = self.block(layer, self.layer(layer), x)
        empty = PredictionDepth(self.config, rngs=nnx.Rngs(0))
        depth = nnx.merge(nnx.split(empty)[0], params["mtp"][0])
        scale = params["norm"]["scale"]  # the prediction depth starts after the final norm
        hidden = x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + self.config.rms_norm_eps)
        ahead = embedding[jnp.pad(ids[:, 1:], ((0, 0), (0, 1)))]
        joined = jnp.concatenate([depth.enorm(ahead), depth.hnorm(hidden * scale)], -1)
        x = jnp.matmul(joined, depth.eh_proj[...], precision="highest")
        self.block(last, params["mtp"][0]["block"], x)
        out = f"model.layers.{last}/out"  # the reference's block ends with the final norm
        self.found[out] = depth.final_norm(self.found[out])
        return self.found

    def layer(self, layer: int) -> Any:
        """Return the parameters of one layer, read from Hugging Face's tensors again."""
        leaves = block_leaves(self.config, layer)
        paths = {leaf.path: jnp.asarray(leaf.read(self.tensors)) for leaf in leaves}
        tree: dict[Any, Any] = {}
        for path, value in paths.items():
            node = tree
            for key in path[:-1]:
                node = node.setdefault(key, {})
            node[path[-1]] = value
        return tree

    def spy(self, module: Any, name: str) -> None:
        original = getattr(module, name)

        def call(*inputs: Any, **options: Any) -> Any:
            outputs = original(*inputs, **options)
            self.inside[name] = (inputs, outputs)
            return outputs

        self.patch.setattr(module, name, call)

    def block(self, layer: int, weights: Any, x: Any) -> Any:
        c, name = self.config, f"model.layers.{layer}"
        kind, feed_forward = c.attention_of(layer), "moe" if c.is_moe(layer) else "dense"
        empty = Block(c, attention=kind, feed_forward=feed_forward, rngs=nnx.Rngs(0))
        block = nnx.merge(nnx.split(empty)[0], weights)
        at = c.first_k_dense_replace
        bias = jnp.asarray(self.biases[layer - at] if c.is_moe(layer) else np.zeros(c.num_experts))
        decay = jnp.asarray(gla.log_decays(c)[min(layer, c.num_hidden_layers - 1)])
        y, _ = block(x, self.tokens, bias, decay)
        self.found[name + "/out"] = y
        normed = block.input_norm(x)
        self.found[name + ".attention/in"] = normed
        given = self.ops.get(name + ".attention/in", normed)
        extra = (decay,) if kind == "lightning" else ()
        mixed = block.attention(given, self.tokens, *extra)
        self.found[name + ".attention/out"] = mixed
        self.look_inside(layer, kind, block)
        if c.is_moe(layer):
            self.mixture(name, block, x + mixed, bias)
        return self.ops.get(name + "/out", y)

    def mixture(self, name: str, block: Block, x: Any, bias: Any) -> None:
        normed = block.post_attention_norm(x)
        given = self.ops.get(name + ".mlp.gate/in", normed)
        assert isinstance(block.mlp, moe.MixtureOfExperts)
        y, _ = block.mlp(given, self.tokens, bias)
        (scores, _), routing = self.inside["route"]
        self.found |= {
            f"{name}.mlp/out": y,
            f"{name}.mlp.gate/in": normed,
            f"{name}.mlp.gate/logits": scores,
            f"{name}.mlp.gate/topk_idx": routing.indices,
            f"{name}.mlp.gate/topk_weight": routing.weights,
            f"{name}.mlp.gate/expert_bias": bias,
        }

    def look_inside(self, layer: int, kind: str, block: Block) -> None:
        if kind == "mla":
            (q, k, v), _ = self.inside["causal_attention"]
            nope = self.config.qk_nope_head_dim

            def halves(z: Any) -> Any:
                """The reference moves rotated pairs to halves; scores do not depend on it."""
                parts = (z[..., :nope], z[..., nope::2], z[..., nope + 1 :: 2])
                return jnp.concatenate(parts, -1)

            for part, z in {"q": halves(q), "k": halves(k), "v": v}.items():
                self.found[f"mla_layer{layer}/{part}"] = z[:1].swapaxes(1, 2)
        if kind == "lightning":
            (q, k, v), retained = self.inside["lightning_attention"]
            assert isinstance(block.attention, gla.LightningAttention)
            normed = block.attention.g_norm(retained.outputs.reshape(*q.shape[:2], -1))
            cos, sin = self.rotation(q.shape[-1])
            values = {
                "q": q, "k": k, "v": v, "o": retained.outputs, "final_state": retained.state,
                "o_normed": normed, "cos": cos, "sin": sin,
                "slope": gla.log_decays(self.config)[layer],
            }  # fmt: skip
            self.found |= {
                f"lightning_layer{layer}/{n}": jnp.asarray(z) for n, z in values.items()
            }

    def rotation(self, head: int) -> tuple[Any, Any]:
        """Read cos and sin of each pair off the rotation of unit vectors."""
        width, positions = self.config.rotary_dim, self.tokens.positions[:1]
        ones = jnp.zeros((1, positions.shape[1], 1, head)).at[..., : width // 2].set(1)
        theta = self.config.rope_theta
        turned = rotate_half_split(ones, positions, theta=theta, width=width)[0, :, 0, :width]
        cos, sin = jnp.split(turned, 2, -1)
        return jnp.concatenate([cos, cos], -1), jnp.concatenate([sin, sin], -1)


def test_the_captures_are_all_there() -> None:
    assert {folder: len(ops) for folder, ops in OPS.items()} == COUNTS


def tolerance(key: str, golden: np.ndarray) -> float:
    """Observed: 1.6e-6 for attention, 5e-7 for weights, 1e-6 of the largest for sums over time."""
    if key.endswith(("topk_idx", "expert_bias")):
        return 0.0
    if key.endswith("topk_weight"):
        return 5e-6
    return 1e-5 if np.abs(golden).max() < 10 else 5e-6 * float(np.abs(golden).max())


@pytest.mark.parametrize(("folder", "key"), KEYS, ids=lambda value: str(value))
def test_an_operation_equals_the_golden(
    captures: dict[str, dict[str, np.ndarray]],
    folder: str,
    key: str,
    show_golden: Callable[..., None],
) -> None:
    golden, found = OPS[folder][key], captures[folder][key]
    assert found.shape == golden.shape
    real = load_file(GOLDEN / folder / "expected.safetensors")["attention_mask"] == 1
    error = np.abs(found.astype(np.float64) - golden)
    if golden.shape[:2] == real.shape and not key.endswith("final_state"):
        error = error[real]
    elif golden.shape[0] == real.size:
        error = error[real.ravel()]
    limit = tolerance(key, golden)
    show_golden(f"ling/{folder}/ops", cases=key, worst=error.max(), tolerance=limit)
    assert error.max() <= limit


def test_decays_of_every_lightning_layer_equal_the_golden() -> None:
    folder = GOLDEN / "ling_v2_5_tiny"
    config = ModelConfig.model_validate(convert.config_from_hf(open_hf(folder).config))
    stored = json.loads((folder / "expected.json").read_text())["slopes"]
    assert len(stored) == 2
    for name, slopes in stored.items():
        layer = int(name.split(".")[2])
        np.testing.assert_allclose(gla.log_decays(config)[layer], slopes, rtol=1e-6)
