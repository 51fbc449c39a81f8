"""Prometheus and Alertmanager as processes, and the web hook that a page ends at."""

from __future__ import annotations

import http.server
import json
import threading
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lingcluster.build import Programs
from lingcluster.processes import Process, Session, answers

_READY_TIMEOUT = 60.0


class WebHook:
    """An HTTP server that keeps what Alertmanager posts to it.

    Args:
      address: where it listens.
    """

    def __init__(self, address: str) -> None:
        self.notices: list[dict[str, Any]] = []
        notices = self.notices

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                notices.append(json.loads(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self._server = http.server.ThreadingHTTPServer((address, 0), Handler)
        self.url = f"http://{address}:{self._server.server_port}/page"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def alerts(self, name: str, *, status: str = "firing") -> list[dict[str, Any]]:
        """Return the alerts of that name that were posted with that status."""
        return [
            alert
            for notice in list(self.notices)
            for alert in notice["alerts"]
            if (alert["labels"]["alertname"], alert["status"]) == (name, status)
        ]

    def __enter__(self) -> WebHook:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Alertmanager(Process):
    """Alertmanager with one route, to a web hook, without any waiting.

    Args:
      programs: the built programs.
      folder: for its configuration, data and log.
      address: HOST:PORT where it listens.
      web_hook: where it posts.
      inhibit_rules: of its configuration.
      session: owner of the process.
    """

    def __init__(
        self,
        programs: Programs,
        folder: Path,
        *,
        address: str,
        web_hook: str,
        inhibit_rules: Sequence[Mapping[str, Any]],
        session: Session,
    ) -> None:
        self.address = address
        route = {
            "receiver": "page",
            "group_by": ["alertname", "run_namespace", "run"],
            "group_wait": "0s",
            "group_interval": "1s",
            "repeat_interval": "1h",
        }
        receiver = {"name": "page", "webhook_configs": [{"url": web_hook, "send_resolved": True}]}
        config = folder / "alertmanager.yml"
        content = {"route": route, "receivers": [receiver], "inhibit_rules": [*inhibit_rules]}
        config.write_text(yaml.safe_dump(content))
        super().__init__(
            "alertmanager",
            [
                programs["alertmanager"],
                f"--config.file={config}",
                f"--storage.path={folder / 'alertmanager'}",
                f"--web.listen-address={address}",
                "--cluster.listen-address=",
            ],
            log=folder / "alertmanager.log",
            session=session,
        )

    def wait_until_ready(self) -> None:
        """Return once it takes alerts.

        Raises:
          NotReadyError: it ended, or was not ready in time.
        """
        self.wait_ready(lambda: answers(f"http://{self.address}/-/ready"), timeout=_READY_TIMEOUT)


class Prometheus(Process):
    """Prometheus that scrapes and evaluates every second.

    Args:
      programs: the built programs.
      folder: for its configuration, data and log.
      address: HOST:PORT where it listens.
      targets: job -> the HOST:PORT of its pages.
      rules: rule files.
      alertmanager: HOST:PORT of one.
      session: owner of the process.
      labels: of every target, before relabelling.
      scrape: more settings of every job.
    """

    def __init__(
        self,
        programs: Programs,
        folder: Path,
        *,
        address: str,
        targets: Mapping[str, Sequence[str]],
        rules: Sequence[Path],
        alertmanager: str,
        session: Session,
        labels: Mapping[str, str] | None = None,
        scrape: Mapping[str, Any] | None = None,
    ) -> None:
        self.url = f"http://{address}"
        config = folder / "prometheus.yml"
        content = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(path) for path in rules],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]},
            "scrape_configs": [
                {
                    "job_name": job,
                    "static_configs": [{"targets": list(pages), "labels": dict(labels or {})}],
                    **(scrape or {}),
                }
                for job, pages in targets.items()
            ],
        }
        config.write_text(yaml.safe_dump(content))
        super().__init__(
            "prometheus",
            [
                programs["prometheus"],
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'prometheus'}",
                f"--web.listen-address={address}",
                "--web.external-url=http://prometheus.example/",
                "--web.route-prefix=/",
            ],
            log=folder / "prometheus.log",
            session=session,
        )

    def wait_until_ready(self) -> None:
        """Return once it answers queries.

        Raises:
          NotReadyError: it ended, or was not ready in time.
        """
        self.wait_ready(lambda: answers(f"{self.url}/-/ready"), timeout=_READY_TIMEOUT)

    def query(self, expr: str) -> list[dict[str, Any]]:
        """Evaluate an expression now; return its samples.

        Raises:
          OSError: no answer, or the expression is refused.
        """
        return self.get("query", query=expr)["result"]

    def value(self, expr: str) -> float | None:
        """Evaluate an expression now; return its only sample's value, None without one."""
        samples = self.query(expr)
        assert len(samples) <= 1, samples
        return float(samples[0]["value"][1]) if samples else None

    def firing(self, name: str) -> list[dict[str, Any]]:
        """Return the alerts of that name that fire, as /api/v1/alerts has them."""
        return [
            alert
            for alert in self.get("alerts")["alerts"]
            if (alert["labels"]["alertname"], alert["state"]) == (name, "firing")
        ]

    def get(self, what: str, **query: str) -> dict[str, Any]:
        """GET /api/v1/`what`; return its data."""
        url = f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.loads(answer.read())["data"]
