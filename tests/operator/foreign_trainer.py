"""A trainer that is not ours, in a page: of the contract it exports what SERIES names.

The loss is NaN from step NAN_STEP on, or while the file NAN_FILE is there; EXIT_CODE then ends it.
"""

import http.server
import os
import signal
import threading
import time
from pathlib import Path

step, bad_steps = 0, 0
shown = os.environ["SERIES"].split()


class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        loss = "nan" if bad_steps else str(2 + 1 / (step + 1))
        series = {
            "ling_step": f" {step}",
            "ling_learning_lm_loss": f" {loss}",
            "ling_learning_is_nan": f" {int(bad_steps > 0)}",
            "ling_nonfinite_steps_total": f'{{kind="nan",signal="NonFiniteLoss"}} {bad_steps}',
            "ling_run_info": f'{{pod_uid="{os.environ.get("POD_UID", "")}"}} 1',
        }
        body = "".join(f"{name}{series[name]}\n" for name in shown).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)


signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
if shown and os.environ.get("JOB_COMPLETION_INDEX", "0") == "0":
    address = os.environ["POD_IP"], int(os.environ.get("PORT", "9464"))
    server = http.server.ThreadingHTTPServer(address, Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
while step < int(os.environ.get("STEPS", "100000")):
    time.sleep(0.1)
    step += 1
    at, file = int(os.environ.get("NAN_STEP", "0")), Path(os.environ.get("NAN_FILE", "/no/file"))
    bad_steps += int(0 < at <= step or file.exists())
    if bad_steps and "EXIT_CODE" in os.environ:
        os._exit(int(os.environ["EXIT_CODE"]))
