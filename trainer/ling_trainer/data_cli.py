"""The verbs of `ling-train data`: text to datasets, and a look into them."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from ling_trainer.ends import ExitCode
from ling_trainer.run_settings import files_of, load_config
from ling_trainer.schema import ConfigError

_SHOW_HELP = """\
Settings are those of `run`; the preset is ling2 where they name none (so eod_mask_loss is true).
Each line is an object:
sample, dataset, documents, offsets, and sha256 of tokens, labels, loss_mask, position_ids as
int64, little-endian. --npz writes arrays of the same names.
"""


def add_data_verbs(verbs: Any) -> None:
    """Add `data` and its verbs to the parser's verbs (what add_subparsers returned)."""
    data = verbs.add_parser("data", help="prepare data").add_subparsers(
        dest="data_command", metavar="VERB", required=True
    )
    build = data.add_parser("build", help="tokenize text into a Megatron .bin/.idx pair")
    build.add_argument("--input", nargs="+", required=True, metavar="FILE", help="UTF-8 or JSONL")
    build.add_argument("--output", required=True, metavar="PREFIX", help="path without endings")
    build.add_argument("--jsonl-key", default="text", help="field of a JSON line (default: text)")
    build.add_argument("--no-eod", action="store_true", help="do not end documents")
    build.add_argument(
        "--tokenizer",
        metavar="FILE",
        help="a Hugging Face tokenizer.json (default: a token is a byte, 256 ends a document)",
    )
    build.add_argument(
        "--eod-token", metavar="TOKEN", help="token of --tokenizer that ends a document"
    )
    build.set_defaults(call=_build)

    show = data.add_parser(
        "show",
        help="print the documents and hashes of samples as JSON lines",
        description=_SHOW_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    show.add_argument("arguments", nargs="*", metavar="FILE | key=value")
    show.add_argument("--samples", default="0:10", metavar="A:B", help="which (default: 0:10)")
    show.add_argument("--split-name", default="train", choices=("train", "valid", "test"))
    show.add_argument(
        "--num-samples",
        metavar="N | epoch",
        help="samples the order is made for (default: steps x global_batch_size)",
    )
    show.add_argument("--npz", type=Path, metavar="FILE", help="also write the samples themselves")
    show.set_defaults(call=_show)


def _build(options: argparse.Namespace) -> int:
    from ling_trainer.data.build import build_dataset
    from ling_trainer.data.index_file import DataError
    from ling_trainer.data.tokenizer import ByteTokenizer, load_tokenizer

    given = options.eod_token is not None
    if options.tokenizer and given == options.no_eod:
        return _refuse_build("--tokenizer needs either --eod-token TOKEN or --no-eod")
    if given and not options.tokenizer:
        return _refuse_build("--eod-token needs --tokenizer; bytes are ended with id 256")
    try:
        if options.tokenizer:
            tokenizer = load_tokenizer(options.tokenizer, eod_token=options.eod_token)
        else:
            tokenizer = ByteTokenizer(eod_id=None) if options.no_eod else ByteTokenizer()
        report = build_dataset(
            options.input, options.output, jsonl_key=options.jsonl_key, tokenizer=tokenizer
        )
    except DataError as error:
        print(f"ling-train: {error}", file=sys.stderr)  # noqa: T201
        return ExitCode.DATA
    ended = "no document was ended" if report.eod_id is None else f"eod_id={report.eod_id}"
    print(  # noqa: T201
        f"{report.prefix}.bin and .idx: {report.documents} documents, {report.tokens} tokens"
        f" ({report.empty_documents} empty documents left out)\n"
        f"vocab_size >= {report.vocab_size}, {ended}"
        + ("" if options.tokenizer or report.eod_id is None else f", pad_id={report.eod_id}")
    )
    return ExitCode.FINISHED


def _refuse_build(problem: str) -> int:
    print(f"ling-train: {problem}", file=sys.stderr)  # noqa: T201
    return ExitCode.CONFIGURATION


def _show(options: argparse.Namespace) -> int:
    from ling_trainer.data.index_file import DataError, StorageError
    from ling_trainer.data.show import open_samples, parse_range, save_samples, show_samples

    # No architecture and no checkpoint is needed to look at data, but a whole configuration is.
    named = any(argument.startswith(("preset=", "model_name=")) for argument in options.arguments)
    preset = [] if named or len(files_of(options.arguments)) else ["preset=ling2"]
    given = [*preset, *options.arguments, "checkpoint.enable_checkpointing=false"]
    try:
        config = load_config(given, os.environ)
        dataset = open_samples(
            config, num_samples=options.num_samples, split_name=options.split_name
        )
        numbers = parse_range(options.samples, count=len(dataset))
        for line in show_samples(dataset, numbers, config.data):
            print(json.dumps(line))  # noqa: T201
        if options.npz:
            save_samples(options.npz, dataset, numbers, config.data)
    except (ConfigError, DataError, StorageError) as error:
        for line in str(error).splitlines():
            print(f"ling-train: {line}", file=sys.stderr)  # noqa: T201
        match error:
            case DataError():
                return ExitCode.DATA
            case StorageError():
                return ExitCode.RESTART
            case _:
                return ExitCode.CONFIGURATION
    return ExitCode.FINISHED
