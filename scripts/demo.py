"""The main job on one machine: train a tiny Ling2 on real text, then halt a run that diverges.

Builds a dataset from the standard library's own sources, trains `ling2_tiny` through the same
TrainingRun and the same decisions as in a cluster, plots the loss, and then runs a second object
whose loss turns NaN. Everything it writes is under demo/.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "demo"
BIN = Path(sys.executable).parent
NAN_STEP = 30


def say(text: str) -> None:
    """Print one line of the demo's own."""
    print(f"\n\033[1m==> {text}\033[0m" if sys.stdout.isatty() else f"\n==> {text}", flush=True)


def call(*command: str | Path, expect: int = 0, **environment: str) -> None:
    """Run a command of the product and insist on its exit code."""
    shown = " ".join(str(Path(c).name if Path(c).parent == BIN else c) for c in command)
    print(f"$ {shown[:160]}{' ...' if len(shown) > 160 else ''}", flush=True)
    done = subprocess.run(  # noqa: S603 - the product's own commands
        [str(part) for part in command], cwd=ROOT, env=os.environ | environment, check=False
    )
    if done.returncode != expect:
        sys.exit(f"error: exit code {done.returncode}, expected {expect}")


def build_dataset() -> float:
    """Turn the standard library's sources into a Megatron dataset; return its unigram entropy."""
    from ling_trainer.data.build import unigram_entropy

    prefix = DEMO / "data" / "stdlib"
    if not prefix.with_suffix(".idx").exists():
        library = Path(sysconfig.get_paths()["stdlib"])
        sources = sorted(p for p in library.rglob("*.py") if _is_plain(p, library))
        call(BIN / "ling-train", "data", "build", "--output", prefix, "--input", *sources)
    return unigram_entropy(prefix)


def _is_plain(path: Path, library: Path) -> bool:
    """Tell whether a source is the library's own prose: no packages, no tests, valid UTF-8."""
    parts = set(path.relative_to(library).parts)
    if parts & {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}:
        return False
    try:
        return bool(path.read_text(encoding="utf-8").strip())
    except UnicodeDecodeError:
        return False


def read_metrics(run: str) -> list[dict[str, float]]:
    """Return a run's metrics, one dictionary a step."""
    lines = (DEMO / "runs" / run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def plot_losses(run: str, entropy: float) -> Path:
    """Draw the run's losses against the entropy of single bytes."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    rows = read_metrics(run)
    steps = [row["step"] for row in rows]
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    axes.plot(steps, [row["learning/lm_loss"] for row in rows], label="lm_loss")
    axes.plot(steps, [row["learning/raw_mtp_loss"] for row in rows], label="raw_mtp_loss", lw=1)
    axes.axhline(entropy, color="grey", ls="--", lw=1, label="unigram entropy of the text")
    axes.set(xlabel="step", ylabel="nats per token", title="ling2_tiny on the standard library")
    axes.legend()
    target = DEMO / "loss.png"
    figure.savefig(target, dpi=120, bbox_inches="tight")
    return target


def diverging_object() -> Path:
    """Write the run's object again, under another name and with an injected NaN."""
    document = yaml.safe_load((ROOT / "manifests" / "ling2-run.yaml").read_text())
    document["metadata"]["name"] = "ling2-nan"
    document["spec"]["run"]["fault"] = {
        "enabled": True,
        "faultKind": "nan_loss",
        "faultStep": NAN_STEP,
    }
    target = DEMO / "ling2-nan.yaml"
    target.write_text(yaml.safe_dump(document, sort_keys=False))
    return target


def check_halt() -> None:
    """Insist that the halt is on record, at the step and for the reason of the fault."""
    document = json.loads((DEMO / "runs" / "ling2-nan" / "trainingrun.json").read_text())
    halt = document["status"]["halt"]
    if (halt["reason"], halt["step"]) != ("NonFiniteLoss", NAN_STEP):
        sys.exit(f"error: the halt on record is {halt}")


def main() -> None:
    """Run the demo."""
    started = time.monotonic()
    shutil.rmtree(DEMO / "runs", ignore_errors=True)
    (DEMO / "data").mkdir(parents=True, exist_ok=True)
    say("1/3 a dataset from the Python standard library's own sources")
    entropy = build_dataset()
    print(f"unigram entropy of the text: {entropy:.3f} nats per byte")

    say("2/3 pre-train ling2_tiny: manifests/ling2-run.yaml, on this machine")
    call(BIN / "ling", "run", "manifests/ling2-run.yaml", "--local")
    rows = read_metrics("ling2-run")
    final = sum(row["learning/lm_loss"] for row in rows[-10:]) / 10
    picture = plot_losses("ling2-run", entropy)
    print(f"lm_loss {rows[0]['learning/lm_loss']:.3f} -> {final:.3f} (mean of the last 10 steps)")
    if final >= entropy:
        sys.exit(f"error: the loss did not fall below the unigram entropy {entropy:.3f}")

    say(f"3/3 the same run with a NaN injected at step {NAN_STEP}: it must halt and say why")
    call(
        BIN / "ling",
        "run",
        diverging_object(),
        "--local",
        expect=1,
        LING_ALLOW_FAULT_INJECTION="1",
    )

    check_halt()

    say(f"done in {time.monotonic() - started:.0f} s")
    for what, path in (
        ("loss plot", picture),
        ("metrics", DEMO / "runs" / "ling2-run" / "metrics.jsonl"),
        ("checkpoints", DEMO / "runs" / "ling2-run" / "checkpoints"),
        ("the halted run's object", DEMO / "runs" / "ling2-nan" / "trainingrun.json"),
    ):
        print(f"{what + ':':<26}{path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
