"""`ling-train forward` names what it cannot compute, before it reads weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from ling_trainer import forward_file
from ling_trainer.cli import main
from ling_trainer.forward import ForwardProgram
from ling_trainer.forward_weights import open_hf_weights
from ling_trainer.schema import ConfigError

FOLDER = Path(__file__).parents[1] / "golden" / "ling" / "ling_v2_5_tiny"


def refused(
    capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str, hf: Path = FOLDER
) -> tuple[int, str]:
    weights = [] if "--checkpoint" in arguments else ["--hf", str(hf)]
    out = [] if "--out" in arguments else ["--out", str(folder / "out.safetensors")]
    code = main(["forward", *weights, *out, *arguments])
    assert not (folder / "out.safetensors").exists()
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("tokens", "segments", "problem"),
    [
        ([[0, 1, 256, 3]], None, "tokens.npy: tokens[0, 2]=256 is outside [0, vocab_size=256)"),
        ([[0, 1], [-1, 3]], None, "tokens.npy has rows of 2 tokens"),
        ([0, -1, 2], None, "tokens.npy: tokens[0, 1]=-1 is outside [0, vocab_size=256)"),
        ([[0.0, 1.0, 2.0]], None, "tokens.npy holds float64; tokens are integers"),
        ([[[0, 1, 2]]], None, "tokens.npy has shape [1, 1, 3]; tokens are [B, S] or [S]"),
        ([], None, "tokens.npy holds float64"),
        ([[0, 1, 2]], [[1, 1]], "segments.npy has shape [1, 2] and "),
        ([[0, 1, 2]], [[1, -1, 0]], "segments.npy: segment_ids[0, 1]=-1 is outside [0, 2^31)"),
        ([[0, 1, 2, 3]], [[5, 5, 0, 5]], "segment_ids[0] has document 5 in 2 pieces"),
        ([[0, 1, 2]], [[True, True, False]], "segments.npy holds bool; segment ids are integers"),
    ],
)
def test_arrays_that_are_no_tokens_are_refused_with_file_value_and_rule(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tokens: Any, segments: Any, problem: str
) -> None:
    np.save(tmp_path / "tokens.npy", tokens)
    arguments = ["--tokens", str(tmp_path / "tokens.npy")]
    if segments is not None:
        np.save(tmp_path / "segments.npy", segments)
        arguments += ["--segment-ids", str(tmp_path / "segments.npy")]
    code, message = refused(capsys, tmp_path, *arguments)
    assert code == 3
    assert problem in message


def test_files_that_cannot_be_used_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    np.savez(tmp_path / "tokens.npz", tokens=[[0, 1, 2]])
    np.save(tmp_path / "tokens.npy", [[0, 1, 2]])
    tokens = ("--tokens", str(tmp_path / "tokens.npy"))
    for arguments, expected, problem in (
        (("--tokens", str(tmp_path / "no.npy")), 3, "no.npy cannot be read as .npy"),
        (("--tokens", str(tmp_path / "tokens.npz")), 3, "tokens.npz holds several arrays"),
        ((*tokens, "--out", str(tmp_path / "no" / "o")), 2, f"{tmp_path / 'no'} is not a folder"),
        ((*tokens, "--out", str(tmp_path)), 2, f"{tmp_path} is a folder"),
        ((*tokens, "--step", "3"), 2, "--step 3 is of a run"),
        ((*tokens, "--checkpoint", str(tmp_path)), 4, "there is no checkpoint"),
    ):
        code, message = refused(capsys, tmp_path, *arguments)
        assert (code, problem in message) == (expected, True), message
    code, message = refused(capsys, tmp_path, *tokens, hf=tmp_path)
    assert (code, "config.json" in message) == (4, True)


def test_what_does_not_fit_is_refused_with_an_estimate_before_weights_are_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "tokens.npy", [[0, 1, 2]])
    tokens = ("--tokens", str(tmp_path / "tokens.npy"))
    monkeypatch.setattr(forward_file, "to_device", lambda _: pytest.fail("weights were read"))
    model = open_hf_weights(FOLDER).model
    weights = forward_file.weights_bytes(model)
    stored = load_file(FOLDER / "model.safetensors")
    assert weights == sum(tensor.nbytes for tensor in stored.values())

    # The weights alone, and three times as much with gradients.
    monkeypatch.setattr(forward_file, "compile_forward", lambda *_, **__: pytest.fail("compiled"))
    monkeypatch.setattr(forward_file, "available_memory", lambda: weights - 1)
    code, message = refused(capsys, tmp_path, *tokens)
    assert code == 2
    assert f"this needs about {weights / 2**30:.3g} GiB of memory" in message
    monkeypatch.setattr(forward_file, "available_memory", lambda: 3 * weights - 1)
    assert refused(capsys, tmp_path, *tokens, "--grads")[0] == 2

    # What the compiled program says it takes.
    program = ForwardProgram(call=pytest.fail, with_gradients=False, memory_bytes=2**40)
    monkeypatch.setattr(forward_file, "compile_forward", lambda *_, **__: program)
    code, message = refused(capsys, tmp_path, *tokens)
    assert (code, "this needs about 1.02e+03 GiB" in message) == (2, True)


def test_memory_is_the_machines_or_the_control_groups_whichever_is_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  9 kB\nMemAvailable:      2048 kB\n")
    monkeypatch.setattr(forward_file, "_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(forward_file, "_CGROUP", tmp_path)
    assert forward_file.available_memory() == 2048 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("100\n")
    assert forward_file.available_memory() == 2048 * 1024
    (tmp_path / "memory.max").write_text("1000\n")
    assert forward_file.available_memory() == 900
    (tmp_path / "meminfo").unlink()
    assert forward_file.available_memory() > 2**60


def test_a_disk_that_is_too_small_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="choose another disk"):
        forward_file.check_disk(tmp_path / "out", 2**60)
