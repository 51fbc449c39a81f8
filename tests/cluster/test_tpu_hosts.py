"""TPU pods where no GKE says who they are: two containers a host, which find each other."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from lingcluster.client import wait_for
from lingcluster.kubelet import ProcessKubelet
from lingcluster.operator_process import StartOperator
from lingcluster.sample_runs import shell_run, variables
from lingcluster.story import Story
from lingcluster.training_runs import TrainingRuns

CHIPS = "google.com/tpu"
TRAINER = """
import os
seen = [name for name in os.environ if name.startswith(("TPU_", "MEGASCALE_"))]  # JAX sets one
import http.server, threading, time
from pathlib import Path
from ling_trainer.distributed import initialize
from ling_trainer.environment import read_environment

me = read_environment(os.environ)
initialize(me.group, bind_ip=me.pod_ip, start_timeout=240, on_timeout=lambda _: os._exit(42))
import jax
from jax.experimental import multihost_utils
total = int(multihost_utils.process_allgather(jax.numpy.asarray(jax.process_index())).sum())
print(f"process {jax.process_index()} of {jax.process_count()} is container {me.container_index}"
      f" at {me.pod_ip}, sum {total}, {len(seen)} of GKE's variables", flush=True)

class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = f'ling_run_info{{pod_uid="{me.pod_uid}"}} 1\\n'
        body += f"ling_step {100 + jax.process_index()}\\nling_learning_loss 2.5\\n"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body.encode())
    def log_message(self, *_):
        pass

server = http.server.HTTPServer((me.pod_ip, 9464 + me.container_index), Page)
threading.Thread(target=server.serve_forever, daemon=True).start()
while True:
    time.sleep(0.1)
    if jax.process_index() == 3 and Path(os.environ["DIVERGE"]).exists():
        os._exit(90)
"""


@pytest.mark.slow
def test_two_containers_a_host_form_one_group_and_the_end_of_one_of_them_halts_the_run(
    runs: TrainingRuns,
    start_operator: StartOperator,
    kubelet: ProcessKubelet,
    tmp_path: Path,
    story: Story,
) -> None:
    start_operator()
    script, diverge = tmp_path / "trainer.py", tmp_path / "diverge"
    script.write_text(TRAINER)
    run = shell_run("dual", "")
    del run["spec"]["cpu"]
    run["spec"] |= {
        "tpu": {"accelerator": "tpu7x-16", "parallelContainers": 2},
        "command": [sys.executable, str(script)],
        "health": {"scrapeIntervalSeconds": 1},
    }
    run["spec"]["template"] |= {
        "hostNetwork": True,
        "env": variables(
            {"JAX_PLATFORMS": "cpu", "DIVERGE": str(diverge), "HOSTNAME": "$(POD_IP)"}
        ),
    }
    runs.apply(run)
    assert runs.wait_step("dual", 100) == 100, "the page of process 0, and of no other container"

    pods = runs.pods("dual")
    assert len({pod["spec"]["nodeName"] for pod in pods}) == 2
    # Each of both containers says it, after the last of all four has joined.
    words = "of GKE's variables"
    wait_for("all their words", lambda: kubelet.logs(runs.namespace).count(words) == 4)
    lines: list[str] = []
    for pod in pods:
        for container in pod["spec"]["containers"]:
            assert container["resources"]["limits"][CHIPS] == "2"
            log = kubelet.log(runs.namespace, pod["metadata"]["name"], container["name"])
            lines += re.findall(r"process \d of 4 is container \d.*, sum 6, 0 of GKE's", log)
            story.tell(f"{container['name']}: {log.strip()}")
    found = sorted(re.findall(r"process (\d) of 4 is container (\d)", "\n".join(lines)))
    assert found == [("0", "0"), ("1", "1"), ("2", "0"), ("3", "1")]

    diverge.touch()
    halted = runs.wait_phase("dual", "Halted")
    assert halted["status"]["halt"]["reason"] == "Diverged"
    runs.wait_no_live_pod("dual")
    assert runs.status("dual")["phase"] == "Halted"


def test_what_the_template_says_reaches_the_pods_and_the_scheduler(
    runs: TrainingRuns, start_operator: StartOperator
) -> None:
    start_operator()
    spot = {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true"}
    claim = {"name": "models", "persistentVolumeClaim": {"claimName": "models"}}
    run = shell_run("whole", "sleep 300")
    del run["spec"]["cpu"]
    run["spec"]["tpu"] = {"accelerator": "v6e-16", "slices": 2}
    run["spec"]["template"] |= {
        "labels": {"team": "ling"},
        "annotations": {"gke-gcsfuse/volumes": "true"},
        "nodeSelector": {"cloud.google.com/gke-spot": "true"},
        "tolerations": [{**spot, "effect": "NoSchedule"}],
        "imagePullSecrets": [{"name": "pull"}],
        "initContainers": [{"name": "fetch", "image": "fetch:1", "command": ["true"]}],
        "sidecars": [{"name": "logs", "image": "logs:1", "command": ["true"]}],
        "volumes": [claim],
        "volumeMounts": [{"name": "models", "mountPath": "/models"}],
        "serviceAccountName": "default",
        "privileged": True,
        "terminationGracePeriodSeconds": 77,
    }
    runs.apply(run)
    # JobSet makes the others of a slice once the first has its node pool.
    wait_for("a pod of each slice", lambda: len(runs.pods("whole")) >= 2)
    for pod in runs.pods("whole"):
        metadata, spec = pod["metadata"], pod["spec"]
        assert metadata["labels"]["team"] == "ling"
        assert metadata["annotations"]["gke-gcsfuse/volumes"] == "true"
        assert spec["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
        assert spec["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "4x4"
        assert {t["key"] for t in spec["tolerations"]} >= {CHIPS, spot["key"]}
        assert spec["imagePullSecrets"] == [{"name": "pull"}]
        assert [c["name"] for c in spec["initContainers"]] == ["fetch"]
        assert [c["name"] for c in spec["containers"]] == ["jax-tpu", "logs"]
        assert claim in spec["volumes"]
        mounts = {m["mountPath"] for m in spec["containers"][0]["volumeMounts"]}
        assert mounts >= {"/models", "/dev/shm"}
        assert spec["containers"][0]["securityContext"]["privileged"] is True
        assert spec["terminationGracePeriodSeconds"] == 77
        pool = "cloud.google.com/gke-nodepool"
        terms = spec["affinity"]["podAntiAffinity"]
        (term,) = terms["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["topologyKey"] == pool, "a slice has a node pool to itself"
    runs.wait_phase("whole", "Starting")
