"""An evaluation's numbers: sum over sum, whatever the mode, the micro-batches and the padding."""

import functools
import math
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest

from ling_trainer.console import evaluation_line
from ling_trainer.eval_step import EvalSums, eval_log, eval_step
from ling_trainer.health_metrics import EVALUATED

FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@pytest.fixture(scope="module")
def toy_sums(
    toy: SimpleNamespace, product: Any, step_config: Any, maxtext: SimpleNamespace
) -> Any:
    """EvalSums of the toy model, on the host."""
    modules = product()
    model = toy.build(modules)

    @functools.cache
    def compiled(micro: int, per_token: bool) -> Any:
        loss = {"calculate_per_token_loss": per_token}
        config = step_config(gradient_accumulation_steps=micro, loss=loss)
        step = functools.partial(eval_step, config=config, **model)
        return jax.jit(step, compiler_options=FAST_COMPILE)

    def run(
        segments: str, *, rows: Any = slice(None), micro: int = 1, per_token: bool = True
    ) -> EvalSums:
        batch = toy.batch(modules, maxtext.inputs[f"seg_{segments}"], rows)
        return jax.device_get(compiled(micro, per_token)(toy.params, toy.bias, batch))

    return run


@pytest.mark.parametrize("segments", ["uneven", "even", "allpad"])
def test_golden_evaluation_is_sum_over_sum_in_every_mode_and_for_every_number_of_microbatches(
    segments: str, toy_sums: Any, maxtext: SimpleNamespace, show_golden: Any
) -> None:
    worst = 0.0
    for norm in ("pooled", "per_layer"):
        # One micro-batch, divided by its own tokens: sum over sum, of the LM and of each depth.
        case = f"{segments}_z0_GA1_pertoken1_{norm}"
        assert case in maxtext.cases
        for micro, per_token in ((1, True), (2, False), (4, False)):
            sums = toy_sums(segments, micro=micro, per_token=per_token)
            log = eval_log([sums], mtp_per_layer_loss_norm=norm == "per_layer")
            for key, golden in (("lm_loss", "lm_loss"), ("mtp_loss", "raw_mtp_loss")):
                error = abs(log[f"eval/{key}"] - float(maxtext.expected[f"{case}/{golden}"]))
                worst = max(worst, error)
            assert log["eval/total_weights"] == maxtext.expected[f"{case}/total_weights"]
            assert log["eval/perplexity"] == pytest.approx(math.exp(log["eval/lm_loss"]))
    show_golden(f"maxtext/expected.npz (eval, {segments})", cases="2/2", worst=worst,
                tolerance=1e-6)  # fmt: skip
    assert worst <= 1e-6


def test_batches_are_pooled_by_tokens_and_padding_rows_add_nothing(toy_sums: Any) -> None:
    whole = eval_log([toy_sums("uneven")], mtp_per_layer_loss_norm=True)
    parts = [toy_sums("uneven", rows=slice(0, 6)), toy_sums("uneven", rows=slice(6, 8))]
    pooled = eval_log(parts, mtp_per_layer_loss_norm=True)
    assert pooled == pytest.approx(whole, rel=1e-6)
    padded = eval_log([*parts, toy_sums("allpad")], mtp_per_layer_loss_norm=True)
    assert padded == pooled
    of_batches = [eval_log([part], mtp_per_layer_loss_norm=True) for part in parts]
    for key in ("eval/lm_loss", "eval/mtp_loss"):
        mean = np.mean([log[key] for log in of_batches])
        assert abs(mean - whole[key]) > 1e-3  # the data tell a mean of means apart


def test_the_log_has_the_contracts_keys_and_keeps_what_is_not_finite() -> None:
    none = np.zeros((1, 1, 0))
    for value in (math.nan, math.inf):
        sums = cast("Any", EvalSums)(np.full((1, 1), value), np.ones((1, 1)), none, none)
        log = eval_log([sums], mtp_per_layer_loss_norm=True)
        assert list(log) == [metric.log_key for metric in EVALUATED]
        assert repr(log["eval/lm_loss"]) == repr(log["eval/perplexity"]) == repr(value)
        assert log["eval/mtp_loss"] == 0  # a model without such a head
    assert eval_log(
        [cast("Any", EvalSums)(np.full((1, 1), 1e3), np.ones((1, 1)), none, none)],
        mtp_per_layer_loss_norm=True,
    )["eval/perplexity"] == math.inf  # fmt: skip


def test_the_line_of_an_evaluation_names_it_in_every_key() -> None:
    values = {"eval/lm_loss": 2.179, "eval/total_weights": 4096}
    assert evaluation_line(1490, values) == (
        "eval_step=1490 eval_lm_loss=2.179000 eval_total_weights=4096"
    )
