"""A float64 NumPy forward pass of Ling2, written from its specification.

It reads Hugging Face's tensors, so it shares neither code nor layout with the model.
"""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np

from ling_trainer.model_config import ModelConfig


@dataclasses.dataclass
class Reference:
    """The model in float64; `t` are Hugging Face's tensors."""

    config: ModelConfig
    t: dict[str, np.ndarray]
    batch: Any
    reset: bool
    mtp_roll: str

    def run(self) -> SimpleNamespace:
        c, batch = self.config, self.batch
        self.aux: list[Any] = []
        self.z: list[Any] = []
        self.counts: list[Any] = []
        x = self.t["model.word_embeddings.weight"][batch.inputs]
        for layer in range(c.num_hidden_layers):
            x = self.block(x, layer)
        states = [self.norm(x, "model.norm.weight", c.rms_norm_eps)]
        ids = batch.inputs
        for layer in range(c.num_hidden_layers, c.num_hidden_layers + c.num_nextn_predict_layers):
            name = f"model.layers.{layer}."
            ids = self.next_tokens(ids)
            embedded = self.t["model.word_embeddings.weight"][ids]
            joined = [
                self.norm(embedded, name + "enorm.weight", c.rms_norm_eps),
                self.norm(states[-1], name + "hnorm.weight", c.rms_norm_eps),
            ]
            x = self.block(self.linear(np.concatenate(joined, -1), name + "eh_proj"), layer)
            states.append(self.norm(x, name + "final_layernorm.weight", c.rms_norm_eps))
        logits = [self.linear(state, "lm_head") for state in states]
        return SimpleNamespace(logits=logits, aux=self.aux, z=self.z, counts=self.counts)

    def next_tokens(self, ids: np.ndarray) -> np.ndarray:
        segments, rolled = self.batch.segment_ids, np.zeros_like(ids)
        for b, t in np.ndindex(ids.shape[0], ids.shape[1] - 1):
            inside = segments[b, t] == segments[b, t + 1] != 0
            if self.mtp_roll == "plain" or inside:
                rolled[b, t] = ids[b, t + 1]
        return rolled

    def block(self, x: np.ndarray, layer: int) -> np.ndarray:
        c, name = self.config, f"model.layers.{layer}."
        h = self.norm(x, name + "input_layernorm.weight", c.rms_norm_eps)
        full, size = c.num_hidden_layers // c.layer_group_size, c.layer_group_size
        mla = (layer + 1) % size == 0 or layer >= full * size or layer >= c.num_hidden_layers
        x = x + (self.mla(h, name) if mla else self.lightning(h, name, layer))
        h = self.norm(x, name + "post_attention_layernorm.weight", c.rms_norm_eps)
        if layer < c.first_k_dense_replace:
            return x + self.swiglu(h, name + "mlp.")
        return x + self.moe(h, name + "mlp.")

    def mla(self, x: np.ndarray, name: str) -> np.ndarray:
        c, a = self.config, name + "attention."
        nope, rope, heads = c.qk_nope_head_dim, c.qk_rope_head_dim, c.num_attention_heads
        if c.q_lora_rank is None:
            q = self.linear(x, a + "q_proj")
        else:
            q = self.norm(self.linear(x, a + "q_a_proj"), a + "q_a_layernorm.weight", 1e-6)
            q = self.linear(q, a + "q_b_proj")
        q = q.reshape(*x.shape[:2], heads, nope + rope)
        down = self.linear(x, a + "kv_a_proj_with_mqa")
        latent = self.norm(down[..., : c.kv_lora_rank], a + "kv_a_layernorm.weight", 1e-6)
        kv = self.linear(latent, a + "kv_b_proj")
        kv = kv.reshape(*x.shape[:2], heads, nope + c.v_head_dim)
        angle = self.angles(rope)
        turned_q = self.rotate_pairs(q[..., nope:], angle)
        turned_k = self.rotate_pairs(down[..., None, c.kv_lora_rank :], angle)
        scores = np.einsum("bqhd,bkhd->bhqk", q[..., :nope], kv[..., :nope])
        scores = scores + np.einsum("bqhd,bkd->bhqk", turned_q, turned_k[:, :, 0])
        seen = np.tril(np.ones((x.shape[1], x.shape[1]), bool))[None, None]
        if self.reset:
            s = self.batch.segment_ids
            seen = seen & (s[:, None, :, None] == s[:, None, None, :])
        scores = np.where(seen, scores / np.sqrt(nope + rope), -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p = p / p.sum(-1, keepdims=True)
        o = np.einsum("bhqk,bkhd->bqhd", p, kv[..., nope:]).reshape(*x.shape[:2], -1)
        return self.linear(o, a + "dense")

    def lightning(self, x: np.ndarray, name: str, layer: int) -> np.ndarray:
        c, a = self.config, name + "attention."
        heads, width = c.num_attention_heads, c.head_dim
        qkv = self.linear(x, a + "query_key_value").reshape(*x.shape[:2], 3, heads, width)
        angle, turned = self.angles(c.rotary_dim), []
        for part, norm in ((0, "query_layernorm"), (1, "key_layernorm")):
            y = self.norm(qkv[:, :, part], a + norm + ".weight", c.rms_norm_eps)
            half = c.rotary_dim // 2
            first, second = y[..., :half], y[..., half : 2 * half]
            cos, sin = np.cos(angle)[:, :, None], np.sin(angle)[:, :, None]
            rotated = [first * cos - second * sin, second * cos + first * sin]
            turned.append(np.concatenate([*rotated, y[..., 2 * half :]], -1))
        q, k = turned
        scale = 1 - (layer - c.lightning_slope_layer_offset) / (c.num_hidden_layers - 1) + 1e-5
        decay = np.exp(-np.asarray(alibi(heads)) * scale)[:, None, None]
        state, outputs = np.zeros((x.shape[0], heads, width, width)), []
        s = self.batch.segment_ids
        for t in range(x.shape[1]):
            if self.reset and t:
                state = state * (s[:, t] == s[:, t - 1])[:, None, None, None]
            state = decay * state + np.einsum("bhd,bhe->bhde", k[:, t], qkv[:, t, 2])
            outputs.append(np.einsum("bhd,bhde->bhe", q[:, t] / np.sqrt(width), state))
        o = np.stack(outputs, 1).reshape(*x.shape[:2], c.group_norm_size, -1)
        o = o / np.sqrt((o * o).mean(-1, keepdims=True) + c.rms_norm_eps)
        o = o.reshape(*x.shape[:2], -1) * self.t[a + "g_norm.weight"]
        gate = 1 / (1 + np.exp(-self.linear(x, a + "g_proj")))
        return self.linear(o * gate, a + "dense")

    def moe(self, x: np.ndarray, name: str) -> np.ndarray:
        c, flat = self.config, x.reshape(-1, x.shape[-1])
        experts, chosen_each, size = (
            c.num_experts,
            c.num_experts_per_tok,
            c.num_experts // c.n_group,
        )
        scores = flat @ self.t[name + "gate.weight"].T
        share = 1 / (1 + np.exp(-scores))
        biased = share + self.t[name + "gate.expert_bias"]
        valid = (self.batch.segment_ids != 0).ravel()
        y, counts = np.zeros_like(flat), np.zeros(experts, int)
        outputs = [self.swiglu(flat, f"{name}experts.{e}.") for e in range(experts)]
        for t in range(len(flat)):
            groups = biased[t].reshape(c.n_group, size)
            best = np.sort(groups, -1)[:, -(chosen_each // c.topk_group) :].sum(-1)
            kept = np.argsort(-best)[: c.topk_group]
            allowed = np.isin(np.arange(experts) // size, kept)
            chosen = np.argsort(-np.where(allowed, biased[t], -np.inf))[:chosen_each]
            w = share[t, chosen]
            w = w / (w.sum() + 1e-20) if chosen_each > 1 else w
            for e, weight in zip(chosen, w * c.routed_scaling_factor, strict=True):
                y[t] += weight * outputs[e][t]
                counts[e] += valid[t]
        total = max(valid.sum(), 1)
        q = share[valid] / (share[valid].sum(-1, keepdims=True) + 1e-20)
        load = np.bincount(np.argsort(-q, -1)[:, :chosen_each].ravel(), minlength=experts)
        self.aux.append(experts / (chosen_each * total**2) * (load * q.sum(0)).sum())
        self.z.append((np.log(np.exp(scores[valid]).sum(-1)) ** 2).sum() / total)
        self.counts.append(counts)
        if c.num_shared_experts:
            y = y + self.swiglu(flat, name + "shared_experts.")
        return y.reshape(x.shape)

    def swiglu(self, x: np.ndarray, name: str) -> np.ndarray:
        gate, up = self.linear(x, name + "gate_proj"), self.linear(x, name + "up_proj")
        return self.linear(gate / (1 + np.exp(-gate)) * up, name + "down_proj")

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.t[name + ".weight"].T

    def norm(self, x: np.ndarray, name: str, eps: float) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * self.t[name]

    def angles(self, width: int) -> np.ndarray:
        frequencies = self.config.rope_theta ** (-np.arange(0, width, 2) / width)
        return self.batch.positions[..., None] * frequencies

    @staticmethod
    def rotate_pairs(x: np.ndarray, angle: np.ndarray) -> np.ndarray:
        turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)[:, :, None]
        return np.stack([turned.real, turned.imag], -1).reshape(x.shape)


def alibi(heads: int) -> list[float]:
    if heads & (heads - 1) == 0:
        return [2 ** (-8 * (i + 1) / heads) for i in range(heads)]
    power = 1 << (heads.bit_length() - 1)
    return alibi(power) + alibi(2 * power)[0::2][: heads - power]
