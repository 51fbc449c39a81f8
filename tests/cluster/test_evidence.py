"""What a halted or failed run leaves in its status: log lines, last words, times."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Callable

import pytest

from lingcluster.client import Manifest, wait_for
from lingcluster.control_plane import ControlPlane
from lingcluster.fault_table import FaultTable
from lingcluster.kubelet import ProcessKubelet
from lingcluster.operator_process import StartOperator
from lingcluster.sample_runs import shell_run
from lingcluster.story import Story
from lingcluster.training_runs import TrainingRuns

BY_SCRAPE = {"scrapeIntervalSeconds": 1, "trainerStops": False}
NAN = {"NAN_STEP": "40", "STEP_SECONDS": "0.05"}


def evidence(run: Manifest) -> Manifest:
    return run["status"]["attempts"][-1]["evidence"]


def test_kubectl_logs_reads_a_pod_from_the_process_kubelet_and_follows_it_to_its_end(
    runs: TrainingRuns, kubelet: ProcessKubelet, control_plane: ControlPlane, namespace: str
) -> None:
    script = "for i in 1 2 3; do echo line $i; sleep 0.3; done"
    body = {
        "metadata": {"name": "one"},
        "spec": {
            "restartPolicy": "Never",
            "containers": [{"name": "c", "image": "shell", "command": ["sh", "-c", script]}],
        },
    }
    runs.client.create(runs.pods_path, body)
    one = f"{runs.pods_path}/one"
    wait_for("it to run", lambda: runs.client.get(one)["status"]["phase"] != "Pending")
    wait_for(
        "the first line", lambda: "1" in control_plane.kubectl("logs", "one", "-n", namespace)
    )
    text = control_plane.kubectl("logs", "-f", "one", "-n", namespace)
    assert text == "line 1\nline 2\nline 3\n" == kubelet.log(namespace, "one")
    assert control_plane.kubectl("logs", "--tail=1", "one", "-n", namespace) == "line 3\n"
    kubelet.set_logs("hang")
    with pytest.raises(RuntimeError, match=r"(?i)timed? ?out|deadline"):
        control_plane.kubectl("logs", "one", "-n", namespace, "--request-timeout=1s")


def test_a_nan_halts_with_the_last_lines_and_every_process_s_last_words(
    runs: TrainingRuns,
    start_operator: StartOperator,
    scripted_run: Callable[..., Manifest],
    control_plane: ControlPlane,
    story: Story,
) -> None:
    start_operator()
    # Of two trainers the slower is not to be stopped before it has found out by itself.
    runs.apply(scripted_run("self", env=NAN | {"IGNORE_SIGTERM": "1"}))
    runs.apply(scripted_run("scraped", env=NAN, health=BY_SCRAPE))
    runs.wait_phase("self", "Halted")
    run = runs.wait("self", "both ends", lambda run: len(evidence(run)["ended"]) == 2)
    found = evidence(run)
    story.tell(json.dumps(found, indent=2))
    zero = runs.pod("self", 0)
    assert found["logPod"] == zero
    assert "logProblem" not in found
    assert found["log"][0].startswith("process 0 on port")
    assert {(end["exitCode"], json.loads(end["message"])["reason"]) for end in found["ended"]} == {
        (90, "NonFiniteLoss")
    }
    assert {json.loads(end["message"])["process"] for end in found["ended"]} == {"0", "1"}
    attempt = run["status"]["attempts"][-1]
    assert (attempt["reason"], attempt["attempt"]) == ("NonFiniteLoss", 1)
    assert attempt["startTime"] <= found["time"] <= attempt["endTime"]
    assert runs.status("self")["mttr"]["downSince"] <= attempt["endTime"]

    stopped = evidence(runs.wait_phase("scraped", "Halted"))
    assert stopped["log"][0].startswith("process 0 on port")
    assert not any("SIGTERM" in line for line in stopped["log"]), "read before it was stopped"
    runs.wait_no_live_pod("scraped")


def test_a_run_whose_nodes_do_not_answer_for_logs_halts_all_the_same_and_says_why(
    runs: TrainingRuns,
    start_operator: StartOperator,
    scripted_run: Callable[..., Manifest],
    kubelet: ProcessKubelet,
    faults: FaultTable,
) -> None:
    start_operator()
    kubelet.set_logs("hang")
    for name in ("silent", "later"):
        runs.apply(scripted_run(name, env=NAN | {"STEP_SECONDS": "0.1"}, health=BY_SCRAPE))
    runs.wait_phase("silent", "Running")
    (address,) = (
        each["status"]["podIP"]
        for each in runs.pods("silent")
        if each["metadata"]["name"] == runs.pod("silent", 0)
    )
    wait_for("the NaN", lambda: shows_nan(address))
    began = time.monotonic()
    for name in ("silent", "later"):
        runs.wait_phase(name, "Halted")
    seconds = time.monotonic() - began
    faults.record(
        "no node answers for logs while two runs diverge",
        f"both Halted {seconds:.1f} s after the first NaN",
        "the status says why it has no log lines",
    )
    assert seconds < 30
    problems = {evidence(runs.get(name))["logProblem"] for name in ("silent", "later")}
    # Both at once wait 3 s; one after the other is given half a second.
    assert "no answer within 3 s" in problems
    assert problems <= {"no answer within 3 s", "no answer within 0.5 s"}
    for name in ("silent", "later"):
        runs.wait_no_live_pod(name)
        assert runs.jobset(name)["spec"]["suspend"]


def shows_nan(address: str) -> bool:
    with urllib.request.urlopen(f"http://{address}:9464/metrics", timeout=5) as page:
        return re.search(rb"^ling_learning_is_nan\{.*\} 1$", page.read(), re.M) is not None


def test_a_failed_run_keeps_what_was_printed_and_said_and_a_cut_endpoint_is_told(
    runs: TrainingRuns, start_operator: StartOperator, kubelet: ProcessKubelet
) -> None:
    start_operator()
    script = (
        "printf '\\033[31mreading shard 7\\033[0m\\nno such \\377 file\\n'; "
        """echo '{"message": "no such file"}' > /dev/termination-log; exit 3"""
    )
    runs.apply(shell_run("data", script))
    runs.wait_phase("data", "Failed")
    found = evidence(runs.wait("data", "its end", lambda run: evidence(run).get("ended")))
    assert found["log"] == ["reading shard 7", "no such \ufffd file"]
    assert found["ended"][0]["exitCode"] == 3
    assert json.loads(found["ended"][0]["message"]) == {"message": "no such file"}
    kubelet.set_logs("refuse")
    runs.apply(shell_run("cut", script))
    found = evidence(runs.wait_phase("cut", "Failed"))
    assert found["log"] == []
    assert found["logProblem"]


@pytest.mark.slow
def test_a_run_that_loses_a_process_tells_mttr_and_eta_and_kubectl_waits_for_its_end(
    runs: TrainingRuns,
    start_operator: StartOperator,
    scripted_run: Callable[..., Manifest],
    control_plane: ControlPlane,
    namespace: str,
) -> None:
    operator = start_operator()
    # Progress is written every ten seconds; the third write of a process knows its pace.
    env = {"EXIT": "20:42", "STEP_SECONDS": "0.1"}
    runs.apply(scripted_run("good", steps=320, env=env))
    runs.wait("good", "an outage", lambda run: "downSince" in mttr(run))
    operator.stop()
    start_operator()
    found = mttr(runs.wait("good", "a recovery", lambda run: mttr(run).get("recoveries") == 1))
    assert found["meanSeconds"] == found["lastSeconds"] == found["totalSeconds"]
    assert "downSince" not in found

    space = ("-n", namespace)
    runs.wait("good", "an ETA", lambda run: "estimatedCompletionTime" in training(run))
    wide = control_plane.kubectl("get", "trun", "-o", "wide", *space).splitlines()
    titles = "NAME PHASE STEP TARGET LOSS HEALTH AGE ATTEMPT RESTARTS TOKENS/S ETA CHECKPOINT MTTR"
    assert " ".join(wide[0].split()).startswith(f"{titles} CREATED")
    assert wide[1].split()[:2] == ["good", "Running"]
    assert "1234" in wide[1]
    control_plane.kubectl("wait", "--for=condition=Complete", "trun/good", "--timeout=50s", *space)
    run = runs.get("good")
    assert "estimatedCompletionTime" not in training(run)
    assert training(run)["step"] == 320
    # kubectl passes over conditions of an older generation: they are re-dated with every edit.
    generation = runs.edit("good", suspend=True)["metadata"]["generation"]
    control_plane.kubectl("wait", "--for=condition=Complete", "trun/good", "--timeout=30s", *space)
    run = runs.get("good")
    assert {c["observedGeneration"] for c in run["status"]["conditions"]} == {generation}
    told = [(event["reason"], event["eventTime"]) for event in runs.events("good")]
    assert len(told) == len(set(told))


def training(run: Manifest) -> Manifest:
    return run.get("status", {}).get("training", {})


def mttr(run: Manifest) -> Manifest:
    return run.get("status", {}).get("mttr", {})
