"""`ling-train forward`: files in, a file out, against numbers of the public reference code."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from safetensors.numpy import load_file, save_file

from ling_trainer.checkpoint import Checkpoints
from ling_trainer.cli import main
from ling_trainer.config import CheckpointConfig
from ling_trainer.convert import config_from_hf, hf_to_params
from ling_trainer.data.order import SampleOrder
from ling_trainer.model_config import ModelConfig
from ling_trainer.optimizer import make_optimizer
from ling_trainer.optimizer_config import OptimizerConfig
from ling_trainer.run_record import RunRecord
from ling_trainer.step import init_state

FOLDER = Path(__file__).parents[1] / "golden" / "ling" / "ling_v2_5_tiny"

LOGITS = 2e-5  # the fixture's: real mistakes move logits by 4e-5 and more
LOSS = 5e-6
HEADS = (("logits", "token_losses"), ("mtp_logits_1", "mtp_token_losses_1"))


@pytest.fixture(scope="module")
def golden() -> SimpleNamespace:
    """Two rows of 68 and 29 tokens, padded to 68, and what the reference makes of them."""
    return SimpleNamespace(
        **load_file(FOLDER / "expected.safetensors"),
        facts=json.loads((FOLDER / "expected.json").read_text()),
        variants=load_file(FOLDER / "variants.safetensors"),
    )


@pytest.fixture(scope="module")
def forward(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, np.ndarray]]:
    """Run the verb on arrays and return what it wrote."""

    def run(
        tokens: np.ndarray, segment_ids: np.ndarray | None, *arguments: str
    ) -> dict[str, np.ndarray]:
        folder = tmp_path_factory.mktemp("forward")
        np.save(folder / "tokens.npy", tokens)
        options = [
            "--tokens",
            str(folder / "tokens.npy"),
            "--out",
            str(folder / "out.safetensors"),
        ]
        if segment_ids is not None:
            np.save(folder / "segments.npy", segment_ids)
            options += ["--segment-ids", str(folder / "segments.npy")]
        named = {"--checkpoint", "--hf"} & set(arguments)
        weights = [] if named else ["--hf", str(FOLDER)]
        assert main(["forward", *weights, *options, *arguments]) == 0
        assert sorted(path.name for path in folder.iterdir())[0] == "out.safetensors"
        return load_file(folder / "out.safetensors")

    return run


@pytest.fixture(scope="module")
def padded(golden: SimpleNamespace, forward: Callable[..., Any]) -> dict[str, np.ndarray]:
    return forward(golden.input_ids, golden.attention_mask)


@pytest.fixture(scope="module")
def packed(golden: SimpleNamespace, forward: Callable[..., Any]) -> dict[str, np.ndarray]:
    """Both documents in one row, with gradients; then each alone in a padded row.

    Every token is there twice, so means and gradients are the golden's.
    """
    (long, short), (n, m) = golden.input_ids, golden.attention_mask.sum(1)
    tokens = np.full((3, n + m), 255)
    tokens[0], tokens[1, :n], tokens[2, :m] = [*long[:n], *short[:m]], long[:n], short[:m]
    segments = np.zeros((3, n + m), np.int64)
    segments[0], segments[1, :n], segments[2, :m] = [7] * n + [2] * m, 1, 1
    return forward(tokens, segments, "--grads", "--mtp-roll", "segment")


def token_losses(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Cross-entropy in float64, written again."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(-1, keepdims=True)
    picked = np.take_along_axis(shifted, targets[..., None], -1)[..., 0]
    return np.log(np.exp(shifted).sum(-1)) - picked


def test_logits_of_padded_rows_equal_the_golden(
    golden: SimpleNamespace, padded: dict[str, np.ndarray], show_golden: Callable[..., None]
) -> None:
    real = golden.attention_mask == 1
    errors = [
        np.abs(padded["logits"] - golden.logits)[real].max(),
        np.abs(padded["mtp_logits_1"] - golden.mtp_logits)[real].max(),
    ]
    cases = f"forward: {real.sum()} x 256 logits, main and mtp"
    show_golden("ling_v2_5_tiny", cases=cases, worst=max(errors), tolerance=LOGITS)
    assert max(errors) <= LOGITS


def test_token_losses_are_the_golden_ones_and_0_where_the_target_is_padding(
    golden: SimpleNamespace, padded: dict[str, np.ndarray]
) -> None:
    for ahead, (logits, losses) in enumerate(HEADS, start=1):
        found, length = padded[losses], 68 - ahead
        assert found.shape == (2, length)
        real = golden.attention_mask[:, ahead:] == 1
        assert not found[~real].any()
        wanted = token_losses(padded[logits][:, :length], golden.input_ids[:, ahead:])
        np.testing.assert_allclose(found[real], wanted[real], rtol=1e-5, atol=1e-6)
        name = ("lm", "mtp")[ahead - 1]
        assert real.sum() == golden.facts[f"{name}_tokens"]
        mean = found.sum(dtype=np.float64) / real.sum()
        assert abs(mean - golden.facts[f"{name}_loss"]) <= LOSS


def test_the_file_holds_what_the_help_says_and_nothing_else(
    padded: dict[str, np.ndarray], golden: SimpleNamespace
) -> None:
    assert set(padded) == {name for names in HEADS for name in names}
    assert {array.dtype for array in padded.values()} == {np.dtype(np.float32)}
    assert padded["logits"].shape == padded["mtp_logits_1"].shape == golden.logits.shape


@pytest.mark.slow
def test_packed_documents_give_the_golden_logits_of_separate_rows(
    golden: SimpleNamespace, packed: dict[str, np.ndarray], show_golden: Callable[..., None]
) -> None:
    n, m = golden.attention_mask.sum(1)
    places = [(0, 0, slice(0, n)), (1, 0, slice(n, n + m)), (0, 1, slice(n)), (1, 2, slice(m))]
    worst = 0.0
    for document, row, span in places:
        count = span.stop - (span.start or 0)
        for name, wanted, left_out in (
            ("logits", golden.logits, 0),
            # The reference reads its padding token after a short row; here it is token 0.
            ("mtp_logits_1", golden.mtp_logits, int(document == 1)),
        ):
            found = packed[name][row, span][: count - left_out]
            worst = max(worst, np.abs(found - wanted[document, : count - left_out]).max())
    cases = "forward: packed and padded rows, main and mtp"
    show_golden("ling_v2_5_tiny", cases=cases, worst=worst, tolerance=LOGITS)
    assert worst <= LOGITS
    np.testing.assert_allclose(
        packed["mtp_logits_1"][0, :n], packed["mtp_logits_1"][1, :n], atol=LOGITS
    )


@pytest.mark.slow
def test_no_target_is_in_the_next_document(
    golden: SimpleNamespace, packed: dict[str, np.ndarray]
) -> None:
    n, m = golden.attention_mask.sum(1)
    for ahead, (_, losses) in enumerate(HEADS, start=1):
        assert np.flatnonzero(packed[losses][0] == 0).tolist() == list(range(n - ahead, n))
        np.testing.assert_allclose(
            packed[losses][0, n:], packed[losses][2, : m - ahead], rtol=1e-5, atol=1e-6
        )


@pytest.mark.slow
def test_gradients_of_every_tensor_have_the_golden_statistics(
    golden: SimpleNamespace, packed: dict[str, np.ndarray], show_golden: Callable[..., None]
) -> None:
    gradients = {
        name.removeprefix("grads/"): g for name, g in packed.items() if name.startswith("grads/")
    }
    stats = golden.facts["grad_stats_l2_sum_proj"]
    assert set(gradients) == set(stats)
    sums, norms = 0.0, 0.0
    for name, (l2, total, projection) in stats.items():
        g = gradients[name].astype(np.float64).ravel()
        wave = np.cos(0.7 * np.arange(g.size) + 0.3)
        sums = max(sums, abs(g.sum() - total) / l2, abs(g @ wave - projection) / l2)
        norms = max(norms, abs(np.linalg.norm(g) - l2) / l2)
    cases = f"forward: {len(stats)} gradients"
    show_golden("ling_v2_5_tiny", cases=f"{cases}: sum, projection", worst=sums, tolerance=1e-5)
    show_golden("ling_v2_5_tiny", cases=f"{cases}: L2", worst=norms, tolerance=1e-4)
    assert sums <= 1e-5
    assert norms <= 1e-4
    for name, gradient in load_file(FOLDER / "grads.safetensors").items():
        np.testing.assert_allclose(gradients[name], gradient, rtol=1e-4, atol=2e-6)


@pytest.mark.slow
def test_logits_of_grouped_query_attention_equal_the_golden(
    forward: Callable[..., Any], show_golden: Callable[..., None]
) -> None:
    folder = FOLDER.parent / "ling_v2_tiny"
    golden = SimpleNamespace(**load_file(folder / "expected.safetensors"))
    found = forward(golden.input_ids, golden.attention_mask, "--hf", str(folder))
    real = golden.attention_mask == 1
    errors = [
        np.abs(found["logits"] - golden.logits)[real].max(),
        np.abs(found["mtp_logits_1"] - golden.mtp_logits)[real].max(),
    ]
    cases = f"forward: {real.sum()} x 256 logits, main and mtp"
    show_golden("ling_v2_tiny", cases=cases, worst=max(errors), tolerance=LOGITS)
    assert max(errors) <= LOGITS


@pytest.mark.slow
def test_without_multi_token_prediction_there_is_only_the_language_model(
    golden: SimpleNamespace, forward: Callable[..., Any], tmp_path: Path
) -> None:
    tensors = load_file(FOLDER / "model.safetensors")
    kept = {name: t for name, t in tensors.items() if not name.startswith("model.layers.4.")}
    save_file(kept, tmp_path / "model.safetensors")
    config = json.loads((FOLDER / "config.json").read_text())
    text = json.dumps(config | {"num_nextn_predict_layers": 0})
    (tmp_path / "config.json").write_text(text)
    found = forward(golden.input_ids, golden.attention_mask, "--hf", str(tmp_path))
    assert set(found) == {"logits", "token_losses"}
    real = golden.attention_mask == 1
    assert np.abs(found["logits"] - golden.logits)[real].max() <= LOGITS


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden's weights as the newer checkpoint of a run whose decay is Megatron's."""
    settings = config_from_hf(json.loads((FOLDER / "config.json").read_text()))
    model = ModelConfig.model_validate(settings | {"lightning_slope_layer_offset": 0})
    params, router_bias = hf_to_params(load_file(FOLDER / "model.safetensors"), model)
    params = jax.tree.map(jnp.asarray, params)
    tx = make_optimizer(OptimizerConfig(learning_rate=1e-3))
    state = init_state(params, jnp.asarray(router_bias), tx)
    record = RunRecord(
        attempt=1,
        sample_order=SampleOrder((40,)),
        identity={f"model.{name}": value for name, value in model.model_dump().items()},
        settings={"loss": {"mtp_roll": "plain", "mtp_loss_scaling_factor": 0.5}},
    )
    directory = tmp_path_factory.mktemp("run")
    checkpoints = Checkpoints(epath.Path(directory / "checkpoints"), CheckpointConfig())
    checkpoints.save(3, jax.tree.map(jnp.zeros_like, state), record)
    checkpoints.save(4, state, record)
    checkpoints.wait()
    return directory


@pytest.mark.slow
def test_a_runs_newest_checkpoint_is_computed_as_the_run_does(
    golden: SimpleNamespace,
    forward: Callable[..., Any],
    run_directory: Path,
    capsys: pytest.CaptureFixture[str],
    show_golden: Callable[..., None],
) -> None:
    found = forward(golden.input_ids, golden.attention_mask, "--checkpoint", str(run_directory))
    real = golden.attention_mask == 1
    errors = [
        np.abs(found[ours] - golden.variants[f"{theirs}_slope_zero_based"])[real].max()
        for ours, theirs in (("logits", "logits"), ("mtp_logits_1", "mtp_logits"))
    ]
    cases = "forward: a run's checkpoint, slope offset 0"
    show_golden("ling_v2_5_tiny", cases=cases, worst=max(errors), tolerance=LOGITS)
    assert max(errors) <= LOGITS
    said = capsys.readouterr().out
    assert "mtp_loss_scaling_factor=0.5 mtp_roll=plain lightning_slope_layer_offset=0" in said
    means = [
        found[losses].sum(dtype=np.float64) / (golden.attention_mask[:, ahead:]).sum()
        for ahead, (_, losses) in enumerate(HEADS, start=1)
    ]
    assert f"total_loss={means[0] + 0.5 * means[1]:.6g}"[:17] in said
    assert f"lm_loss={means[0]:.5g}" in said
    assert "tokens=95" in said
