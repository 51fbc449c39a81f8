"""What `ling` makes of an API server's answers, those above all that a healthy one never gives."""

import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli_server import RUNS, Answer, Server, refusal, run
from ling_operator.display import wants_colour


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (
            refusal(404, "NotFound", 'trainingruns.ling.primatrix.io "ling2" not found'),
            'ling: trainingruns.ling.primatrix.io "ling2" not found\n',
        ),
        ((404, "404 page not found\n"), "install the CRD"),
        (
            refusal(404, "NotFound", "the server could not find the requested resource"),
            "install the CRD",
        ),
        (
            refusal(403, "Forbidden", 'User "ann" cannot get resource "trainingruns"'),
            'ling: not allowed: User "ann" cannot get resource "trainingruns"\n',
        ),
        (refusal(401, "Unauthorized", "Unauthorized"), "log in again"),
        ((502, "<html>\n<h1>bad\ngateway"), "ling: <html>\n"),
    ],
)
def test_a_refusal_is_one_line_and_code_1(
    ling: Callable[..., tuple[int, str, str]], server: Server, answer: Answer, says: str
) -> None:
    server.say(f"{RUNS}/ling2", answer)
    code, out, err = ling("get", "ling2")
    assert (code, out) == (1, "")
    assert says in err
    assert err.count("\n") == 1


def test_a_context_chooses_server_and_namespace(
    ling: Callable[..., tuple[int, str, str]], server: Server
) -> None:
    code, _, err = ling("list", "--context", "other")
    assert code == 1
    assert "namespaces/far/trainingruns" in err
    assert "no answer from the API server" in err
    assert server.asked == []
    code, _, err = ling("list", "--context", "none")
    assert code == 1
    assert "none" in err


def test_an_empty_list_is_said_on_standard_error(
    ling: Callable[..., tuple[int, str, str]], server: Server
) -> None:
    server.say(RUNS, (200, {"metadata": {"resourceVersion": "1"}, "items": []}))
    assert ling("list") == (0, "", "ling: no TrainingRuns found in namespace team\n")


def test_pages_of_a_list_are_put_together(
    ling: Callable[..., tuple[int, str, str]], server: Server
) -> None:
    server.say(
        RUNS,
        (200, {"metadata": {"resourceVersion": "1", "continue": "x"}, "items": [run("a")]}),
        (200, {"metadata": {"resourceVersion": "1"}, "items": [run("b")]}),
    )
    code, out, _ = ling("list", "-o", "name")
    assert (code, out.split()) == (
        0,
        ["trainingrun.ling.primatrix.io/a", "trainingrun.ling.primatrix.io/b"],
    )
    assert "continue=x" in server.asked[1]


def test_a_watch_that_is_too_old_begins_anew_and_a_refusal_ends_it(
    ling: Callable[..., tuple[int, str, str]], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ling_operator.cluster_commands._RETRY_SECONDS", 0.01)
    gone = {"type": "DELETED", "object": run("b")}
    changed = {"type": "MODIFIED", "object": run("a", phase="Halted")}
    same = {"type": "MODIFIED", "object": run("a", phase="Halted", observedGeneration=2)}
    events = "".join(json.dumps(event) + "\n" for event in (changed, same, gone))
    server.say(
        RUNS,
        (200, {"metadata": {"resourceVersion": "1"}, "items": [run("a"), run("b")]}),
        refusal(410, "Expired", "too old resource version"),
        (503, "try later"),
        (200, {"metadata": {"resourceVersion": "7"}, "items": [run("a"), run("b")]}),
        (200, events),
        refusal(403, "Forbidden", "not any more"),
    )
    code, out, err = ling("list", "--watch")
    assert [line.split()[:2] for line in out.splitlines()] == [
        ["NAME", "PHASE"],
        ["a", "Running"],
        ["b", "Running"],
        ["a", "Halted"],
        ["b", "Deleted"],
    ]
    assert (code, err) == (1, "ling: not allowed: not any more\n")
    assert "resourceVersion=1" in server.asked[1]
    assert "resourceVersion=7" in server.asked[4]


def test_a_watch_into_a_pipe_shows_each_change_at_once_and_keeps_columns_apart(
    server: Server, kubeconfig: Path
) -> None:
    name = "a-name-that-is-longer-than-any-before"

    def changes(handler: Any) -> None:
        event = json.dumps({"type": "ADDED", "object": run(name)}) + "\n"
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(event.encode())
        handler.wfile.flush()
        ended.wait(60)
        handler.close_connection = True

    ended = threading.Event()
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    listed = {"metadata": {"resourceVersion": "1"}, "items": [run("a")]}
    server.say(RUNS, (200, listed), changes)
    watching = subprocess.Popen(
        [sys.executable, "-m", "ling_operator.cli", "list", "--watch"],
        env={**environment, "KUBECONFIG": str(kubeconfig)},
        stdout=subprocess.PIPE,
        text=True,
    )
    lines: list[str] = []
    out = watching.stdout
    assert out is not None
    reader = threading.Thread(target=lambda: lines.extend(iter(out.readline, "")))
    reader.start()
    try:
        for _ in range(600):
            if len(lines) == 3:
                break
            reader.join(0.1)
        assert [line.split()[:2] for line in lines] == [
            ["NAME", "PHASE"],
            ["a", "Running"],
            [name, "Running"],
        ]
    finally:
        watching.kill()
        watching.wait()
        ended.set()
        reader.join()
        out.close()


def test_edits_are_made_in_our_name_and_at_the_version_that_was_read(
    ling: Callable[..., tuple[int, str, str]], server: Server
) -> None:
    server.say(f"{RUNS}/ling2", (200, run()))
    code, out, _ = ling("suspend", "ling2")
    assert (code, out.split(":")[1]) == (0, " spec.suspend")
    assert server.asked[-1] == f"{RUNS}/ling2?fieldManager=ling"
    assert server.sent == [{"metadata": {"resourceVersion": "5"}, "spec": {"suspend": True}}]


def test_fields_of_others_are_named_with_how_to_take_them(
    ling: Callable[..., tuple[int, str, str]], server: Server, tmp_path: Path
) -> None:
    said = 'Apply failed with 1 conflict: conflict with "ling": .spec.attempt'
    server.say(f"{RUNS}/ling2", refusal(409, "Conflict", said), (200, run()))
    file = tmp_path / "run.yaml"
    manifest = {
        "apiVersion": "ling.primatrix.io/v1alpha1",
        "kind": "TrainingRun",
        "metadata": {"name": "ling2"},
        "spec": {"image": "i", "cpu": {"processes": 1}, "command": ["x"]},
    }
    file.write_text(yaml.safe_dump(manifest))
    code, _, err = ling("run", str(file))
    assert (code, err) == (
        1,
        f"ling: {said}; leave these fields out of the file, or take them: --force-conflicts\n",
    )
    assert "force=false" in server.asked[-1]
    assert ling("run", str(file), "--force-conflicts")[0] == 0
    assert "force=true" in server.asked[-1]
    manifest["metadata"] = {"name": "ling2", "namespace": "team"}
    file.write_text(yaml.safe_dump(manifest))
    code, _, err = ling("run", str(file), "-n", "other")
    assert code == 2
    assert "metadata.namespace is team, not other" in err


def test_a_reader_that_has_seen_enough_is_no_error_with_a_trace(
    server: Server, kubeconfig: Path
) -> None:
    many = [run(f"run-{i}") for i in range(5000)]
    server.say(RUNS, (200, {"metadata": {"resourceVersion": "1"}, "items": many}))
    command = f"{sys.executable} -m ling_operator.cli list | head -1"
    done = subprocess.run(
        ["sh", "-c", command],
        env={**os.environ, "KUBECONFIG": str(kubeconfig)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.startswith("NAME")
    assert done.stderr == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "environment", "colour"),
    [
        (Terminal(), {"TERM": "xterm"}, True),
        (Terminal(), {"NO_COLOR": "1"}, False),
        (Terminal(), {"NO_COLOR": ""}, True),
        (Terminal(), {"TERM": "dumb"}, False),
        (io.StringIO(), {"TERM": "xterm"}, False),
    ],
)
def test_colour_is_for_terminals_without_no_color(
    stream: io.StringIO, environment: dict[str, str], colour: bool
) -> None:
    assert wants_colour(stream, environment) is colour


def test_a_terminal_sees_phases_in_colour(
    ling: Callable[..., tuple[int, str, str]],
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server.say(RUNS, (200, {"metadata": {"resourceVersion": "1"}, "items": [run(phase="Halted")]}))
    monkeypatch.setattr("ling_operator.cli.wants_colour", lambda *_: True)
    _, out, _ = ling("list")
    header, row = out.splitlines()
    assert "\033[31mHalted\033[0m" in row
    plain = row.replace("\033[31m", "").replace("\033[0m", "")
    assert plain.index("Halted") == header.index("PHASE")
