"""A trainer that is not ours: it speaks the contract in a page of Python and trains nothing.

The environment says what goes wrong: NAN_STEP (the loss is NaN from there on), NAN_FILE (or once
that file is there), EXIT (step:code, of process 0 and once a directory: a peer of which it is
true too would do the same after the restart), STEP_SECONDS, IGNORE_SIGTERM, SIGTERM_SECONDS and
SIGTERM_EXIT (how long it takes to end, and its code), LOST_PEER (its code when one of NUM_PEERS
processes is gone that it has seen) and LOST_PEER_SECONDS (how long it takes to notice).
"""

import fcntl
import http.server
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

config = json.loads(os.environ["LING_RUN_CONFIG"])
directory = Path(config["base_output_directory"], config["run_name"])
index = int(os.environ.get("LING_CONTAINER_INDEX", "0"))
process = int(os.environ.get("LING_HOST_INDEX", os.environ.get("JOB_COMPLETION_INDEX", "0")))
directory.mkdir(parents=True, exist_ok=True)
saved = directory / f"step-{process}"
step = int(saved.read_text()) if saved.exists() else 0
nan_step = int(os.environ.get("NAN_STEP", "0"))
nan_file = Path(os.environ.get("NAN_FILE", "/nowhere/nan"))
nonfinite = 0
labels = f'run="{os.environ["LING_RUN"]}",run_namespace="{os.environ["LING_RUN_NAMESPACE"]}"'


def page() -> str:
    loss = "NaN" if nonfinite else str(10 / (step + 1))
    return (
        f'ling_run_info{{{labels},pod_uid="{os.environ["POD_UID"]}"}} 1\n'
        f"ling_step{{{labels}}} {step}\nling_target_steps{{{labels}}} {config['steps']}\n"
        f"ling_learning_loss{{{labels}}} {loss}\n"
        f"ling_learning_is_nan{{{labels}}} {int(nonfinite > 0)}\n"
        f"ling_last_finite_step{{{labels}}} {step - nonfinite}\n"
        f'ling_nonfinite_steps_total{{{labels},kind="nan",signal="NonFiniteLoss"}} {nonfinite}\n'
        f"ling_nonfinite_steps_consecutive_max{{{labels}}} {nonfinite}\n"
        f"ling_perf_tokens_per_second{{{labels}}} 1234\n"
    )


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = page().encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
        pass


def leave(*_: object) -> None:
    print(f"SIGTERM at step {step}", flush=True)
    if "IGNORE_SIGTERM" not in os.environ:
        saved.write_text(str(step))
        time.sleep(float(os.environ.get("SIGTERM_SECONDS", "0")))
        os._exit(int(os.environ.get("SIGTERM_EXIT", "143")))


def hold_hands(peers: int, code: int) -> None:
    """End with `code` once a peer that was there is gone, as when a collective breaks."""
    own = (directory / f"alive-{process}").open("w")
    fcntl.flock(own, fcntl.LOCK_EX)  # the kernel lets go of it, however the process ends
    seen: set[int] = set()
    told = False
    while True:
        for peer in set(range(peers)) - {process}:
            with (directory / f"alive-{peer}").open("a") as theirs:
                try:
                    fcntl.flock(theirs, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    seen.add(peer)
                    continue
            if peer in seen:
                time.sleep(float(os.environ.get("LOST_PEER_SECONDS", "0")))
                print(f"peer {peer} is gone", flush=True)
                saved.write_text(str(step))
                os._exit(code)
        if len(seen) == peers - 1 and not told:
            told = True
            print("all peers are seen", flush=True)
        time.sleep(0.05)


signal.signal(signal.SIGTERM, leave)
port = config.get("metrics", {}).get("metrics_port", 9464) + index
server = http.server.ThreadingHTTPServer((os.environ["POD_IP"], port), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
if lost := os.environ.get("LOST_PEER"):
    gang = int(os.environ["NUM_PEERS"]), int(lost)
    threading.Thread(target=hold_hands, args=gang, daemon=True).start()
print(f"process {process} on port {port} from step {step}", flush=True)
while step < config["steps"]:
    time.sleep(float(os.environ.get("STEP_SECONDS", "0.05")))
    step += 1
    nonfinite += int(0 < nan_step <= step or nan_file.exists())
    at, _, code = os.environ.get("EXIT", "0:0").partition(":")
    marker = directory / "exited"
    if process == 0 and step == int(at) and not marker.exists():
        marker.touch()
        saved.write_text(str(step))
        print(f"ending with {code}", flush=True)
        os._exit(int(code))
    if nonfinite and config["health"]["trainer_stops"]:
        words = {"reason": "NonFiniteLoss", "step": str(step), "lastFiniteStep": str(step - 1)}
        words |= {"value": "nan", "signal": "NonFiniteLoss", "process": str(process)}
        Path(os.environ.get("LING_TERMINATION_LOG", "/dev/termination-log")).write_text(
            json.dumps(words)
        )
        os._exit(90)
saved.write_text(str(step))
sys.exit(0)
