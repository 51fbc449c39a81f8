"""Pods as local processes: signals, levers, and nothing left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import urllib.request
from pathlib import Path

import pytest

from lingcluster import pod_spec
from lingcluster.client import Manifest, wait_for
from lingcluster.control_plane import ControlPlane
from lingcluster.guardian import MARK_VARIABLE, marked_processes
from lingcluster.kubelet import ProcessKubelet
from lingcluster.loopback import LoopbackBlock
from lingcluster.pod_spec import Image, ImageNotFoundError
from lingcluster.workloads import SHELL_IMAGE, container, from_field, pod

SERVE = (
    'exec python3 -c "'
    "import http.server, os, signal, sys;"
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143));"
    "http.server.HTTPServer((os.environ['POD_IP'], 9464),"
    "http.server.SimpleHTTPRequestHandler).serve_forever()"
    '"'
)
POD_IP = from_field("POD_IP", "status.podIP")


class Pods:
    """The bare pods of one namespace."""

    def __init__(self, plane: ControlPlane, namespace: str) -> None:
        self._client = plane.client
        self._path = f"/api/v1/namespaces/{namespace}/pods"

    def run(self, manifest: Manifest, phase: str = "Running") -> Manifest:
        self._client.create(self._path, manifest)
        return self.wait(manifest["metadata"]["name"], phase)

    def get(self, name: str) -> Manifest:
        return self._client.get(f"{self._path}/{name}")

    def wait(self, name: str, phase: str) -> Manifest:
        def look() -> Manifest | None:
            found = self.get(name)
            return found if found["status"]["phase"] == phase else None

        return wait_for(f"{name} {phase}", look, describe=lambda: self.get(name)["status"])

    def delete(self, name: str, *, grace: int | None = None) -> float:
        """Delete a pod and return the seconds until it is gone."""
        start = time.monotonic()
        self._client.delete(f"{self._path}/{name}", grace=grace)
        wait_for("the pod to go", lambda: self._client.find(f"{self._path}/{name}") is None)
        return time.monotonic() - start


@pytest.fixture
def pods(control_plane: ControlPlane, namespace: str) -> Pods:
    return Pods(control_plane, namespace)


def state(manifest: Manifest, index: int = 0) -> Manifest:
    return manifest["status"]["containerStatuses"][index]["state"]


def test_sigterm_reaches_process_1_alone_and_its_children_end_with_it(
    pods: Pods, kubelet: ProcessKubelet, namespace: str
) -> None:
    script = """
    sh -c 'trap "echo the child got it" TERM; while true; do sleep 0.1; done' &
    trap 'echo process $$$$ got it; exit 143' TERM
    echo ready; while true; do sleep 0.1; done
    """
    pods.run(pod("one", script))
    wait_for("ready", lambda: "ready" in kubelet.log(namespace, "one"))
    pods.delete("one")
    assert kubelet.log(namespace, "one") == "ready\nprocess 1 got it\n"
    assert kubelet.live_processes(namespace) == []


def test_a_pod_that_ignores_sigterm_is_killed_after_its_grace_with_137(
    pods: Pods, kubelet: ProcessKubelet, control_plane: ControlPlane, namespace: str
) -> None:
    kubelet.timing.final_delay = 2.0
    pods.run(pod("one", "while true; do sleep 0.1; done", grace=2))
    start = time.monotonic()
    control_plane.client.delete(f"/api/v1/namespaces/{namespace}/pods/one")
    ended = pods.wait("one", "Failed")
    assert 1.9 <= time.monotonic() - start < 20, "30 s are the default"
    assert state(ended)["terminated"]["exitCode"] == 137


def test_a_forced_delete_kills_at_once(
    pods: Pods, kubelet: ProcessKubelet, namespace: str
) -> None:
    pods.run(pod("one", "while true; do sleep 0.1; done", grace=300))
    pods.delete("one", grace=0)
    wait_for("the processes to end", lambda: not kubelet.live_processes(namespace))


def test_kill9_ends_the_pod_with_137(pods: Pods, kubelet: ProcessKubelet, namespace: str) -> None:
    pods.run(pod("one", "while true; do sleep 0.1; done"))
    kubelet.kill9(namespace, "one")
    assert state(pods.wait("one", "Failed"))["terminated"]["exitCode"] == 137


def test_the_program_does_not_outlive_its_launcher(
    pods: Pods, kubelet: ProcessKubelet, namespace: str
) -> None:
    pods.run(pod("one", "while true; do sleep 0.1; done"))
    (started,) = kubelet.started(namespace)
    stat = Path(f"/proc/{started.process.pid}/stat").read_text()
    os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)  # its parent, the launcher
    pods.wait("one", "Failed")
    wait_for("the program to end", lambda: not kubelet.live_processes(namespace))


def test_freeze_stops_every_process_of_the_pod_until_thaw(
    pods: Pods, kubelet: ProcessKubelet, namespace: str
) -> None:
    pods.run(pod("one", "while true; do date +%s%N; sleep 0.1; done"))
    wait_for("output", lambda: kubelet.log(namespace, "one"))
    kubelet.freeze(namespace, "one")
    time.sleep(0.3)
    frozen = kubelet.log(namespace, "one")
    time.sleep(0.5)
    assert kubelet.log(namespace, "one") == frozen
    assert len(kubelet.live_processes(namespace)) >= 1
    kubelet.thaw(namespace, "one")
    wait_for("more output", lambda: kubelet.log(namespace, "one") != frozen)


def answers(address: str) -> bool:
    with urllib.request.urlopen(f"http://{address}:9464/", timeout=0.5) as answer:
        return answer.status == 200


def test_a_port_can_be_refused_and_silenced_while_the_pod_runs_on(
    pods: Pods, kubelet: ProcessKubelet, namespace: str
) -> None:
    address = pods.run(pod("one", container(SERVE, environment=[POD_IP])))["status"]["podIP"]
    wait_for("the first answer", lambda: answers(address))
    kubelet.set_port(namespace, "one", "refuse")
    with pytest.raises(OSError, match="refused"):
        answers(address)
    kubelet.set_port(namespace, "one", "hang")
    with pytest.raises(TimeoutError):
        answers(address)
    kubelet.set_port(namespace, "one", "open")
    wait_for("an answer again", lambda: answers(address))
    assert pods.get("one")["status"]["phase"] == "Running"


def test_a_silenced_port_starves_a_connection_that_was_open(
    pods: Pods, kubelet: ProcessKubelet, namespace: str
) -> None:
    address = pods.run(pod("one", container(SERVE, environment=[POD_IP])))["status"]["podIP"]

    wait_for("the server", lambda: answers(address))
    with socket.create_connection((address, 9464), timeout=0.5) as connection:
        connection.sendall(b"GET / HTTP/1.0\r\n")
        kubelet.set_port(namespace, "one", "hang")
        connection.sendall(b"\r\n")
        with pytest.raises(TimeoutError):
            connection.recv(1)


def test_the_environment_holds_the_downward_api_and_expanded_references(
    pods: Pods, kubelet: ProcessKubelet, namespace: str
) -> None:
    manifest = pod(
        "one",
        container(
            "env; hostname",
            environment=[
                from_field("NAME", "metadata.name"),
                from_field("UID_", "metadata.uid"),
                from_field("NODE", "spec.nodeName"),
                from_field("TEAM", "metadata.labels['team']"),
                from_field("NOTE", "metadata.annotations['example.com/note']"),
                {"name": "WHO", "value": "$(NAME) of $(TEAM), $(HOME) $$(NAME)"},
            ],
        ),
    )
    manifest["metadata"] |= {"labels": {"team": "a"}, "annotations": {"example.com/note": "b"}}
    uid = pods.run(manifest, "Succeeded")["metadata"]["uid"]
    output = kubelet.log(namespace, "one").splitlines()
    expected = ["NAME=one", f"UID_={uid}", "TEAM=a", "NOTE=b", "HOSTNAME=one", "one"]
    assert set(expected) <= set(output)
    assert "WHO=one of a, $(HOME) $(NAME)" in output
    assert any(line.startswith("NODE=cpu-") for line in output)
    assert not any(line.startswith("PYTEST") for line in output)


def test_an_empty_dir_is_shared_by_the_pods_containers_and_gone_from_the_machine(
    pods: Pods, kubelet: ProcessKubelet, namespace: str
) -> None:
    volume = {"name": "scratch", "mountPath": "/mnt"}
    writer = container("echo hello > /mnt/file", volumeMounts=[volume])
    # grep, not cat: the shell makes the file before echo writes its line
    reader = container(
        "until grep hello /mnt/file; do sleep 0.1; done", volumeMounts=[volume], name="reader"
    )
    manifest = pod("one", writer, volumes=[{"name": "scratch", "emptyDir": {}}])
    manifest["spec"]["containers"].append(reader)
    pods.run(manifest, "Succeeded")
    assert kubelet.log(namespace, "one", "reader").endswith("hello\n")
    assert not Path("/mnt/file").exists()


def test_init_containers_run_first_and_one_that_fails_fails_the_pod(
    pods: Pods, kubelet: ProcessKubelet, namespace: str
) -> None:
    init = container("echo first; exit 1", name="init")
    ended = pods.run(pod("one", "echo second", initContainers=[init]), "Failed")
    assert kubelet.log(namespace, "one") == "first\n"
    assert "waiting" in state(ended)


def test_a_container_is_restarted_as_its_policy_says(
    pods: Pods, kubelet: ProcessKubelet, namespace: str
) -> None:
    kubelet.timing.restart_backoff = 0.1
    script = "echo again >> /mnt/runs; [ $(wc -l < /mnt/runs) = 3 ] || exit 1"
    main = container(script, volumeMounts=[{"name": "scratch", "mountPath": "/mnt"}])
    manifest = pod("one", main, volumes=[{"name": "scratch", "emptyDir": {}}])
    manifest["spec"]["restartPolicy"] = "OnFailure"
    ended = pods.run(manifest, "Succeeded")
    assert ended["status"]["containerStatuses"][0]["restartCount"] == 2


def test_an_unknown_image_leaves_the_pod_pending_and_says_so(pods: Pods) -> None:
    pods.run(pod("one", container("true", image="nowhere/unknown:1")), "Pending")

    def reason() -> bool:
        statuses = pods.get("one")["status"].get("containerStatuses", [])
        return bool(statuses) and statuses[0]["state"]["waiting"]["reason"] == "ImagePullBackOff"

    wait_for("ImagePullBackOff", reason)


def test_a_program_that_does_not_exist_fails_the_pod_with_128(pods: Pods) -> None:
    ended = pods.run(pod("one", container("", command=["no-such-program"])), "Failed")
    assert state(ended)["terminated"]["exitCode"] == 128
    assert "no-such-program" in state(ended)["terminated"]["message"]


def test_what_the_kubelet_cannot_do_it_says_instead_of_ignoring_it(pods: Pods) -> None:
    main = container("true", envFrom=[{"configMapRef": {"name": "settings"}}])
    pods.run(pod("one", main), "Pending")

    def message() -> str:
        statuses = pods.get("one")["status"].get("containerStatuses", [])
        return statuses[0]["state"]["waiting"].get("message", "") if statuses else ""

    assert "envFrom" in wait_for("the message", message)


def test_nothing_survives_a_sigkill_of_the_test_session(tmp_path: Path) -> None:
    program = textwrap.dedent(f"""
        import pathlib, sys, time
        from lingcluster.processes import Process, Session
        session = Session()
        script = "setsid sleep 1000 & sleep 1000"
        Process("p", ["sh", "-c", script], log=pathlib.Path({str(tmp_path / "log")!r}),
                session=session)
        print(session.mark, flush=True)
        time.sleep(1000)
    """)
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent,
    )
    assert child.stdout is not None
    mark = child.stdout.readline().strip()
    wait_for("both sleeps", lambda: len(marked_processes(MARK_VARIABLE, mark)) == 3)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    wait_for("the end", lambda: not marked_processes(MARK_VARIABLE, mark))


def test_two_sessions_never_share_an_address() -> None:
    with LoopbackBlock() as one, LoopbackBlock() as other:
        assert one.prefix != other.prefix
        assert one.pod(0) != one.pod_process(0)


def test_an_image_is_found_with_and_without_its_tag() -> None:
    plain, tagged = Image(("plain",)), Image(("tagged",))
    images = {"registry:5000/trainer": plain, "trainer:v2": tagged}
    assert pod_spec.find_image(images, "registry:5000/trainer:v1") is plain
    assert pod_spec.find_image(images, "registry:5000/trainer@sha256:00") is plain
    assert pod_spec.find_image(images, "trainer:v2") is tagged
    with pytest.raises(ImageNotFoundError):
        pod_spec.find_image(images, "trainer:v3")


def test_command_replaces_the_entrypoint_and_args_extend_it() -> None:
    image = Image(entrypoint=("run", "it"))
    base = {"name": "c", "image": SHELL_IMAGE}
    assert pod_spec.arguments({**base, "args": ["$(A)"]}, image, {"A": "1"}) == ["run", "it", "1"]
    assert pod_spec.arguments({**base, "command": ["x"], "args": ["y"]}, image, {}) == ["x", "y"]
