"""From a configuration to what the loop needs: mesh, state, compiled step, batches on devices."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int

from ling_trainer import sharding
from ling_trainer.batch import Batch
from ling_trainer.config import RunConfig
from ling_trainer.eval_step import EvalSums, eval_step
from ling_trainer.head_loss import Params
from ling_trainer.loss import Apply
from ling_trainer.model import ling2
from ling_trainer.optimizer import make_optimizer
from ling_trainer.ramp_up import BatchSizes, constant_batch
from ling_trainer.report import StepReport
from ling_trainer.schema import ConfigError
from ling_trainer.step import TrainState, init_state, train_step


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one call of the compiled step leaves on the devices."""

    state: TrainState
    report: StepReport
    stop: Array
    """1 where any process asked to stop, the same on all of them."""


type CompiledStep = Callable[..., StepResult]
"""(state, batch, flag[, poison]) -> StepResult."""
type CompiledEvalStep = Callable[[Params, Array, Batch, Array], tuple[EvalSums, Array]]
"""(params, router_bias, batch, flag) -> sums, and 1 where any process asked to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A run's computations, before anything is compiled.

    Attributes:
      config: of the run.
      mesh: over all devices of all processes.
      tx: the optimizer.
      abstract_state: shapes, types and shardings of the state.
      global_batch_size: rows of a step; while the batch size ramps up, of the steps after.
    """

    config: RunConfig
    mesh: Mesh
    tx: optax.GradientTransformationExtraArgs
    abstract_state: TrainState
    global_batch_size: int

    @property
    def batch_sizes(self) -> BatchSizes:
        """Samples and micro-batches of each step."""
        k = self.config.gradient_accumulation_steps
        return self.config.ramp_up or constant_batch(self.global_batch_size, num_microbatches=k)

    def initial_state(self) -> TrainState:
        """Make the state before the first step, each shard on its own device."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)
        init = functools.partial(_initial_state, self.config, self.tx)
        # It runs once, so a CPU need not spend half a minute on optimizing it.
        quick = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
        lowered = jax.jit(init, out_shardings=shardings).lower()
        return lowered.compile(compiler_options=quick)()

    def state_from(self, params: Params, router_bias: Array) -> TrainState:
        """Make the state before the first step of given parameters, which are donated."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)
        init = functools.partial(init_state, tx=self.tx)
        return jax.jit(init, out_shardings=shardings, donate_argnums=(0, 1))(params, router_bias)

    def local_rows(self, batch_size: int | None = None) -> list[int]:
        """List the rows of a global batch that this process's devices hold, in order.

        Args:
          batch_size: its rows; None is the full batch.
        """
        shape = self._batch_shape(batch_size)
        placement = sharding.batch_sharding(self.mesh)
        indices = placement.addressable_devices_indices_map(shape).values()
        rows = {row for index in indices if index for row in range(shape[0])[index[0]]}
        return sorted(rows)

    def place(self, arrays: Mapping[str, np.ndarray]) -> Batch:
        """Put this process's rows on its devices, as its part of the global batch.

        Args:
          arrays: the fields of Batch, each [len(local_rows(B)), S] for a batch of B rows.
        """
        placement = sharding.batch_sharding(self.mesh)
        return Batch(**{
            name: jax.make_array_from_process_local_data(placement, rows)
            for name, rows in arrays.items()
        })  # fmt: skip

    def flag(self, *, stop: bool) -> Int[Array, " devices"]:
        """Put this process's wish to stop on its devices."""
        placement = _over_all_devices(self.mesh)
        local = np.full(len(jax.local_devices()), stop, np.int32)
        return jax.make_array_from_process_local_data(placement, local, (self.mesh.size,))

    def compile(self, *, with_poison: bool, batch_size: int | None = None) -> CompiledStep:
        """Compile the step: (state, batch, flag[, poison]) -> StepResult. The state is donated.

        The flag rides in the step's own program, so agreeing on when to stop costs no message of
        its own.

        Args:
          with_poison: whether the program takes a poison.
          batch_size: rows of the step's batch; None is the full batch.
        """
        replicated = sharding.replicated(self.mesh)
        state_shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)
        step = jax.jit(
            functools.partial(_step, self.config, self.tx),
            out_shardings=(state_shardings, replicated, replicated),
            donate_argnums=0,
        )
        arguments: list[Any] = [self.abstract_state, self._abstract_batch(batch_size)]
        arguments.append(self._abstract_flag())
        if with_poison:
            arguments.append(jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated))
        with jax.set_mesh(self.mesh):  # the model's sharding constraints name its axes
            compiled = step.lower(*arguments).compile()
        return lambda *values: StepResult(*compiled(*values))

    def compile_eval_step(self) -> CompiledEvalStep:
        """Compile the forward pass on a validation batch; nothing is donated.

        Parameters and batch are laid out as in training; the sums are on every device. The flag
        rides along, so a long evaluation can give way to a signal.
        """
        replicated, state = sharding.replicated(self.mesh), self.abstract_state
        step = jax.jit(functools.partial(_eval_step, self.config), out_shardings=replicated)
        with jax.set_mesh(self.mesh):  # the model's sharding constraints name its axes
            return step.lower(
                state.params, state.router_bias, self._abstract_batch(), self._abstract_flag()
            ).compile()

    def poison(self, kind: int) -> Int[Array, ""]:
        """Put a value of step.Poison on every device.

        Without device_put, which would compare the value of all processes by a collective.
        """
        value = np.asarray(kind, np.int32)
        return jax.make_array_from_callback(
            value.shape, sharding.replicated(self.mesh), lambda _: value
        )

    def _abstract_flag(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            (self.mesh.size,), jnp.int32, sharding=_over_all_devices(self.mesh)
        )

    def _batch_shape(self, batch_size: int | None) -> tuple[int, int]:
        return batch_size or self.global_batch_size, self.config.data.max_target_length

    def _abstract_batch(self, batch_size: int | None = None) -> Batch:
        placement, shape = sharding.batch_sharding(self.mesh), self._batch_shape(batch_size)
        ints = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=placement)
        mask = jax.ShapeDtypeStruct(shape, jnp.bool_, sharding=placement)
        fields: dict[str, Any] = dict.fromkeys(
            ("inputs", "targets", "positions", "segment_ids"), ints
        )
        return Batch(**fields, loss_mask=mask)  # type: ignore[arg-type]


def build_program(config: RunConfig) -> Program:
    """Lay a run out over all devices of all processes; computes nothing yet.

    Raises:
      ConfigError: mesh and devices, or batch and mesh, do not fit.
    """
    devices = jax.devices()
    try:
        mesh = sharding.make_mesh(config.mesh, devices)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    rows = rows_per_step(config, len(devices))
    check_rows(config, rows, mesh)
    tx = make_optimizer(config.optimizer)
    abstract = _with_shardings(
        jax.eval_shape(lambda: _initial_state(config, tx)),
        mesh,
        offload=config.optimizer.optimizer_memory_host_offload,
    )
    return Program(
        config=config, mesh=mesh, tx=tx, abstract_state=abstract, global_batch_size=rows
    )


def check_rows(config: RunConfig, global_batch_size: int, mesh: Mesh) -> None:
    """Check that the rows of every step divide over the mesh.

    Raises:
      ConfigError: they do not.
    """
    placement = sharding.batch_sharding(mesh)
    stages = config.ramp_up.stages if config.ramp_up else ()
    sizes = {
        f"data.global_batch_size={global_batch_size}": global_batch_size,
        **{
            f"a batch of {s.batch_size} on the way of data.rampup_batch_size": s.batch_size
            for s in stages[:-1]
        },
    }
    for name, rows in sizes.items():
        try:
            placement.shard_shape((rows, config.data.max_target_length))
        except ValueError as error:
            raise ConfigError(
                f"{name} does not divide over the mesh {dict(mesh.shape)}; "
                "choose a multiple of the data, fsdp and expert axes together"
            ) from error


def rows_per_step(config: RunConfig, num_devices: int) -> int:
    """Return the rows of a step: global_batch_size, or what per_device_batch_size comes to.

    Raises:
      ConfigError: the product is no multiple of micro-batches x loss groups.
    """
    k, groups = config.gradient_accumulation_steps, config.loss.loss_groups
    if config.data.global_batch_size is not None:
        return config.data.global_batch_size
    each = config.data.per_device_batch_size or 0
    if each * num_devices % groups:
        raise ConfigError(
            f"data.per_device_batch_size={each} x {num_devices} devices is not a multiple of "
            f"loss.loss_groups={groups}; choose a multiple"
        )
    return each * num_devices * k


def _initial_state(config: RunConfig, tx: optax.GradientTransformationExtraArgs) -> TrainState:
    params = ling2.init_params(config.model, seed=config.seed)
    return init_state(params, ling2.init_router_bias(config.model), tx)


def _step(
    config: RunConfig,
    tx: optax.GradientTransformationExtraArgs,
    state: TrainState,
    batch: Batch,
    flag: Array,
    poison: Array | None = None,
) -> tuple[TrainState, StepReport, Array]:
    new_state, report = train_step(
        state, batch, apply=_apply(config), logits=ling2.logits, tx=tx, config=config,
        poison=poison,
    )  # fmt: skip
    return new_state, report, jnp.max(flag)


def _eval_step(
    config: RunConfig, params: Params, router_bias: Array, batch: Batch, flag: Array
) -> tuple[EvalSums, Array]:
    sums = eval_step(
        params, router_bias, batch, apply=_apply(config), logits=ling2.logits, config=config
    )
    return sums, jnp.max(flag)


def _apply(config: RunConfig) -> Apply:
    return functools.partial(
        ling2.apply,
        config=config.model,
        loss_groups=config.loss.loss_groups,
        mtp_roll=config.loss.mtp_roll,
        reset_attention_mask=config.data.attention_resets,
    )


def _with_shardings(state: TrainState, mesh: Mesh, *, offload: bool) -> TrainState:
    """Give every leaf its sharding; optimizer moments follow the parameter they belong to."""
    places = sharding.param_shardings(state, mesh)
    if offload:
        places = replace(places, opt_state=sharding.on_hosts(places.opt_state))
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        state,
        places,
    )


def _over_all_devices(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))
