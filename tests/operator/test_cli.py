"""The command `ling` where it needs no cluster: usage, render, unreachable servers."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ling_operator.cli import main


@pytest.fixture
def file(scene: Any, tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(scene.manifest()))
    return path


def ling(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


@pytest.mark.parametrize("form", ["yaml", "json"])
def test_render_prints_the_jobset_with_overrides_wherever_they_stand(
    file: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    code, out, _ = ling(
        capsys, "render", str(file), "steps=7", "-o", form, "seed=3", "--attempt", "4"
    )
    assert code == 0
    jobset = yaml.safe_load(out) if form == "yaml" else json.loads(out)
    assert jobset["kind"] == "JobSet"
    assert jobset["metadata"]["labels"]["ling.primatrix.io/attempt"] == "4"
    container = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"][
        "containers"
    ][0]
    env = {variable["name"]: variable.get("value", "") for variable in container["env"]}
    settings = json.loads(env["LING_RUN_CONFIG"])
    assert (settings["steps"], settings["seed"]) == (7, 3)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        ({"kind": "Pod"}, "holds kind Pod"),
        ({"spec": {"image": "x"}}, "set exactly one of tpu, cpu and watch"),
        ({"spec": {"image": "x", "cpu": {}, "sped": 1}}, "spec.sped"),
        ({"apiVersion": "ling.primatrix.io/v9"}, "ling.primatrix.io/v9"),
    ],
)
def test_a_wrong_file_ends_with_2_and_says_what_is_wrong(
    file: Path, capsys: pytest.CaptureFixture[str], edit: dict[str, Any], says: str
) -> None:
    manifest = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump(manifest | edit))
    code, out, err = ling(capsys, "render", str(file))
    assert code == 2
    assert says in err
    assert err.startswith("ling: ")
    assert out == ""


def test_a_file_that_is_not_there_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = ling(capsys, "run", "no-such-file.yaml", "--local")
    assert code == 2
    assert "no-such-file.yaml cannot be read" in err


@pytest.mark.parametrize(
    "arguments", [["list", "extra"], ["render", "f", "--frob"], [], ["get"], ["fly"]]
)
def test_wrong_usage_ends_with_2(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    code, _, err = ling(capsys, *arguments)
    assert code == 2
    assert "usage: ling" in err


def test_an_api_server_that_does_not_answer_ends_with_1_and_names_the_request(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "c",
                "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
                "users": [{"name": "c", "user": {}}],
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
            }
        )
    )
    code, _, err = ling(capsys, "list", "--kubeconfig", str(kubeconfig))
    assert code == 1
    assert "trainingruns" in err
    assert "Traceback" not in err


def test_a_kubeconfig_that_is_none_ends_with_1_and_says_what_to_pass(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, _, err = ling(capsys, "get", "x", "--kubeconfig", str(tmp_path / "none"))
    assert code == 1
    assert "--kubeconfig" in err


def test_every_module_of_the_operator_imports_without_the_trainers_dependencies() -> None:
    """What a wheel installed with the operator's extra alone has: no JAX, no numpy."""
    program = """
import importlib, pkgutil, sys
refused = {"jax", "jaxlib", "flax", "optax", "orbax", "numpy", "grain", "jaxtyping", "ml_dtypes"}
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ModuleNotFoundError(f"refused: {name}")
sys.meta_path.insert(0, Refuse())
import ling_operator
names = [m.name for m in pkgutil.walk_packages(ling_operator.__path__, "ling_operator.")]
for name in names:
    importlib.import_module(name)
print(len(names), sorted(refused & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(r"(\d+) \[\]\n", done.stdout)
    assert found is not None, done.stdout
    assert int(found[1]) > 20


def test_a_local_run_and_a_render_do_not_load_the_kubernetes_client() -> None:
    program = """
import sys
import ling_operator.cli, ling_operator.app
print(sorted(m for m in sys.modules if m.partition(".")[0] == "kubernetes"))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "[]\n"
