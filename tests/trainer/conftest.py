"""Fixtures of the training step's tests: a toy model, the product under any package name.

A test that takes `package` can be run against a mutated copy of the product: see test_mutants.py.
"""

import gc
import importlib
import json
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ling_trainer.config import RunConfig
from ling_trainer.settings import resolve

GOLDEN = Path(__file__).parents[1] / "golden"
# Sixteen programs, each run three times: what LLVM gains is less than what it costs.
FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
MODULES = (
    "accumulate", "auxiliaries", "batch", "eval_step", "head_loss", "loss", "model.mtp",
    "model.outputs", "model.router", "optimizer", "ramp_up", "report", "schedule", "step",
    "token_weights",
)  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def _programs_of_earlier_runs(kept_programs: dict[str, str]) -> None:
    """Compile only what no green run of these tests on this machine has compiled."""


@pytest.fixture(scope="session")
def maxtext(load_golden: Callable[[Path], Any]) -> SimpleNamespace:
    """Numbers of fixtures made from MaxText and from a float64 reference of the specification."""
    folder = GOLDEN / "maxtext"
    loaded = {path.stem: load_golden(path) for path in folder.glob("*.npz")}
    cases = json.loads((folder / "expected_cases.json").read_text())
    loaded["upstream"] = loaded.pop("upstream_0.2.5")
    return SimpleNamespace(cases=cases, **loaded)


@pytest.fixture(scope="session")
def product() -> Callable[[str], SimpleNamespace]:
    """Modules of the step, of the real package or of a copy of it under another name."""

    def load(package: str = "ling_trainer") -> SimpleNamespace:
        modules = {name: importlib.import_module(f"{package}.{name}") for name in MODULES}
        return SimpleNamespace(**{key.split(".")[-1]: value for key, value in modules.items()})

    return load


@pytest.fixture(scope="session")
def package() -> str:
    """Name of the product; a mutant's is another."""
    return "ling_trainer"


@pytest.fixture(scope="session")
def step_config() -> Callable[..., RunConfig]:
    """Build the configuration of a step whose model is not ling2's."""

    def build(**overrides: Any) -> RunConfig:
        return resolve(
            {"preset": "ling2_tiny", "checkpoint": {"enable_checkpointing": False}},
            {"data": {"dataset_type": "synthetic", "global_batch_size": 48}},
            {"loss": {"calculate_per_token_loss": True, "moe_z_loss_weight": 0.0}},
            {"loss": {"mtp_per_layer_loss_norm": False}},
            overrides,
        )

    return build


@pytest.fixture(scope="session")
def toy(maxtext: SimpleNamespace) -> SimpleNamespace:
    """The model of fixtures/maxtext: a constant embedding, a linear head, a router, two depths.

    Its router counts padding, unlike the product's. `with_z` adds the router's z-loss.
    """
    emb = jnp.asarray(maxtext.inputs["emb"])
    experts, top_k = 4, 2

    def apply(
        params: Any,
        router_bias: Any,
        batch: Any,
        *,
        product: SimpleNamespace,
        loss_groups: int,
        with_z: bool,
        dtype: Any,
        masked_nan: bool,
    ) -> Any:
        hidden = emb[batch.inputs].astype(dtype)
        scores = hidden @ params["R"].astype(dtype)
        probabilities = jax.nn.softmax(scores, -1)
        chosen = jax.lax.top_k(probabilities, top_k)[1]
        one_hot = jax.nn.one_hot(chosen, experts).sum(2)
        density = one_hot.mean(1) / top_k
        row_loss = (density * probabilities.mean(1)).mean(-1) * experts**2
        row_z = jnp.square(jax.nn.logsumexp(scores, -1)).mean(1) * with_z
        stats = product.outputs.RouterStats(
            aux=row_loss.reshape(loss_groups, -1).mean(1)[:, None].astype(jnp.float32),
            z=row_z.reshape(loss_groups, -1).mean(1)[:, None].astype(jnp.float32),
            expert_counts=one_hot.sum((0, 1))[None].astype(jnp.int32),
        )
        if masked_nan:
            hidden = jnp.where(batch.loss_mask[..., None], hidden, jnp.nan)
        return product.outputs.ModelOutputs(
            hidden=hidden, mtp_hidden=(hidden, hidden), router=stats
        )

    def logits(params: Any, hidden: Any, depth: int) -> Any:
        head = params[("W", "M1", "M2")[depth]].astype(hidden.dtype)
        return (hidden @ head).astype(jnp.float32)

    def build(
        product: SimpleNamespace,
        *,
        loss_groups: int = 1,
        with_z: bool = False,
        dtype: Any = jnp.float32,
        masked_nan: bool = False,
    ) -> dict[str, Any]:
        fixed = {"loss_groups": loss_groups, "with_z": with_z, "masked_nan": masked_nan}
        return {"apply": partial(apply, product=product, dtype=dtype, **fixed), "logits": logits}

    def batch(product: SimpleNamespace, segments: Any, rows: Any = slice(None)) -> Any:
        inputs = maxtext.inputs
        return product.batch.Batch(
            inputs=jnp.asarray(inputs["inputs"][rows]),
            targets=jnp.asarray(inputs["targets"][rows]),
            positions=jnp.asarray(inputs["inputs_position"][rows]),
            segment_ids=jnp.asarray(segments[rows]),
            loss_mask=jnp.asarray(segments[rows] != 0),
        )

    params = {name: jnp.asarray(maxtext.inputs[name]) for name in ("W", "R", "M1", "M2")}
    return SimpleNamespace(build=build, batch=batch, params=params, bias=jnp.zeros((1, experts)))


@pytest.fixture(scope="session")
def run_toy_step(product: Any, toy: SimpleNamespace, step_config: Any) -> Callable[..., Any]:
    """Jitted loss_and_gradients and report of the toy model, compiled once a setting."""
    compiled: dict[Any, Any] = {}

    def run(package: str, segments: np.ndarray, rows: Any = slice(None), **loss: Any) -> Any:
        modules = product(package)
        key = (package, *sorted(loss.items()))
        model = toy.build(
            modules,
            loss_groups=loss.get("loss_groups", 1),
            with_z=bool(loss.get("moe_z_loss_weight")),
            masked_nan=loss.pop("masked_nan", False),
        )
        if key not in compiled:
            micro = loss.pop("num_microbatches")
            config = step_config(gradient_accumulation_steps=micro, loss=loss)
            tx = modules.optimizer.make_optimizer(config.optimizer)

            def step(params: Any, batch: Any) -> Any:
                state = modules.step.init_state(params, toy.bias, tx)
                terms, grads = modules.step.loss_and_gradients(
                    params, toy.bias, batch, config=config, **model
                )
                _, report = modules.step.apply_gradients(
                    state, terms, grads, tx=tx, config=config,
                    total_weights=batch.loss_mask.sum(dtype="int32"),
                )  # fmt: skip
                return report, grads

            compiled[key] = jax.jit(step, compiler_options=FAST_COMPILE)
        report, grads = jax.device_get(
            compiled[key](toy.params, toy.batch(modules, segments, rows))
        )
        return modules.report.to_log(report), grads

    return run


@pytest.fixture(scope="session")
def toy_gradients(product: Any, toy: SimpleNamespace, step_config: Any) -> Callable[..., Any]:
    """Jitted loss_and_gradients of the toy model: (package, segments, rows, **loss) to both."""
    compiled: dict[Any, Any] = {}

    def run(
        package: str, segments: np.ndarray, rows: Any = slice(None), *, micro: int, **loss: Any
    ) -> Any:
        modules, key = product(package), (package, micro, *sorted(loss.items()))
        groups = loss.get("loss_groups", 1)
        masked_nan = loss.pop("masked_nan", False)
        if key not in compiled:
            config = step_config(gradient_accumulation_steps=micro, loss=loss)
            model = toy.build(modules, loss_groups=groups, with_z=True, masked_nan=masked_nan)
            gradients = partial(modules.step.loss_and_gradients, config=config, **model)
            compiled[key] = jax.jit(gradients, compiler_options=FAST_COMPILE)
        batch = toy.batch(modules, segments, rows)
        return jax.device_get(compiled[key](toy.params, toy.bias, batch))

    return run


@pytest.fixture(scope="session")
def uneven(maxtext: SimpleNamespace) -> np.ndarray:
    """Segments of eight rows whose four micro-batches have 50, 20, 35 and 15 tokens."""
    segments = maxtext.inputs["seg_uneven"]
    assert [int((segments[k::4] != 0).sum()) for k in range(4)] == [50, 20, 35, 15]
    return segments


@pytest.fixture(scope="session")
def alone(toy_gradients: Any) -> Callable[..., Any]:
    """Terms and gradients of each of four micro-batches by itself, as a step with K = 1."""

    def run(segments: np.ndarray, **loss: Any) -> Any:
        rows = [np.arange(k, len(segments), 4) for k in range(4)]
        return [toy_gradients("ling_trainer", segments, r, micro=1, **loss) for r in rows]

    return run


@pytest.fixture
def no_thread_and_no_process_is_left() -> Iterator[None]:
    """Fail where a loader's threads or worker processes outlive the test."""
    yield
    # Python 3.12.1 warns where semaphores of workers are collected while new ones are made.
    gc.collect()
    left: list[str] = []
    for _ in range(200):
        left = [t.name for t in threading.enumerate() if "prefetch" in t.name]
        left += [p.name for p in multiprocessing.active_children()]
        if not left:
            return
        time.sleep(0.05)
    raise AssertionError(left)
