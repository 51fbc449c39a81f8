"""`ling logs` and `ling debug`: logs that are cut, gone or no text; bundles of what there is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cli_server import PODS, RUNS, Server, pod, refusal, run


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


def test_of_a_host_with_two_containers_each_is_a_process(
    ling: Callable[..., tuple[int, str, str]], server: Server
) -> None:
    """As on tpu7x with parallelContainers: 2: host 1 runs processes 2 and 3."""
    hosts = [pod("p0"), pod("p1")]
    for index, host in enumerate(hosts):
        host["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"] = str(index)
        host["spec"]["containers"] = [{"name": "jax-tpu-1"}, {"name": "jax-tpu-2"}]
        server.say(f"{PODS}/ling2-slice-job-0-0-p{index}/log", (200, f"host {index}\n"))
    server.say(f"{RUNS}/ling2", (200, run()))
    server.say(PODS, (200, {"items": hosts}))
    assert ling("logs", "ling2", "--process", "3")[1] == "host 1\n"
    assert server.asked[-1] == f"{PODS}/ling2-slice-job-0-0-p1/log?container=jax-tpu-2"
    code, out, _ = ling("logs", "ling2", "--all")
    assert (code, out) == (0, "[0] host 0\n[1] host 0\n[2] host 1\n[3] host 1\n")
    assert "has 4 processes" in ling("logs", "ling2", "--process", "4")[2]


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
