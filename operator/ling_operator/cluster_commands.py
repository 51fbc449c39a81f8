"""The commands of `ling` that talk to a cluster: list, get, logs, suspend, resume, debug."""

import argparse
import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path

from ling_operator import debug_bundle, remote, run_logs
from ling_operator.api import Phase
from ling_operator.connection import discover
from ling_operator.display import paint, print_error, print_line
from ling_operator.listing import (
    GAP,
    Column,
    Filter,
    Row,
    attempts_of,
    columns,
    full_name,
    last_evidence,
    news_of,
    row_of,
    table,
    widths_of,
)
from ling_operator.manifest import dump_yaml
from ling_operator.rest import ApiError, JsonObject, RestClient
from ling_trainer.schema import ConfigError

_RETRY_SECONDS = 2.0


def list_runs(options: argparse.Namespace) -> None:
    """Print the runs that the filters take; with --watch also each that changes."""
    wanted = Filter(options.filter_by_status, options.filter_by_name)

    async def find(client: RestClient, namespace: str) -> None:
        space = None if options.all_namespaces else namespace
        runs, version = await remote.find_all(client, space)
        runs = [run for run in runs if wanted.takes(run)]
        if not options.watch and options.output in {"json", "yaml"}:
            print_object({"apiVersion": "v1", "kind": "List", "items": runs}, options.output)
            return
        printer = _Printer(options, runs)
        for run in runs:
            printer.show(run)
        if not runs and not options.watch:
            where = "any namespace" if space is None else f"namespace {space}"
            print_error(f"no TrainingRuns found in {where}")
        if options.watch:
            await _watch(client, space, version, wanted, printer)

    on_cluster(options, find)


class _Printer:
    """Prints runs one after another in the form that was asked for."""

    def __init__(self, options: argparse.Namespace, runs: Iterable[JsonObject]) -> None:
        self._form: str | None = options.output
        self._colour: bool = options.colour
        wide = options.output == "wide"
        self._columns = columns(wide=wide, namespaces=getattr(options, "all_namespaces", False))
        now = datetime.now(UTC)
        titles: Row = tuple(column.title for column in self._columns)
        rows = [row_of(run, self._columns, now) for run in runs]
        self._widths = widths_of([titles, *rows])
        self._header: Row | None = None if getattr(options, "no_headers", False) else titles
        self._shown: dict[str, Row] = {}

    def show(self, run: JsonObject, *, gone: bool = False) -> None:
        """Print a run unless nothing of it has changed since it was last printed."""
        if gone:
            run = {**run, "status": {**run.get("status", {}), "phase": "Deleted"}}
        now = datetime.now(UTC)
        row, news = row_of(run, self._columns, now), news_of(run, self._columns, now)
        uid = run["metadata"]["uid"]
        is_table = self._form in {None, "wide"}
        if is_table and self._shown.get(uid) == news:
            return
        self._shown[uid] = news
        if self._form == "name":
            print_line(full_name(run))
        elif not is_table:
            print_object(run, str(self._form), document=True)
        else:
            self._row(row)

    def _row(self, row: Row) -> None:
        if self._header is not None:
            print_line(_aligned(self._header, self._widths))
            self._header = None
        print_line(_aligned(row, self._widths, self._columns if self._colour else ()))


async def _watch(
    client: RestClient, namespace: str | None, version: str, wanted: Filter, printer: _Printer
) -> None:
    """Print what changes, for ever; a watch that ended or failed begins anew with a list."""
    listed: str | None = version
    while True:
        try:
            if listed is None:
                runs, listed = await remote.find_all(client, namespace)
                for run in filter(wanted.takes, runs):
                    printer.show(run)
            async for run, gone in remote.watch(client, namespace, listed):
                if wanted.takes(run):
                    printer.show(run, gone=gone)
        except ApiError as error:
            if error.is_refusal and not error.is_expired:
                raise
            await asyncio.sleep(_RETRY_SECONDS)
        listed = None


def get_run(options: argparse.Namespace) -> None:
    """Print one run, its conditions and attempts, and what a stopped one has left."""

    async def show(client: RestClient, namespace: str) -> None:
        run = await remote.get(client, namespace, options.name)
        if options.output == "name":
            print_line(full_name(run))
        elif options.output in {"json", "yaml"}:
            print_object(run, options.output)
        else:
            _Printer(options, [run]).show(run)
            _details(run)

    on_cluster(options, show)


def _details(run: JsonObject) -> None:
    conditions = run.get("status", {}).get("conditions", [])
    rows = [(c["type"], c["status"], c["reason"], c.get("message", "")) for c in conditions]
    print_line("")
    _print_table([("CONDITION", "STATUS", "REASON", "MESSAGE"), *rows])
    print_line("")
    _print_table(attempts_of(run, datetime.now(UTC)))
    evidence = last_evidence(run)
    if evidence is None:
        return
    for end in evidence.get("ended", []):
        said = end.get("message") or end.get("reason") or "no message"
        print_line(f"\n{end['pod']} ended with {end['exitCode']}: {said}")
    if evidence.get("log"):
        print_line(f"\nLast lines of {evidence['logPod']}:")
        for line in evidence["log"]:
            print_line(f"  {line}")
    elif evidence.get("logProblem"):
        print_line(f"\nNo log was kept: {evidence['logProblem']}")


def logs(options: argparse.Namespace) -> None:
    """Print what a process printed, or all; with --follow as it grows, over restarts."""
    processes = None if options.all else (options.process,)

    async def show(client: RestClient, namespace: str) -> None:
        target = run_logs.Target(namespace, options.name, processes, options.tail)
        if options.follow:
            await run_logs.follow(client, target, _write, _note)
        else:
            await run_logs.show(client, target, _write, _note)

    on_cluster(options, show)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _note(text: str) -> None:
    print_error(text.rstrip())


def suspend(options: argparse.Namespace) -> None:
    """Pause a run."""
    _edit(options, remote.suspend)


def resume(options: argparse.Namespace) -> None:
    """Let a run go on."""
    _edit(options, remote.resume)


def _edit(
    options: argparse.Namespace, edit: Callable[[RestClient, str, str], Awaitable[str]]
) -> None:
    async def act(client: RestClient, namespace: str) -> None:
        said = await edit(client, namespace, options.name)
        print_line(f"trainingrun {namespace}/{options.name}: {said}")

    on_cluster(options, act)


def debug(options: argparse.Namespace) -> None:
    """Write everything about a run into an archive or a folder."""

    async def collect(client: RestClient, namespace: str) -> None:
        now = datetime.now(UTC)
        bundle = await debug_bundle.gather(client, namespace, options.name, now)
        path: Path = options.output or Path(f"{bundle.name}.tar.gz")
        bundle.write(path, now)
        print_line(f"{path}: {len(bundle.files)} files of {namespace}/{options.name}")
        for problem in sorted(bundle.problems):
            print_error(f"not in it: {problem}")

    on_cluster(options, collect)


def apply(options: argparse.Namespace, manifest: JsonObject) -> None:
    """Create a run, or change it to what the manifest says.

    Raises:
      ConfigError: the manifest is for another namespace than the one asked for.
    """
    own, asked = manifest["metadata"].get("namespace"), options.namespace
    if own is not None and asked is not None and own != asked:
        msg = f"the file's metadata.namespace is {own}, not {asked}; leave out one of the two"
        raise ConfigError(msg)

    async def act(client: RestClient, namespace: str) -> None:
        force = options.force_conflicts
        applied = await remote.apply(client, manifest, namespace, force=force)
        metadata = applied["metadata"]
        print_line(f"trainingrun {metadata['namespace']}/{metadata['name']} applied")

    on_cluster(options, act)


def on_cluster(
    options: argparse.Namespace, command: Callable[[RestClient, str], Awaitable[None]]
) -> None:
    """Run a command with a client of the cluster and the namespace that the options name."""
    connection = discover(options.kubeconfig, options.context)

    async def connect() -> None:
        async with RestClient(connection) as client:
            await command(client, options.namespace or connection.namespace)

    asyncio.run(connect())


def print_object(value: JsonObject, form: str, *, document: bool = False) -> None:
    """Print a whole object as JSON or YAML; document begins one of several of YAML."""
    if form == "json":
        print_line(json.dumps(value, indent=2))
    else:
        print_line(("---\n" if document else "") + dump_yaml(value).rstrip())


def _print_table(rows: list[Row]) -> None:
    for line in table(rows):
        print_line(line)


def _aligned(row: Row, widths: tuple[int, ...], coloured: tuple[Column, ...] = ()) -> str:
    """Return a line of a table; a phase in colour where columns are given.

    What came later may be longer than its column, and then shifts those behind it.
    """
    pairs = zip(row, widths, strict=True)
    cells = [cell.ljust(max(width, len(cell) + GAP)) for cell, width in pairs]
    for index, column in enumerate(coloured):
        if column.title == "PHASE" and row[index] in set(Phase):
            padding = " " * (len(cells[index]) - len(row[index]))
            cells[index] = paint(row[index], Phase(row[index])) + padding
    return "".join(cells).rstrip()
