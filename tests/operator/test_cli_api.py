"""What `ling` makes of an API server's answers, those above all that a healthy one never gives."""

import http.server
import io
import json
import os
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ling_operator.cli import main
from ling_operator.display import wants_colour

RUNS = "/apis/ling.primatrix.io/v1alpha1/namespaces/team/trainingruns"
PODS = "/api/v1/namespaces/team/pods"

type Answer = tuple[int, Any]


class Server:
    """Answers each path with what it was told to, in turn; the last answer stays."""

    def __init__(self) -> None:
        self.answers: dict[str, list[Answer | Callable[[Any], None]]] = {}
        self.asked: list[str] = []
        self.sent: list[Any] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer.asked.append(self.path)
                path = urllib.parse.urlsplit(self.path).path
                queue = outer.answers.get(path, [(404, "404 page not found")])
                answer = queue.pop(0) if len(queue) > 1 else queue[0]
                if callable(answer):
                    answer(self)
                    return
                status, body = answer
                content = body if isinstance(body, str) else json.dumps(body)
                self.send_response(status)
                self.send_header("Content-Length", str(len(content.encode())))
                self.end_headers()
                self.wfile.write(content.encode())

            def do_PATCH(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.sent.append(json.loads(body))
                self.do_GET()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def say(self, path: str, *answers: Answer | Callable[[Any], None]) -> None:
        self.answers[path] = list(answers)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.server.shutdown()
    server.server.server_close()


@pytest.fixture
def kubeconfig(server: Server, tmp_path: Path) -> Path:
    address = f"http://127.0.0.1:{server.server.server_address[1]}"
    contexts = [
        {"name": "c", "context": {"cluster": "c", "user": "c", "namespace": "team"}},
        {"name": "other", "context": {"cluster": "dead", "user": "c", "namespace": "far"}},
    ]
    path = tmp_path / "kubeconfig"
    path.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "c",
                "clusters": [
                    {"name": "c", "cluster": {"server": address}},
                    {"name": "dead", "cluster": {"server": "http://127.0.0.1:1"}},
                ],
                "users": [{"name": "c", "user": {}}],
                "contexts": contexts,
            }
        )
    )
    return path


@pytest.fixture
def ling(
    kubeconfig: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--kubeconfig", str(kubeconfig)])
        out, err = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, out, err

    return call


def run(name: str = "ling2", **status: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "namespace": "team",
            "name": name,
            "uid": name,
            "resourceVersion": "5",
            "creationTimestamp": "2026-11-30T06:00:00Z",
        },
        "spec": {"image": "i", "cpu": {"processes": 1}},
        "status": {"phase": "Running", **status},
    }


def pod(uid: str = "p0", *, phase: str = "Running", restart: int = 0) -> dict[str, Any]:
    state = {"running": {}} if phase == "Running" else {"terminated": {"exitCode": 0}}
    return {
        "metadata": {
            "name": f"ling2-slice-job-0-0-{uid}",
            "uid": uid,
            "labels": {
                "ling.primatrix.io/attempt": "1",
                "jobset.sigs.k8s.io/restart-attempt": str(restart),
            },
        },
        "spec": {"containers": [{"name": "jax-tpu"}]},
        "status": {"phase": phase, "containerStatuses": [{"name": "jax-tpu", "state": state}]},
    }


def refusal(code: int, reason: str, message: str) -> Answer:
    return code, {"kind": "Status", "reason": reason, "message": message}


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


def test_lines_kept_in_the_status_are_shown_when_the_pods_are_gone(
    ling: Callable[..., tuple[int, str, str]], server: Server
) -> None:
    attempt = {"attempt": 1, "evidence": {"log": ["step 1", "step 2 loss nan"]}}
    server.say(f"{RUNS}/ling2", (200, run(phase="Halted", attempts=[attempt])))
    server.say(PODS, (200, {"items": []}))
    code, out, err = ling("logs", "ling2")
    assert (code, out) == (0, "step 1\nstep 2 loss nan\n")
    assert "its pods are gone" in err
    assert ling("logs", "ling2", "--tail", "1")[1] == "step 2 loss nan\n"
    code, _, err = ling("logs", "ling2", "--process", "3")
    assert (code, err) == (1, "ling: team/ling2 has no pods\n")


def test_a_log_that_is_no_utf_8_is_printed_all_the_same(
    ling: Callable[..., tuple[int, str, str]], server: Server
) -> None:
    def log(handler: Any) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "5")
        handler.end_headers()
        handler.wfile.write(b"ok \xff\n")

    server.say(f"{RUNS}/ling2", (200, run()))
    server.say(PODS, (200, {"items": [pod()]}))
    server.say(f"{PODS}/ling2-slice-job-0-0-p0/log", log)
    assert ling("logs", "ling2", "--tail", "7") == (0, "ok \ufffd\n", "")
    assert "container=jax-tpu&tailLines=7" in server.asked[-1]


def test_following_goes_on_after_a_cut_and_ends_with_the_run(
    ling: Callable[..., tuple[int, str, str]], server: Server
) -> None:
    """A load balancer cuts a stream, then ends one in good order; a new pod; the run's end."""

    def cut(handler: Any) -> None:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        handler.wfile.write(b"6\r\nstep 1\r\n")
        handler.wfile.flush()
        handler.connection.close()
        handler.close_connection = True

    running, over = {"items": [pod()]}, {"items": [pod(phase="Succeeded")]}
    again = {"items": [pod("p1", phase="Succeeded", restart=1)]}
    server.say(f"{RUNS}/ling2", *[(200, run())] * 9, (200, run(phase="Complete")))
    server.say(PODS, *[(200, running)] * 5, (200, over), (200, over), (200, again))
    log = f"{PODS}/ling2-slice-job-0-0-p0/log"
    server.say(log, cut, (200, "step 2\n"), (200, "step 3\n"))
    server.say(f"{PODS}/ling2-slice-job-0-0-p1/log", (200, "step 4"))
    code, out, err = ling("logs", "ling2", "-f", "--tail", "5")
    assert (code, out.split("\n")) == (0, ["step 1", "step 2", "step 3", "step 4", ""])
    queries = [path.partition("?")[2] for path in server.asked if path.startswith(log)]
    assert queries[0] == "container=jax-tpu&follow=true&tailLines=5"
    assert len(queries) == 3
    assert all("&follow=true&sinceSeconds=" in query for query in queries[1:])
    assert err == "ling: pod ling2-slice-job-0-0-p1, restart 1\n"


def test_a_bundle_says_what_it_could_not_have(
    ling: Callable[..., tuple[int, str, str]], server: Server, tmp_path: Path
) -> None:
    server.say(f"{RUNS}/ling2", (200, run()))
    server.say(PODS, refusal(403, "Forbidden", "no pods for you"))
    code, out, err = ling("debug", "ling2", "-o", str(tmp_path / "out"))
    assert code == 0
    assert "files of team/ling2" in out
    assert "not in it: pods.yaml: not allowed: no pods for you" in err
    summary = (tmp_path / "out" / "summary.txt").read_text()
    assert "- workload.yaml: Kueue is not installed" in summary
    assert "- pods.yaml: not allowed: no pods for you" in summary


def test_a_bundle_holds_metrics_logs_and_last_words_of_every_pod(
    ling: Callable[..., tuple[int, str, str]], server: Server, tmp_path: Path
) -> None:
    attempt = {"attempt": 1, "startTime": "2026-11-30T06:00:00Z", "evidence": {"log": ["kept"]}}
    live, dead = pod(), pod("p1", phase="Failed", restart=1)
    live["metadata"]["annotations"] = {"ling.primatrix.io/metrics-port": "9464"}
    end = {"exitCode": 137, "reason": "OOMKilled", "message": "the end"}
    dead["status"]["containerStatuses"][0]["state"] = {"terminated": end}
    server.say(f"{RUNS}/ling2", (200, run(attempts=[attempt])))
    server.say(PODS, (200, {"items": [live, dead]}))
    name = "ling2-slice-job-0-0-p0"
    server.say(f"{PODS}/{name}:9464/proxy/metrics", (200, "ling_step 7\n"))
    server.say(f"{PODS}/{name}/log", (200, "said\n"))
    folder = tmp_path / "out"
    code, _, err = ling("debug", "ling2", "-o", str(folder))
    assert code == 0
    assert (folder / "metrics" / f"{name}.txt").read_text() == "ling_step 7\n"
    assert (folder / "logs" / name / "jax-tpu.log").read_text() == "said\n"
    words = (folder / "last-words.txt").read_text()
    assert "exit code 137, OOMKilled" in words
    assert "the end" in words
    assert "- kept" in words
    assert "metrics/ling2-slice-job-0-0-p1.txt: the pod does not run" in err


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
