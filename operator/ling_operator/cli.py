"""The command `ling`: run, list, get, suspend, resume, render, logs."""

import argparse
import asyncio
import json
import os
import shlex
import sys
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ling_operator import remote
from ling_operator.api import Phase, TrainingRun
from ling_operator.connection import NoClusterError, discover
from ling_operator.display import Display
from ling_operator.jobset import build_jobset
from ling_operator.local import Outcome, run_local
from ling_operator.manifest import dump_yaml, load_manifest
from ling_operator.rest import ApiError, JsonObject, RestClient
from ling_operator.rundir import HeldError
from ling_trainer.schema import ConfigError

OK, FAILED, USAGE = 0, 1, 2
_LAST_LINES = 15
_LIST_COLUMNS = ("NAMESPACE", "NAME", "PHASE", "STEP", "TARGET", "LOSS", "HEALTH", "AGE")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; exit 0 if it did what it says, 1 if not, 2 for a wrong input."""
    options = _parse(arguments)
    try:
        code = options.command(options)
    except ConfigError as error:
        code = _complain(str(error), USAGE)
    except (ApiError, NoClusterError, HeldError, remote.NothingThereError, OSError) as error:
        code = _complain(str(error), FAILED)
    sys.exit(code)


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
    parser = argparse.ArgumentParser(
        prog="ling", description="Run and watch pre-training runs, here or on a cluster."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    cluster = argparse.ArgumentParser(add_help=False)
    cluster.add_argument("--kubeconfig", help="default: KUBECONFIG, ~/.kube/config, in-cluster")
    cluster.add_argument("-n", "--namespace", help="default: the context's")
    output = argparse.ArgumentParser(add_help=False)
    output.add_argument("-o", "--output", choices=["json", "yaml"], help="print whole objects")

    run = commands.add_parser("run", parents=[cluster], help="run a TrainingRun of a file")
    _add_file(run)
    run.add_argument("--local", action="store_true", help="on this machine, without a cluster")
    run.set_defaults(command=_run)
    render = commands.add_parser("render", parents=[output], help="print the JobSet of a file")
    _add_file(render)
    render.set_defaults(command=_render)
    runs = commands.add_parser("list", parents=[cluster, output], help="list runs")
    runs.add_argument("-A", "--all-namespaces", action="store_true")
    runs.set_defaults(command=_list)
    for name, command, parents, text in (
        ("get", _get, [cluster, output], "show one run and its conditions"),
        ("suspend", _suspend, [cluster], "pause a run: set spec.suspend"),
        ("resume", _resume, [cluster], "go on: unset spec.suspend, or raise spec.attempt"),
        ("logs", _logs, [cluster], "print the output of a process"),
    ):
        sub = commands.add_parser(name, parents=parents, help=text)
        sub.add_argument("name")
        sub.set_defaults(command=command)
        if command is _logs:
            sub.add_argument("--process", type=int, default=0, help="default: 0")
            sub.add_argument("--tail", type=int, help="last lines only")
    return parser


def _add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="YAML file of one TrainingRun")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="override spec.run")
    parser.add_argument("--attempt", type=int, help="override spec.attempt")


def _run(options: argparse.Namespace) -> int:
    manifest = load_manifest(options.file, options.settings, attempt=options.attempt)
    if options.local:
        return _run_local(options, manifest)

    async def apply(client: RestClient, namespace: str) -> int:
        applied = await remote.apply(client, manifest, namespace)
        metadata = applied["metadata"]
        _say(f"trainingrun {metadata['namespace']}/{metadata['name']} applied")
        return OK

    return _on_cluster(options, apply)


def _run_local(options: argparse.Namespace, manifest: JsonObject) -> int:
    spec = manifest["spec"]
    with Display(sys.stdout) as display:
        display.say(
            f"Running {manifest['metadata']['name']} on this machine, without image "
            f"{spec['image']} and what only a cluster has. Ctrl-C checkpoints and stops."
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
            _say(f"Complete at step {outcome.steps}. Everything is in {directory}.")
            return OK
        case Phase.HALTED if status.halt is not None:
            _say(f"Halted: {status.halt.reason}. {status.halt.message}")
            _say(
                "Remove the cause, then raise spec.attempt to go on from a good checkpoint: "
                f"{next_attempt}"
            )
            return FAILED
        case Phase.SUSPENDED:
            _say(f"Suspended at step {status.health.highest_step}. To go on: {again}")
            return FAILED
        case _:
            return _report_failure(outcome, next_attempt)


def _report_failure(outcome: Outcome, next_attempt: str) -> int:
    status = outcome.run.status
    reasons = [f"{c.reason}: {c.message}" for c in status.conditions if c.type == "Failed"]
    _say(f"{status.phase}: {' '.join(reasons)} To try again: {next_attempt}")
    if outcome.log is not None:
        lines = outcome.log.read_text("utf-8", "replace").splitlines()[-_LAST_LINES:]
        _say(f"Last lines of {outcome.log}:")
        for line in lines:
            _say(f"  {line}")
    return USAGE if any("ConfigurationError" in reason for reason in reasons) else FAILED


def _render(options: argparse.Namespace) -> int:
    manifest = load_manifest(options.file, options.settings, attempt=options.attempt)
    run = TrainingRun.parse(manifest)
    jobset = build_jobset(run, attempt=run.spec.attempt, restore_before_step=None)
    _print_object(jobset, options.output or "yaml")
    return OK


def _list(options: argparse.Namespace) -> int:
    async def find(client: RestClient, namespace: str) -> int:
        runs = await remote.find_all(client, None if options.all_namespaces else namespace)
        if options.output:
            body = {"apiVersion": "v1", "kind": "List", "items": runs}
            _print_object(body, options.output)
            return OK
        rows = [_row(run) for run in runs]
        if not rows:
            print("No TrainingRuns found.", file=sys.stderr)  # noqa: T201 - the command's output
            return OK
        _print_table([_LIST_COLUMNS, *rows], skip=0 if options.all_namespaces else 1)
        return OK

    return _on_cluster(options, find)


def _get(options: argparse.Namespace) -> int:
    async def show(client: RestClient, namespace: str) -> int:
        run = await remote.get(client, namespace, options.name)
        if options.output:
            _print_object(run, options.output)
            return OK
        _print_table([_LIST_COLUMNS, _row(run)], skip=1)
        conditions = run.get("status", {}).get("conditions", [])
        rows = [(c["type"], c["status"], c["reason"], c.get("message", "")) for c in conditions]
        _say("")
        _print_table([("CONDITION", "STATUS", "REASON", "MESSAGE"), *rows], skip=0)
        return OK

    return _on_cluster(options, show)


def _suspend(options: argparse.Namespace) -> int:
    return _edit(options, remote.suspend)


def _resume(options: argparse.Namespace) -> int:
    return _edit(options, remote.resume)


def _edit(
    options: argparse.Namespace, edit: Callable[[RestClient, str, str], Awaitable[str]]
) -> int:
    async def act(client: RestClient, namespace: str) -> int:
        said = await edit(client, namespace, options.name)
        _say(f"trainingrun {namespace}/{options.name}: {said}")
        return OK

    return _on_cluster(options, act)


def _logs(options: argparse.Namespace) -> int:
    async def show(client: RestClient, namespace: str) -> int:
        process, tail = options.process, options.tail
        text = await remote.log(client, namespace, options.name, process=process, tail=tail)
        sys.stdout.write(text)
        return OK

    return _on_cluster(options, show)


def _on_cluster(
    options: argparse.Namespace, command: Callable[[RestClient, str], Awaitable[int]]
) -> int:
    connection = discover(options.kubeconfig)

    async def connect() -> int:
        async with RestClient(connection) as client:
            return await command(client, options.namespace or connection.namespace)

    return asyncio.run(connect())


def _row(run: JsonObject) -> tuple[str, ...]:
    metadata, status = run["metadata"], run.get("status", {})
    training: dict[str, Any] = status.get("training", {})
    conditions: list[dict[str, str]] = status.get("conditions", [])
    healthy = next((c["status"] for c in conditions if c["type"] == "Healthy"), "Unknown")
    return (
        metadata["namespace"],
        metadata["name"],
        status.get("phase", Phase.PENDING),
        str(training.get("step") or "-"),
        str(training.get("targetSteps") or "-"),
        str(training.get("loss") or "-"),
        healthy,
        _age(metadata["creationTimestamp"]),
    )


def _age(created: str) -> str:
    seconds = int((datetime.now(UTC) - datetime.fromisoformat(created)).total_seconds())
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{max(seconds, 0)}s"


def _print_table(rows: Sequence[tuple[str, ...]], *, skip: int) -> None:
    widths = [max(map(len, column)) + 3 for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        _say("".join(cells[skip:]).rstrip())


def _print_object(value: JsonObject, form: str) -> None:
    _say(json.dumps(value, indent=2) if form == "json" else dump_yaml(value).rstrip())


def _say(text: str) -> None:
    print(text)  # noqa: T201 - the command's output


def _complain(message: str, code: int) -> int:
    for line in message.splitlines():
        print(f"ling: {line}", file=sys.stderr)  # noqa: T201 - the command's output
    return code


if __name__ == "__main__":
    main()
