"""Ling2: embedding, blocks, final norm, head and multi-token prediction. Start reading here.

The model is NNX modules inside and pure pytrees outside: parameters are nested dicts and lists
of float32 arrays,

  embedding [V, D]    prefix [block]    groups [block with leaves [G, ...]]    tail [block]
  norm                head [D, V]       mtp [enorm, hnorm, eh_proj, block, final_norm]

`prefix` holds the layers up to the end of the group with the last dense layer; `groups` the
repeating pattern of lightning and MLA layers (of one gqa layer), one entry per place in the
pattern, stacked over the G groups; `tail` the layers after the last full group. `scan_layers`
changes how groups are run, never where parameters are. Router biases are no parameters: they are
an argument.

B sequences, S tokens, D hidden width, V vocabulary, L routers, E experts, G groups.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Float, Int

from ling_trainer.batch import Batch
from ling_trainer.model.block import Block
from ling_trainer.model.gla import log_decays
from ling_trainer.model.layers import RMSNorm, Tokens, normal
from ling_trainer.model.mtp import PredictionDepth, Roll, roll
from ling_trainer.model.outputs import ModelOutputs
from ling_trainer.model.router import LayerStats, join_layers
from ling_trainer.model_config import ModelConfig
from ling_trainer.sharding import constrain_rows

type Params = dict[str, Any]


@dataclass(frozen=True)
class Layout:
    """How many layers are in the prefix, in each group and in the tail, and how many groups."""

    prefix: int
    groups: int
    group_size: int
    tail: int


def layer_layout(config: ModelConfig) -> Layout:
    """Return where each layer's parameters are; layers are numbered prefix, groups, tail."""
    size, layers = config.layer_group_size, config.num_hidden_layers
    prefix = min(-(-config.first_k_dense_replace // size) * size, layers)
    groups = (layers - prefix) // size
    return Layout(prefix, groups, size, layers - prefix - groups * size)


def init_params(config: ModelConfig, *, seed: int) -> Params:
    """Return initial parameters: matrices and embeddings normal(0, initializer_range), norms 1.

    A pure function of the architecture and the seed: the values depend neither on sharding nor on
    scan_layers. Works under jit and eval_shape.

    Args:
      config: the architecture.
      seed: of every matrix.
    """
    model = Ling2(config, rngs=nnx.Rngs(params=jax.random.key(seed)))
    tree = _as_lists(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    # NNX leaves out what is empty; every list is there, so that all trees look alike.
    return {"prefix": [], "groups": [], "tail": [], "mtp": []} | tree


def init_router_bias(config: ModelConfig) -> Float[Array, "L E"]:
    """Return the routers' expert biases before the first step: zeros."""
    return jnp.zeros((config.num_routers, config.num_experts), jnp.float32)


def apply(
    params: Params,
    router_bias: Float[Array, "L E"],
    batch: Batch,
    *,
    config: ModelConfig,
    loss_groups: int,
    mtp_roll: Roll,
    reset_attention_mask: bool,
) -> ModelOutputs:
    """Run the model on one micro-batch.

    Args:
      params: see the module's docstring.
      router_bias: of the MoE layers, then of the prediction depths; no gradient flows to it.
      batch: leaves [B, S].
      config: the architecture and the compute type.
      loss_groups: R; router statistics are per equal block of B / R rows.
      mtp_roll: whether prediction depths take their next tokens across documents.
      reset_attention_mask: keep attention and recurrent states inside a document.

    Returns: Float32 hidden states (see logits) and router statistics.

    Raises:
      ValueError: loss_groups does not divide B.
    """
    rows = batch.inputs.shape[0]
    if rows % loss_groups:
        msg = f"loss_groups={loss_groups} does not divide {rows} rows; choose a divisor"
        raise ValueError(msg)
    tokens = Tokens(
        positions=batch.positions,
        documents=batch.segment_ids if reset_attention_mask else None,
        valid=batch.segment_ids != 0,
        loss_groups=loss_groups,
    )
    model = nnx.merge(_structure(config), _as_dicts(params))
    return model(batch, tokens, router_bias, mtp_roll=mtp_roll)


def logits(params: Params, hidden: Float[Array, "B S D"], depth: int) -> Float[Array, "B S V"]:
    """Return float32 logits, from float32 operands, of hidden states after their final norm.

    Args:
      params: see the module's docstring.
      hidden: of the backbone (depth 0) or of a prediction depth (from 1).
      depth: unused, since all depths share one head.
    """
    del depth
    return jnp.einsum(
        "bsd,dv->bsv",
        hidden.astype(jnp.float32),
        params["head"],
        precision=lax.Precision.HIGHEST,
    )


class Ling2(nnx.Module):
    """The whole model; see the module's docstring for its parameters."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        layout, shape = layer_layout(config), (config.vocab_size, config.hidden_size)
        self.embedding = normal(rngs, shape, std=config.initializer_range)
        self.prefix = _blocks(config, range(layout.prefix), rngs)
        self.groups = nnx.List([])
        if layout.groups:
            group = range(layout.prefix, layout.prefix + layout.group_size)
            build = nnx.vmap(functools.partial(_blocks, config, group), in_axes=0, out_axes=0)
            self.groups = nnx.split_rngs(splits=layout.groups)(build)(rngs)
        layers = config.num_hidden_layers
        self.tail = _blocks(config, range(layers - layout.tail, layers), rngs)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.head = normal(rngs, shape[::-1], std=config.initializer_range)
        depths = range(config.num_nextn_predict_layers)
        self.mtp = nnx.List([PredictionDepth(config, rngs=rngs) for _ in depths])
        self.config = config

    def __call__(
        self, batch: Batch, tokens: Tokens, router_bias: Float[Array, "L E"], *, mtp_roll: Roll
    ) -> ModelOutputs:
        """Return final hidden states and statistics; see apply."""
        hidden, stats = self._backbone(batch, tokens, router_bias)
        hidden = self.norm(hidden, jnp.float32)
        states: list[Array] = []
        ids = batch.inputs
        for depth, module in enumerate(self.mtp):
            ids = roll(ids, batch.segment_ids, shift=1, fill=0, by=mtp_roll)
            run = _checkpointed(module, self.config)
            bias = router_bias[self.config.num_moe_layers + depth]
            state, measured = run(states[-1] if states else hidden, self._embed(ids), tokens, bias)
            states.append(state)
            stats.append(jax.tree.map(lambda x: x[None], measured))
        router = join_layers(stats, config=self.config, loss_groups=tokens.loss_groups)
        return ModelOutputs(hidden, tuple(states), router)

    def _backbone(
        self, batch: Batch, tokens: Tokens, router_bias: Float[Array, "L E"]
    ) -> tuple[Float[Array, "B S D"], list[LayerStats]]:
        c, layout = self.config, layer_layout(self.config)
        decays = jnp.asarray(log_decays(c))
        biases = jnp.pad(router_bias, ((c.first_k_dense_replace, 0), (0, 0)))
        x = self._embed(batch.inputs)
        end = layout.prefix + layout.groups * layout.group_size
        head = slice(layout.prefix)
        x, first = _run(self.prefix, x, tokens, biases[head], decays[head], config=c)
        repeated = slice(layout.prefix, end)
        x, middle = self._run_groups(x, tokens, biases[repeated], decays[repeated])
        tail = slice(end, c.num_hidden_layers)
        x, last = _run(self.tail, x, tokens, biases[tail], decays[tail], config=c)
        return x, [*first, *middle, *last]

    def _run_groups(
        self, x: Float[Array, "B S D"], tokens: Tokens, biases: Array, decays: Array
    ) -> tuple[Float[Array, "B S D"], list[LayerStats]]:
        """Run the repeating groups; biases [G * layers, E] and decays [G * layers, H]."""
        count = layer_layout(self.config).groups
        if not count:
            return x, []
        structure, stacked = nnx.split(self.groups)
        biases, decays = (a.reshape(count, -1, a.shape[-1]) for a in (biases, decays))
        xs = (stacked, biases, decays)

        def group(x: Array, xs: tuple[Any, Array, Array]) -> tuple[Array, LayerStats]:
            leaves, bias, decay = xs
            blocks = nnx.merge(structure, leaves)
            x, stats = _run(blocks, x, tokens, bias, decay, config=self.config)
            return x, jax.tree.map(lambda *layers: jnp.concatenate(layers), *stats)

        if self.config.scan_layers:
            x, stats = lax.scan(group, x, xs)
            return x, [jax.tree.map(lambda s: s.reshape(-1, *s.shape[2:]), stats)]
        collected: list[LayerStats] = []
        for g in range(count):
            x, stats = group(x, jax.tree.map(lambda a, g=g: a[g], xs))
            collected.append(stats)
        return x, collected

    def _embed(self, ids: Int[Array, "B S"]) -> Float[Array, "B S D"]:
        return self.embedding[...][ids].astype(self.config.dtype)


def _blocks(config: ModelConfig, layers: Iterable[int], rngs: nnx.Rngs) -> nnx.List[Block]:
    return nnx.List([
        Block(
            config,
            attention=config.attention_of(layer),
            feed_forward="moe" if config.is_moe(layer) else "dense",
            rngs=rngs,
        )
        for layer in layers
    ])  # fmt: skip


def _run(
    blocks: Iterable[Block],
    x: Float[Array, "B S D"],
    tokens: Tokens,
    biases: Float[Array, "layers E"],
    decays: Float[Array, "layers H"],
    *,
    config: ModelConfig,
) -> tuple[Float[Array, "B S D"], list[LayerStats]]:
    """Run blocks in order; statistics of MoE layers get a leading layer dimension of 1."""
    collected: list[LayerStats] = []
    for i, block in enumerate(blocks):
        x = constrain_rows(x)
        x, stats = _checkpointed(block, config)(x, tokens, biases[i], decays[i])
        if stats is not None:
            collected.append(jax.tree.map(lambda s: s[None], stats))
    return x, collected


def _checkpointed(module: nnx.Module, config: ModelConfig) -> Callable[..., Any]:
    """Return the module as a function that keeps its inputs only, if remat_policy is full."""
    if config.remat_policy == "none":
        return module  # type: ignore[return-value]
    structure, leaves = nnx.split(module)

    def call(leaves: Any, *inputs: Any) -> Any:
        return nnx.merge(structure, leaves)(*inputs)

    return functools.partial(jax.checkpoint(call), leaves)


def _structure(config: ModelConfig) -> nnx.GraphDef[Ling2]:
    """Return the static half of the model, without making any array."""
    return nnx.split(nnx.eval_shape(lambda: Ling2(config, rngs=nnx.Rngs(params=0))))[0]


def _as_lists(tree: Any) -> Any:
    """Turn NNX's dicts with integer keys into lists."""
    if not isinstance(tree, dict):
        return tree
    if tree and all(isinstance(key, int) for key in tree):
        return [_as_lists(tree[i]) for i in range(len(tree))]
    return {key: _as_lists(value) for key, value in tree.items()}


def _as_dicts(tree: Any) -> Any:
    """Undo _as_lists."""
    if isinstance(tree, list):
        return {i: _as_dicts(value) for i, value in enumerate(tree)}
    if isinstance(tree, dict):
        return {key: _as_dicts(value) for key, value in tree.items()}
    return tree
