"""The command `ling-train`: settings in, one training process or one dataset out."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ling_trainer.compare_cli import add_compare_verb
from ling_trainer.config import RunConfig
from ling_trainer.convert_cli import add_convert_verbs
from ling_trainer.data_cli import add_data_verbs
from ling_trainer.ends import Ending, ExitCode, write_termination_message
from ling_trainer.environment import Environment, installed_version, read_environment
from ling_trainer.forward_cli import add_forward_verb
from ling_trainer.presets import PRESETS
from ling_trainer.run_settings import HELP, RUN_CONFIG, load_config, settings_help
from ling_trainer.schema import ConfigError
from ling_trainer.stop_signal import StopSignal


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
    parser.add_argument("--version", action="version", version=f"ling-train {installed_version()}")
    verbs = parser.add_subparsers(dest="command", metavar="VERB")

    run = verbs.add_parser(
        "run",
        help="train",
        description=HELP,
        epilog=settings_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument("arguments", nargs="*", metavar="FILE | key=value")
    run.set_defaults(call=_run)

    presets = verbs.add_parser("presets", help="list the presets, or print one as YAML")
    presets.add_argument("name", nargs="?", choices=sorted(PRESETS))
    presets.set_defaults(call=_presets)

    add_data_verbs(verbs)
    add_compare_verb(verbs)
    add_forward_verb(verbs)
    add_convert_verbs(verbs)
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


def _presets(options: argparse.Namespace) -> int:
    if options.name is None:
        print("\n".join(PRESETS))  # noqa: T201
    else:
        print(yaml.safe_dump(PRESETS[options.name](), sort_keys=False), end="")  # noqa: T201
    return ExitCode.FINISHED
