"""The verbs of `ling-train convert`: Hugging Face checkpoints to parameters, and back."""

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ling_trainer.ends import ExitCode

if TYPE_CHECKING:
    from ling_trainer.hf_files import HfTensors
    from ling_trainer.parameters import StoredParameters

DIFFERENT = 1
"""Exit code where a tensor is missing or left over."""
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_EXIT_CODES = """\
Exit codes: 0 done, 1 a tensor is missing, left over or misshapen, 2 arguments (OUT is not empty),
4 the checkpoint is damaged or of an architecture that is not supported, or OUT cannot be written.
OUT appears only when it is complete.
"""
_TO_LING = """\
Architectures: BailingMoeV2_5ForCausalLM (Ling 2.5, 2.6) and BailingMoeV2ForCausalLM (Ling 2.0);
float32, float16, bfloat16 and block-quantised fp8 (weight_scale_inv). A run starts from OUT with

  ling-train run OUT/model.yaml load_parameters_path=OUT key=value...

where model.yaml has the architecture; add the other settings to it, or give them as key=value.
"""
_TO_HF = """\
CHECKPOINT is a run's directory, its checkpoints/ or one step of them, or what hf-to-ling made.
"""


def add_convert_verbs(verbs: Any) -> None:
    """Add `convert` and its verbs to the parser's verbs (what add_subparsers returned)."""
    convert = verbs.add_parser("convert", help="read and write Hugging Face checkpoints")
    each = convert.add_subparsers(dest="convert_command", metavar="VERB", required=True)
    options: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    to_ling = each.add_parser(
        "hf-to-ling",
        help="a Hugging Face directory to parameters that a run can start from",
        description=_TO_LING,
        epilog=_EXIT_CODES,
        **options,
    )
    to_ling.add_argument("hf", type=Path, metavar="HF_DIR")
    to_ling.add_argument("out", type=Path, metavar="OUT")
    to_ling.add_argument(
        "--lightning-slope-layer-offset",
        type=int,
        choices=(0, 1),
        help="how the decay counts layers (the tensors do not say): 0 Megatron's, 1 Hugging "
        "Face's (default: what config.json says, else 1)",
    )
    to_ling.set_defaults(call=_run, convert=_hf_to_ling)
    to_hf = each.add_parser(
        "ling-to-hf",
        help="a checkpoint to a Hugging Face directory",
        description=_TO_HF,
        epilog=_EXIT_CODES,
        **options,
    )
    to_hf.add_argument("checkpoint", metavar="CHECKPOINT")
    to_hf.add_argument("out", type=Path, metavar="HF_OUT")
    to_hf.add_argument("--step", type=int, help="of a run's checkpoint (default: the newest)")
    to_hf.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="of the tensors; expert_bias stays float32 (default: as in the Hugging Face "
        "checkpoint that CHECKPOINT was converted from, float32 where there was none)",
    )
    to_hf.add_argument(
        "--max-shard-size", default="5GB", type=_bytes, metavar="SIZE", help="(default: 5GB)"
    )
    to_hf.set_defaults(call=_run, convert=_ling_to_hf)
    for verb in (to_ling, to_hf):
        verb.add_argument(
            "--report",
            action="store_true",
            help="then read both sides and list every tensor: shape, max difference, cosine",
        )


def _run(options: argparse.Namespace) -> int:
    # Only now: JAX takes seconds to import, and --help should not.
    from ling_trainer.convert import TensorsDifferError
    from ling_trainer.convert_files import OutputExistsError
    from ling_trainer.ends import EndRun

    try:
        return options.convert(options)
    except TensorsDifferError as error:
        for line in error.problems:
            print(line)  # noqa: T201
        return _refuse(f"{len(error.problems)} tensors do not fit; nothing was written", DIFFERENT)
    except OutputExistsError as error:
        return _refuse(error, ExitCode.CONFIGURATION)
    except EndRun as error:
        return _refuse(error.ending.message, error.ending.code)
    except (OSError, ValueError) as error:
        return _refuse(error, ExitCode.CHECKPOINT)


def _hf_to_ling(options: argparse.Namespace) -> int:
    from ling_trainer.convert_files import hf_to_ling
    from ling_trainer.hf_files import open_hf
    from ling_trainer.parameters import open_parameters

    hf = open_hf(options.hf)
    offset = options.lightning_slope_layer_offset
    overrides = {} if offset is None else {"lightning_slope_layer_offset": offset}
    hf_to_ling(hf, options.out, overrides=overrides)
    print(  # noqa: T201
        f"{options.out}: {len(hf.tensors)} tensors; a run starts from them with: ling-train run "
        f"{options.out}/model.yaml load_parameters_path={options.out} key=value..."
    )
    if not options.report:
        return ExitCode.FINISHED
    return _report(open_parameters(str(options.out)), hf.tensors)


def _ling_to_hf(options: argparse.Namespace) -> int:
    import numpy as np

    from ling_trainer.convert_files import ling_to_hf
    from ling_trainer.hf_files import open_hf
    from ling_trainer.parameters import open_parameters
    from ling_trainer.safetensors_file import DTYPES

    stored = open_parameters(options.checkpoint, step=options.step)
    types = {"bfloat16": DTYPES["BF16"], "float32": np.dtype(np.float32), None: None}
    ling_to_hf(
        stored, options.out, dtype=types[options.dtype], max_shard_bytes=options.max_shard_size
    )
    tensors = open_hf(options.out).tensors
    print(f"{options.out}: {len(tensors)} tensors of {stored.where}")  # noqa: T201
    return _report(stored, tensors) if options.report else ExitCode.FINISHED


def _report(stored: "StoredParameters", tensors: "HfTensors") -> int:
    from ling_trainer.convert_report import HEADING, compare

    print(HEADING)  # noqa: T201
    counts: dict[str, int] = {}
    for row in compare(stored.tensors(), tensors):
        print(row)  # noqa: T201
        counts[row.status] = counts.get(row.status, 0) + 1
    print(", ".join(f"{count} {status}" for status, count in counts.items()))  # noqa: T201
    return DIFFERENT if {"missing", "left over"} & set(counts) else ExitCode.FINISHED


def _bytes(text: str) -> int:
    """Read a size such as 5GB, of powers of 1000 as Hugging Face's own tools read it."""
    match = re.fullmatch(r"(\d+)\s*(|KB|MB|GB|TB)", text.strip().upper())
    if match is None or int(match[1]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write for example 5GB or 500MB")
    return int(match[1]) * _UNITS[match[2]]


def _refuse(problem: object, code: int) -> int:
    for line in str(problem).splitlines():
        print(f"ling-train: {line}", file=sys.stderr)  # noqa: T201
    return code
