"""What is in the images, and that they run where nothing may be written and nobody is root."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from lingcluster.image_build import BuiltImage
from lingcluster.runc_container import RuncContainer, Start

pytestmark = pytest.mark.slow

OPERATOR_MEGABYTES = 150
LIST_PACKAGES = """
import importlib.metadata as m, json
print(json.dumps(sorted((d.name.lower(), d.version) for d in m.distributions())))
"""
IMPORT_OPERATOR = """
import importlib, importlib.util, pkgutil, ling_operator
names = [m.name for m in pkgutil.iter_modules(ling_operator.__path__, "ling_operator.")]
for name in names:
    importlib.import_module(name)
from kubernetes import client, config
print(len(names), [n for n in ("jax", "numpy", "pip") if importlib.util.find_spec(n)])
"""
WRITE_ANYWHERE = """
import os, pathlib
for name in ("/", "/tmp", "/opt/ling", "/usr", "/var/tmp"):
    try:
        pathlib.Path(name, "probe").touch()
    except OSError as error:
        print(name, error.strerror)
print(os.getuid(), os.getgid(), os.getpid())
"""


@pytest.fixture(params=["operator", "trainer"])
def image(request: pytest.FixtureRequest) -> BuiltImage:
    return request.getfixturevalue(f"{request.param}_image")


def test_the_operators_image_is_small_and_holds_no_jax(
    base_image: BuiltImage, operator_image: BuiltImage, run_container: Callable[..., str]
) -> None:
    added = (operator_image.size - base_image.size) / 1e6
    print(f"base {base_image.size / 1e6:.0f} MB, the operator {added:.0f} MB on top of it")
    assert added < OPERATOR_MEGABYTES
    modules, heavy = run_container(operator_image, "python3", "-c", IMPORT_OPERATOR).split(" ", 1)
    assert int(modules) > 30
    assert heavy.strip() == "[]"


def test_the_image_says_what_it_is_and_starts_its_program_without_a_shell(
    image: BuiltImage, repository: Path
) -> None:
    config, name = image.config, image.name.rpartition("/")[2].partition(":")[0]
    project = (repository / "pyproject.toml").read_text()
    (version,) = re.findall('^version = "(.*)"', project, re.M)
    labels = {key.rpartition(".")[2]: value for key, value in config["Labels"].items()}
    assert (labels["title"], labels["version"], labels["licenses"]) == (
        name,
        version,
        "Apache-2.0",
    )
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?|unknown", labels["revision"])
    assert labels["description"]
    assert config["User"] == "65532:65532"
    assert config["Entrypoint"][0] in {"ling-operator", "python3"}
    assert "sh" not in config["Entrypoint"]
    assert not config.get("Cmd")


def test_the_sbom_lists_exactly_what_is_installed(
    image: BuiltImage, run_container: Callable[..., str]
) -> None:
    sbom = json.loads(run_container(image, "cat", "/opt/ling/sbom.cdx.json"))
    installed = json.loads(run_container(image, "python3", "-c", LIST_PACKAGES))
    assert sbom["bomFormat"] == "CycloneDX"
    root = sbom["metadata"]["component"]
    listed = [*sbom["components"], root]
    assert root["name"] == "ling-tpu"
    assert sorted([each["name"].lower(), each["version"]] for each in listed) == installed
    assert ["ling-tpu", metadata.version("ling-tpu")] in installed


def test_nothing_may_be_written_and_the_user_is_not_root(
    image: BuiltImage, run_container: Callable[..., str]
) -> None:
    *refused, ids = run_container(image, "python3", "-c", WRITE_ANYWHERE).splitlines()
    assert len(refused) == 5
    assert {line.partition(" ")[2] for line in refused} == {"Read-only file system"}
    assert ids == "65532 65532 1"


def test_the_operator_without_a_cluster_says_what_it_needs(
    operator_image: BuiltImage, start_container: Callable[[BuiltImage, Start], RuncContainer]
) -> None:
    container = start_container(operator_image, Start())
    assert container.wait(timeout=60) not in {0, 126, 127}
    assert "no usable cluster configuration" in container.output()
