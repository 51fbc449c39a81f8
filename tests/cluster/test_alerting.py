"""A NaN of one step pages somebody: real trainers, operator, Prometheus, Alertmanager, web hook.

With LING_WRITE_ASSETS=1 the alert's JSON and the dashboard's picture go to docs/assets.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lingcluster.build import Programs
from lingcluster.client import Manifest, wait_for
from lingcluster.loopback import LoopbackBlock
from lingcluster.monitoring import Alertmanager, Prometheus, WebHook
from lingcluster.operator_process import StartOperator
from lingcluster.processes import Session
from lingcluster.story import Story
from lingcluster.training_runs import TrainingRuns

NAME = "ling2-run"
FAULT_STEP = 400
FROZEN_AT = FAULT_STEP - 60
NAIVE = {
    "NaiveGauge": "ling_learning_is_nan == 1",
    "NaiveLoss": "ling_learning_lm_loss > 100 or ling_learning_lm_loss != ling_learning_lm_loss",
}
WRITE_ASSETS = "LING_WRITE_ASSETS"


@pytest.mark.slow
def test_a_nan_of_one_step_between_two_scrapes_reaches_the_web_hook(
    programs: Programs,
    loopback: LoopbackBlock,
    cluster_session: Session,
    runs: TrainingRuns,
    start_operator: StartOperator,
    real_run: Callable[..., Manifest],
    repository: Path,
    story: Story,
    tmp_path: Path,
) -> None:
    operator = start_operator()
    runs.apply(_endless_run(real_run))
    runs.wait_step(NAME, 1)
    pages = [f"{pod['status']['podIP']}:9464" for pod in _by_process(runs.pods(NAME))]
    story.tell(f"training; pages at {pages}")
    with contextlib.ExitStack() as stack:
        web_hook = stack.enter_context(WebHook(loopback.control_plane))
        own, other = (f"{loopback.control_plane}:{port}" for port in loopback.free_ports(2))
        alertmanager = Alertmanager(
            programs,
            tmp_path,
            address=other,
            web_hook=web_hook.url,
            inhibit_rules=_documented_inhibitions(repository),
            session=cluster_session,
        )
        stack.callback(alertmanager.stop)
        prometheus = Prometheus(
            programs,
            tmp_path,
            address=own,
            targets={"trainer": pages, "operator": [operator.addresses.metrics]},
            rules=[*_rule_files(repository), _naive_rules(tmp_path)],
            alertmanager=other,
            session=cluster_session,
        )
        stack.callback(prometheus.stop)
        alertmanager.wait_until_ready()
        prometheus.wait_until_ready()
        first = wait_for("a scrape", lambda: prometheus.value("max(ling_step)"), timeout=60)
        story.tell(f"Prometheus scrapes every second, from step {first:.0f} on")

        page = f"http://{pages[0]}/metrics"
        _let_the_nan_pass_unseen(page, prometheus, story)
        assert _number(_read(page), "ling_learning_is_nan") == 0

        (alert,) = wait_for("the alert", lambda: prometheus.firing("LingLossNaN"), timeout=60)
        story.tell(f"/api/v1/alerts: {json.dumps(alert)}")
        (posted,) = wait_for("the page", lambda: web_hook.alerts("LingLossNaN"), timeout=60)
        story.tell(f"the web hook got: {json.dumps(posted)}")
        assert alert["labels"] == posted["labels"]
        assert alert["labels"] == {
            "alertname": "LingLossNaN",
            "run": NAME,
            "run_namespace": runs.namespace,
            "severity": "critical",
        }
        assert f"Run {runs.namespace}/{NAME} had a step" in posted["annotations"]["description"]

        window = "[10m]"
        assert prometheus.value(f"max(max_over_time(ling_learning_is_nan{window}))") == 0
        assert prometheus.query(f'max_over_time(ALERTS{{alertname=~"Naive.*"}}{window})') == []
        assert _number(_read(page), "ling_step") > FAULT_STEP
        story.tell("rules on the gauge, and on the loss, saw nothing; training goes on")

        _every_panel_shows_something(prometheus, repository, runs.namespace, story)
        _every_grafana_rule_is_zero_or_one(prometheus, repository, runs.namespace)
        _assert_clean(programs, "trainer", _read(page))
        _assert_clean(programs, "operator", operator.metrics())
        _write_assets(repository, prometheus, runs.namespace, posted, story)

        of_nan = _expression(prometheus, "LingLossNaN")
        assert prometheus.query(of_nan), "ten minutes are over before it is asked for"
        runs.edit(NAME, health={"nonFinite": {"action": "Ignore"}})
        wait_for("the rule to be silent", lambda: not prometheus.query(of_nan), timeout=60)
        story.tell("ignored: the rule of LingLossNaN finds nothing more")

        runs.edit(NAME, health={"nonFinite": {"action": "Halt"}})
        runs.wait_phase(NAME, "Halted")
        wait_for("the page", lambda: web_hook.alerts("LingRunDiverged"), timeout=60)
        story.tell("made to halt by the rule that had only alerted: LingRunDiverged is posted")
        broken = [rule for rule in _rules(prometheus) if rule["health"] != "ok"]
        assert broken == []


def _endless_run(real_run: Callable[..., Manifest]) -> Manifest:
    """Return a run that has one NaN and goes on after it."""
    run = real_run(NAME, steps=1_000_000)
    run["spec"]["run"]["fault"] = {"enabled": True, "faultStep": FAULT_STEP, "faultCount": 1}
    run["spec"]["run"]["evaluation"] = {"evalInterval": 100, "evalSteps": 1}
    run["spec"]["run"]["data"]["split"] = "90,10,0"
    run["spec"]["health"] = {
        "scrapeIntervalSeconds": 1,
        "trainerStops": False,
        "nonFinite": {"action": "Alert"},
        "straggler": {"action": "Ignore"},
    }
    return run


def _by_process(pods: list[Manifest]) -> list[Manifest]:
    index = "batch.kubernetes.io/job-completion-index"
    return sorted(pods, key=lambda pod: pod["metadata"]["labels"][index])


def _rule_files(repository: Path) -> list[Path]:
    return sorted((repository / "charts" / "ling-operator" / "rules").glob("*.yaml"))


def _documented_inhibitions(repository: Path) -> list[dict[str, Any]]:
    """Return what docs/operations.md tells people to give their Alertmanager."""
    text = (repository / "docs" / "operations.md").read_text()
    found = re.search(r"```yaml\n(inhibit_rules:.*?)```", text, re.DOTALL)
    assert found is not None
    return yaml.safe_load(found[1])["inhibit_rules"]


def _naive_rules(folder: Path) -> Path:
    """Write the rules that people write first."""
    path = folder / "naive.yaml"
    rules = [{"alert": name, "expr": expr} for name, expr in NAIVE.items()]
    path.write_text(yaml.safe_dump({"groups": [{"name": "naive", "rules": rules}]}))
    return path


def _let_the_nan_pass_unseen(page: str, prometheus: Prometheus, story: Story) -> None:
    """Freeze Prometheus while the step with the NaN goes by: it falls between two scrapes."""

    def step() -> float:
        return _number(_read(page), "ling_step")

    wait_for(f"step {FROZEN_AT}", lambda: step() >= FROZEN_AT, timeout=180)
    prometheus.signal(signal.SIGSTOP)
    frozen = step()
    assert frozen < FAULT_STEP, "too late: raise FAULT_STEP"
    wait_for("the NaN to pass", lambda: step() > FAULT_STEP + 5, timeout=180)
    prometheus.signal(signal.SIGCONT)
    story.tell(f"NaN at step {FAULT_STEP}, between a scrape before {frozen:.0f} and one after")


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def _number(page: str, series: str) -> float:
    found = re.search(rf"^{series}\{{.*\}} (\S+)$", page, re.MULTILINE)
    assert found is not None, series
    return float(found[1])


def _panels(repository: Path, namespace: str) -> Iterator[tuple[str, str]]:
    """Yield the title and each expression of every panel, its variables filled in."""
    folder = repository / "charts" / "ling-operator" / "dashboards"
    variables = {"$__rate_interval": "15s", "$run_namespace": namespace, "$run": NAME}
    for path in sorted(folder.glob("*.json")):
        dashboard = json.loads(path.read_text())
        for panel in dashboard["panels"]:
            for target in panel.get("targets", ()):
                expr = target["expr"]
                for name, value in variables.items():
                    expr = expr.replace(name, value)
                assert "$" not in expr
                yield f"{path.stem}: {panel['title']}", expr


def _every_panel_shows_something(
    prometheus: Prometheus, repository: Path, namespace: str, story: Story
) -> None:
    panels = list(_panels(repository, namespace))
    assert len(panels) > 40

    def empty() -> list[tuple[str, str]]:
        return [panel for panel in panels if not prometheus.query(panel[1])]

    wait_for("every panel to show something", lambda: not empty(), timeout=90, describe=empty)
    (nan,) = (expr for title, expr in panels if title == "ling-run: Non-finite steps")
    assert prometheus.value(nan) == 1
    story.tell(f"{len(panels)} expressions of the dashboards, none is empty; {nan} is 1")


def _every_grafana_rule_is_zero_or_one(
    prometheus: Prometheus, repository: Path, namespace: str
) -> None:
    path = repository / "charts" / "ling-operator" / "grafana" / "alert-rules.yaml"
    for group in yaml.safe_load(path.read_text())["groups"]:
        for rule in group["rules"]:
            samples = prometheus.query(rule["data"][0]["model"]["expr"])
            values = {float(sample["value"][1]) for sample in samples}
            assert values, f"{rule['title']} has no value, although there is a run"
            assert values <= {0.0, 1.0}
            if rule["title"] == "LingLossNaN":
                assert [sample["metric"] for sample in samples] == [
                    {"run": NAME, "run_namespace": namespace}
                ]
                assert values == {1.0}
            if rule["title"] in {"LingOperatorDown", "LingRunDiverged", "LingRunStalled"}:
                assert values == {0.0}


def _assert_clean(programs: Programs, whose: str, page: str) -> None:
    """Ask promtool for what is bad style in a page of metrics."""
    checked = subprocess.run(
        [programs["promtool"], "check", "metrics"],
        input=page,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, ""), whose


def _expression(prometheus: Prometheus, alert: str) -> str:
    (rule,) = (rule for rule in _rules(prometheus) if rule["name"] == alert)
    return rule["query"]


def _rules(prometheus: Prometheus) -> list[dict[str, Any]]:
    return [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]


def _write_assets(
    repository: Path,
    prometheus: Prometheus,
    namespace: str,
    alert: dict[str, Any],
    story: Story,
) -> None:
    if os.environ.get(WRITE_ASSETS) != "1":
        return
    assets = repository / "docs" / "assets"
    (assets / "alert-loss-nan.json").write_text(json.dumps(alert, indent=1) + "\n")
    program = [sys.executable, str(repository / "scripts" / "dashboard_picture.py")]
    picture = assets / "dashboard-run.png"
    program += ["--prometheus", prometheus.url, "--namespace", namespace, "--run", NAME]
    subprocess.run([*program, "--output", str(picture)], check=True)
    story.tell(f"wrote {picture}")
