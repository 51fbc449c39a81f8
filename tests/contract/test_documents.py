"""What the documents say that can be checked without reading: links, objects, reasons, names."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from ling_operator.api import HealthPolicy, Reason, TrainingRun, TrainingRunSpec, dump
from ling_operator.jobset import build_jobset
from ling_operator.runnable import require_runnable
from ling_trainer.ends import ExitCode
from ling_trainer.schema import Schema

FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FILE = re.compile(
    r"(?<![\w/-])(?:benchmarks|charts|docs|manifests|operator|scripts|tests|trainer)/[\w./-]+\.\w+"
)


@pytest.fixture(scope="module")
def documents(repository: Path) -> dict[Path, str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=repository,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    return {repository / name: (repository / name).read_text() for name in listed}


@pytest.fixture(scope="module")
def handbook(repository: Path) -> str:
    return (repository / "docs" / "operations.md").read_text()


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub makes of a document's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


def test_every_link_within_the_repository_leads_somewhere(documents: dict[Path, str]) -> None:
    dead: list[str] = []
    for path, text in documents.items():
        for link in LINK.findall(FENCED.sub("", text)):
            target, _, anchor = link.partition("#")
            file = (path.parent / target).resolve() if target else path
            if "://" in link or (file.is_dir() and not anchor):
                continue
            if not file.is_file() or (anchor and anchor not in anchors(file.read_text())):
                dead.append(f"{path}: {link}")
    assert dead == []


def test_every_file_that_is_named_is_there(documents: dict[Path, str], repository: Path) -> None:
    not_there = {
        f"{path.relative_to(repository)}: {name}"
        for path, text in documents.items()
        for name in FILE.findall(text)
        if not (repository / name).is_file() and not name.startswith("docs/adr/NNNN")
    }
    assert not_there == {"CONTRIBUTING.md: operator/__init__.py"}, "which must not be there"


def test_every_yaml_block_is_what_the_schema_takes(documents: dict[Path, str]) -> None:
    """A whole TrainingRun, or fields of its spec."""
    runs, pieces = 0, 0
    for path, text in documents.items():
        for language, block in FENCED.findall(text):
            for document in yaml.safe_load_all(block) if language == "yaml" else ():
                if document.get("kind") == "TrainingRun":
                    require_runnable(TrainingRun.parse(document))
                    runs += 1
                elif document.keys() <= {f.alias for f in TrainingRunSpec.model_fields.values()}:
                    require_runnable(_run_with(document))
                    pieces += 1
                else:
                    assert document.keys() <= {"inhibit_rules"} or "apiVersion" in document, path
    assert (runs, pieces) >= (1, 4)


def _run_with(fields: dict[str, Any]) -> TrainingRun:
    spec = {"image": "trainer", "run": {"preset": "ling2_tiny", "baseOutputDirectory": "runs"}}
    machines = {} if "tpu" in fields else {"tpu": {"accelerator": "v5p-128"}}
    data = {"data": {"datasetType": "synthetic"}}
    return TrainingRun.parse(
        {
            "apiVersion": "ling.primatrix.io/v1alpha1",
            "kind": "TrainingRun",
            "metadata": {"name": "run"},
            "spec": {**spec, "run": spec["run"] | data, **machines, **fields},
        }
    )


def test_the_handbook_explains_every_reason_and_none_that_is_not_there(handbook: str) -> None:
    conditions = _between(handbook, "## Phases and conditions", "## Health rules")
    rules = _between(handbook, "## Health rules", "## A run was halted")
    assert set(Reason) - set(re.findall(r"\w+", conditions + rules)) == set()
    cells = re.findall(r"^\|[^|]*\|([^|]*)\|", conditions, re.MULTILINE)[2:]
    told = {word for cell in cells for word in re.findall(r"[A-Z]\w+", cell)}
    assert told
    assert told - set(Reason) == set()


def test_the_handbook_has_every_health_rule_with_its_defaults(handbook: str) -> None:
    section = _between(handbook, "## Health rules", "## A run was halted")
    rows = re.findall(r"^\| `(\w+)` \|[^|]+\|[^|]+\|([^|]+)\| (\w+)", section, re.MULTILINE)
    told = {rule: (_numbers(cell), action) for rule, cell, action in rows}
    for field in HealthPolicy.model_fields.values():
        if isinstance(field.default, Schema):
            defaults = dump(field.default)
            action = defaults.pop("action")
            assert told.pop(str(field.alias)) == (defaults, action), field.alias
    assert told == {}


def _numbers(cell: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"`(\w+)` ([-+\w.]+)", cell)}


def test_the_handbook_has_every_exit_code_that_the_trainer_chooses(handbook: str) -> None:
    section = _between(handbook, "## Exit codes of the trainer", "## Phases and conditions")
    codes = re.findall(r"^\| ([\d, ]+) \|", section, re.MULTILINE)
    assert {int(code) for cell in codes for code in cell.split(",")} >= set(ExitCode)


def _between(text: str, begin: str, end: str) -> str:
    return text[text.index(f"\n{begin}\n") : text.index(f"\n{end}\n")]


def test_the_handbook_names_every_variable_that_a_trainer_is_given(handbook: str) -> None:
    machines = {"tpu": {"accelerator": "tpu7x-32", "parallelContainers": 2}}
    given = _variables(machines) | _variables({"cpu": {"processes": 2}, "tpu": None})
    assert given - set(re.findall(r"[A-Z]+_[A-Z_]+", handbook)) == set()


def _variables(fields: dict[str, Any]) -> set[str]:
    jobset = build_jobset(_run_with(fields), attempt=2, restore_before_step=7)
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    return {variable["name"] for c in pod["containers"] for variable in c["env"]}
