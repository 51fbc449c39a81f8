"""The command `ling`, also `kubectl ling`: its arguments, exit codes, and local runs."""

import argparse
import asyncio
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ling_operator import cluster_commands, remote
from ling_operator.api import Phase, TrainingRun
from ling_operator.connection import NoClusterError
from ling_operator.display import Display, print_error, print_line, wants_colour
from ling_operator.jobset import build_jobset
from ling_operator.listing import parse_phases
from ling_operator.local import Outcome, run_local
from ling_operator.manifest import load_manifest
from ling_operator.rest import ApiError, JsonObject
from ling_operator.rundir import HeldError
from ling_trainer.schema import ConfigError

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
_LAST_LINES = 15


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; exit 0 if it did what it says, 1 if not, 2 for a wrong input."""
    options = _parse(arguments)
    options.colour = wants_colour(sys.stdout, os.environ)
    try:
        code = options.command(options) or OK
        sys.stdout.flush()
    except ConfigError as error:
        code = _complain(str(error), USAGE)
    except ApiError as error:
        code = _complain(remote.explain(error), FAILED)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        code = _leave_the_pipe()
    except (NoClusterError, HeldError, remote.NothingThereError, OSError) as error:
        code = _complain(str(error), FAILED)
    sys.exit(code)


def _leave_the_pipe() -> int:
    """Whoever read our output has seen enough; Python would complain when it flushes."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return FAILED


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse, with key=value settings anywhere after the file, options between them or not."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and ("settings" not in options or any(item.startswith("-") for item in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.settings = [*options.settings, *rest]
    return options


def _parser() -> argparse.ArgumentParser:
    plugin = Path(sys.argv[0]).name == "kubectl-ling"
    parser = argparse.ArgumentParser(
        prog="kubectl ling" if plugin else "ling",
        description="Run and watch pre-training runs, here or on a cluster.",
        epilog="Exit codes: 0 done, 1 not done, 2 wrong input, 130 interrupted.",
    )
    parser.add_argument("--version", action="version", version=f"ling {_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    cluster = argparse.ArgumentParser(add_help=False)
    cluster.add_argument("--kubeconfig", help="default: KUBECONFIG, ~/.kube/config, in-cluster")
    cluster.add_argument("--context", help="of the kubeconfig; default: its current one")
    cluster.add_argument("-n", "--namespace", help="default: the context's")
    output = argparse.ArgumentParser(add_help=False)
    output.add_argument(
        "-o",
        "--output",
        choices=["json", "yaml", "wide", "name"],
        help="whole objects, more columns, or names alone",
    )

    run = commands.add_parser("run", parents=[cluster], help="run a TrainingRun of a file")
    _add_file(run)
    run.add_argument("--local", action="store_true", help="on this machine, without a cluster")
    run.add_argument(
        "--force-conflicts", action="store_true", help="take over fields that others have set"
    )
    run.set_defaults(command=_run)
    render = commands.add_parser("render", help="print the JobSet of a file")
    _add_file(render)
    render.add_argument("-o", "--output", choices=["json", "yaml"], default="yaml")
    render.set_defaults(command=_render)
    _add_list(commands.add_parser("list", parents=[cluster, output], help="list runs"))
    _add_logs(commands.add_parser("logs", parents=[cluster], help="print a process's output"))
    debug = commands.add_parser(
        "debug", parents=[cluster], help="collect all about a run in an archive, without secrets"
    )
    debug.add_argument("name")
    debug.add_argument(
        "-o",
        "--output",
        type=Path,
        help="archive (.tar.gz) or folder to make; default: NAME-debug-TIME.tar.gz",
    )
    debug.set_defaults(command=cluster_commands.debug)
    for name, command, parents, text in (
        ("get", cluster_commands.get_run, [cluster, output], "show one run in detail"),
        ("suspend", cluster_commands.suspend, [cluster], "pause a run: set spec.suspend"),
        (
            "resume",
            cluster_commands.resume,
            [cluster],
            "go on: unset spec.suspend, or raise spec.attempt",
        ),
    ):
        sub = commands.add_parser(name, parents=parents, help=text)
        sub.add_argument("name")
        sub.set_defaults(command=command)
    return parser


def _version() -> str:
    try:
        return version("ling-tpu")
    except PackageNotFoundError:
        return "(not installed)"


def _add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="YAML file of one TrainingRun")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="override spec.run")
    parser.add_argument("--attempt", type=int, help="override spec.attempt")


def _add_list(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-A", "--all-namespaces", action="store_true")
    parser.add_argument(
        "--filter-by-status",
        type=_or_usage(parse_phases),
        metavar="STATUS,...",
        help="phases, or EVERYTHING, FINISHED, SUCCESSFUL",
    )
    parser.add_argument(
        "--filter-by-name",
        "--filter-by-job",
        type=_or_usage(re.compile),
        default=re.compile(""),
        metavar="REGEX",
        help="found anywhere in the name",
    )
    parser.add_argument("-w", "--watch", action="store_true", help="go on with what changes")
    parser.add_argument("--no-headers", action="store_true")
    parser.set_defaults(command=cluster_commands.list_runs)


def _add_logs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--process", type=_count, default=0, help="number over all slices; default: 0"
    )
    which.add_argument("--all", action="store_true", help="every process, with its number")
    parser.add_argument("--tail", type=_count, help="last lines only")
    parser.add_argument(
        "-f", "--follow", action="store_true", help="until the run has ended, over restarts"
    )
    parser.set_defaults(command=cluster_commands.logs)


def _or_usage[T](read: Callable[[str], T]) -> Callable[[str], T]:
    """Let a wrong value end as wrong usage, with what is wrong about it."""

    def parse(text: str) -> T:
        try:
            return read(text)
        except (ValueError, re.error) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def _count(text: str) -> int:
    if not text.isdecimal():
        msg = f"{text!r} is no number"
        raise argparse.ArgumentTypeError(msg)
    return int(text)


def _run(options: argparse.Namespace) -> int:
    manifest = load_manifest(options.file, options.settings, attempt=options.attempt)
    if options.local:
        return _run_local(options, manifest)
    cluster_commands.apply(options, manifest)
    return OK


def _run_local(options: argparse.Namespace, manifest: JsonObject) -> int:
    spec: dict[str, Any] = manifest["spec"]
    with Display(sys.stdout) as display:
        display.say(
            f"Running {manifest['metadata']['name']} on this machine, without image "
            f"{spec.get('image')} and what only a cluster has. Ctrl-C checkpoints and stops."
        )
        if spec.get("tpu") is not None:
            display.say("spec.tpu becomes one process with the devices of this machine.")
        outcome = asyncio.run(run_local(manifest, environment=dict(os.environ), display=display))
    return _report(outcome, shlex.join(["ling", "run", str(options.file), *options.settings]))


def _report(outcome: Outcome, command: str) -> int:
    """Say how a local run came to rest, and how to go on."""
    status, directory = outcome.run.status, outcome.directory
    again = f"{command} --local"
    next_attempt = f"{again} --attempt {outcome.run.spec.attempt + 1}"
    match status.phase:
        case Phase.COMPLETE:
            print_line(f"Complete at step {outcome.steps}. Everything is in {directory}.")
            return OK
        case Phase.HALTED if status.halt is not None:
            print_line(f"Halted: {status.halt.reason}. {status.halt.message}")
            print_line(
                "Remove the cause, then raise spec.attempt to go on from a good checkpoint: "
                f"{next_attempt}"
            )
            return FAILED
        case Phase.SUSPENDED:
            print_line(f"Suspended at step {status.health.highest_step}. To go on: {again}")
            return FAILED
        case _:
            return _report_failure(outcome, next_attempt)


def _report_failure(outcome: Outcome, next_attempt: str) -> int:
    status = outcome.run.status
    reasons = [f"{c.reason}: {c.message}" for c in status.conditions if c.type == "Failed"]
    print_line(f"{status.phase}: {' '.join(reasons)} To try again: {next_attempt}")
    if outcome.log is not None:
        lines = outcome.log.read_text("utf-8", "replace").splitlines()[-_LAST_LINES:]
        print_line(f"Last lines of {outcome.log}:")
        for line in lines:
            print_line(f"  {line}")
    return USAGE if any("ConfigurationError" in reason for reason in reasons) else FAILED


def _render(options: argparse.Namespace) -> None:
    manifest = load_manifest(options.file, options.settings, attempt=options.attempt)
    run = TrainingRun.parse(manifest)
    jobset = build_jobset(run, attempt=run.spec.attempt, restore_before_step=None)
    cluster_commands.print_object(jobset, options.output)


def _complain(message: str, code: int) -> int:
    for line in message.splitlines():
        print_error(line)
    return code


if __name__ == "__main__":
    main()
