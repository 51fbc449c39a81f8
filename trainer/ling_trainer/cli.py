"""The command `ling-train`: settings in, one training process or one dataset out."""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from ling_trainer.config import RunConfig
from ling_trainer.ends import Ending, ExitCode, write_termination_message
from ling_trainer.environment import Environment, read_environment
from ling_trainer.presets import PRESETS, Settings
from ling_trainer.schema import ConfigError, Schema, section_type
from ling_trainer.settings import load_yaml, parse_overrides, resolve
from ling_trainer.stop_signal import StopSignal

RUN_CONFIG = "LING_RUN_CONFIG"
_RUN_HELP = f"""\
Settings come from a preset, then FILE, then key=value arguments; later ones win.
FILE is YAML. In its place the environment variable {RUN_CONFIG} may hold the settings as JSON.
A key is a field's name, alone (steps=100) or with its section (loss.mtp_roll=plain).
"""


_SHOW_HELP = """\
Settings are those of `run`; the preset is ling2 where they name none (so eod_mask_loss is true).
Each line is an object:
sample, dataset, documents, offsets, and sha256 of tokens, labels, loss_mask, position_ids as
int64, little-endian. --npz writes arrays of the same names.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; training ends the process and does not return.

    Returns:
      The exit code (see ends.ExitCode).
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    # Bare `python -m ling_trainer`, with or without overrides, is `run`.
    if (not arguments and RUN_CONFIG in os.environ) or (arguments and "=" in arguments[0]):
        arguments.insert(0, "run")
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    # argparse takes settings on one side of the options only.
    if rest and (not hasattr(options, "arguments") or any(a.startswith("-") for a in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.arguments += rest
    if options.command is None:
        parser.print_help(sys.stderr)
        return ExitCode.CONFIGURATION
    return options.call(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ling-train", description=__doc__)
    parser.set_defaults(command=None)
    parser.add_argument("--version", action="version", version=f"ling-train {_version()}")
    verbs = parser.add_subparsers(dest="command", metavar="VERB")

    run = verbs.add_parser(
        "run",
        help="train",
        description=_RUN_HELP,
        epilog=settings_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument("arguments", nargs="*", metavar="FILE | key=value")
    run.set_defaults(call=_run)

    presets = verbs.add_parser("presets", help="list the presets, or print one as YAML")
    presets.add_argument("name", nargs="?", choices=sorted(PRESETS))
    presets.set_defaults(call=_presets)

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
    return parser


def _run(options: argparse.Namespace) -> int:
    signals = StopSignal()
    environment: Environment | None = None
    try:
        environment = read_environment(os.environ)
        signals.install(_early_end(environment))
        config = load_config(options.arguments, os.environ)
        _check_fault(config, environment)
    except ConfigError as error:
        return _refuse(error, environment)
    # Only now: JAX takes seconds to import, and a wrong setting should not.
    from ling_trainer.process import run

    run(config, environment, signals)


def load_config(arguments: Sequence[str], environ: Mapping[str, str]) -> RunConfig:
    """Resolve preset < FILE or LING_RUN_CONFIG < key=value arguments.

    Args:
      arguments: at most one FILE, which has no '=', and overrides.
      environ: may hold LING_RUN_CONFIG, then no FILE is taken.

    Raises:
      ConfigError: every problem, one a line.
    """
    files = _files(arguments)
    overrides = parse_overrides(argument for argument in arguments if "=" in argument)
    text = environ.get(RUN_CONFIG)
    if len(files) > 1 or (files and text is not None):
        other = RUN_CONFIG if text is not None else files[1]
        raise ConfigError(f"settings come from {files[0]} and from {other}; name one of them")
    if text is not None:
        return resolve(_json(text), overrides)
    if files:
        return resolve(load_yaml(_read(Path(files[0])), files[0]), overrides)
    return resolve(overrides)


def _files(arguments: Sequence[str]) -> list[str]:
    return [argument for argument in arguments if "=" not in argument]


def settings_help() -> str:
    """List every setting with its type, default and meaning."""
    lines = [f"presets: {', '.join(PRESETS)}", "", "settings:"]
    return "\n".join(lines + _setting_lines(RunConfig, ""))


def _setting_lines(schema: type[Schema], prefix: str) -> list[str]:
    lines: list[str] = []
    for name, field in schema.model_fields.items():
        section = section_type(field.annotation)
        if section:
            lines += ["", f"  {name}: {(section.__doc__ or '').strip().splitlines()[0]}"]
            lines += _setting_lines(section, f"{prefix}{name}.")
            continue
        default = "" if field.is_required() else f" = {json.dumps(field.default)}"
        lines.append(f"  {prefix}{name}{default}")
        if field.description:
            lines += [f"      {line.strip()}" for line in field.description.splitlines()]
    return lines


def _early_end(environment: Environment) -> Any:
    """Return what leaves a message when a signal comes before the first step."""

    def leave_message(code: int) -> None:
        ending = Ending(code=code, reason="Stopped", message="stopped before the first step")
        process = environment.group.process_id
        write_termination_message(ending, process=process, path=environment.termination_log)

    return leave_message


def _check_fault(config: RunConfig, environment: Environment) -> None:
    if config.fault.enabled and not environment.fault_injection_allowed:
        raise ConfigError(
            "fault.enabled=true: faults are injected only where the environment has "
            "LING_ALLOW_FAULT_INJECTION=1; set it, or fault.enabled=false"
        )


def _refuse(error: ConfigError, environment: Environment | None) -> int:
    """Print each problem, leave it for the operator, and return exit code 2."""
    for line in str(error).splitlines():
        print(f"ling-train: {line}", file=sys.stderr)  # noqa: T201
    ending = Ending(code=ExitCode.CONFIGURATION, reason="InvalidConfig", message=str(error))
    log = os.environ.get("LING_TERMINATION_LOG")
    write_termination_message(
        ending,
        process=environment.group.process_id if environment else 0,
        path=Path(log) if log else None,
    )
    return ExitCode.CONFIGURATION


def _json(text: str) -> Settings:
    try:
        loaded = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{RUN_CONFIG} is not JSON: {error}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"{RUN_CONFIG} holds a {type(loaded).__name__}; write an object")
    return loaded


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}; name a YAML file of settings"
        ) from None


def _presets(options: argparse.Namespace) -> int:
    if options.name is None:
        print("\n".join(PRESETS))  # noqa: T201
    else:
        print(yaml.safe_dump(PRESETS[options.name](), sort_keys=False), end="")  # noqa: T201
    return ExitCode.FINISHED


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
    from ling_trainer.data.index_file import DataError
    from ling_trainer.data.show import open_samples, parse_range, save_samples, show_samples

    # No architecture and no checkpoint is needed to look at data, but a whole configuration is.
    named = any(argument.startswith(("preset=", "model_name=")) for argument in options.arguments)
    preset = [] if named or len(_files(options.arguments)) else ["preset=ling2"]
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
    except (ConfigError, DataError) as error:
        for line in str(error).splitlines():
            print(f"ling-train: {line}", file=sys.stderr)  # noqa: T201
        data_is_bad = isinstance(error, DataError)
        return ExitCode.DATA if data_is_bad else ExitCode.CONFIGURATION
    return ExitCode.FINISHED


def _version() -> str:
    try:
        return metadata.version("ling-tpu")
    except metadata.PackageNotFoundError:
        return "unknown"
