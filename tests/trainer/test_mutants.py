"""Faults put into the product one line at a time; each must turn the test that it names red."""

import importlib.util
import inspect
import shutil
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).parent
PRODUCT = "ling_trainer"
MUTANTS: list[dict[str, Any]] = [
    mutant
    for file in sorted((HERE / "mutants").glob("*.toml"))
    for mutant in tomllib.loads(file.read_text())["mutant"]
]


def _load(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"victims_{Path(file).stem}", HERE / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def victims() -> dict[str, ModuleType]:
    """Modules of the tests that mutants name, once more, to call their functions."""
    return {file: _load(file) for file in {m["breaks"].partition("::")[0] for m in MUTANTS}}


@pytest.fixture(scope="module")
def copy(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Copy the package under another name, with one line of one file changed."""
    sources = repository / "trainer" / PRODUCT
    root = tmp_path_factory.mktemp("mutants")
    ignore = shutil.ignore_patterns("__pycache__")

    def make(name: str, mutant: dict[str, Any] | None) -> str:
        folder = root / name
        shutil.copytree(sources, folder, ignore=ignore)
        if mutant:
            source = (folder / mutant["file"]).read_text()
            found = source.count(mutant["line"])
            assert found == 1, f"{mutant['file']} holds {mutant['line']!r} {found} times"
            (folder / mutant["file"]).write_text(source.replace(mutant["line"], mutant["becomes"]))
        for path in folder.rglob("*.py"):
            path.write_text(path.read_text().replace(PRODUCT, name))
        return name

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(root))
        yield make


@pytest.fixture
def call(victims: dict[str, ModuleType], request: pytest.FixtureRequest) -> Any:
    """Call a test with a package, its own parameters, and fixtures for the rest."""

    def run(package: str, breaks: str, arguments: dict[str, Any]) -> None:
        file, _, name = breaks.partition("::")
        test = getattr(victims[file], name)
        given = {"package": package} | arguments
        missing = set(inspect.signature(test).parameters) - set(given)
        assert "package" in inspect.signature(test).parameters, f"{breaks} takes no package"
        test(**given, **{fixture: request.getfixturevalue(fixture) for fixture in missing})

    return run


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant["name"])
def test_a_mutant_turns_the_test_it_names_red(
    mutant: dict[str, Any], copy: Any, call: Any
) -> None:
    package = copy(f"ling_mutant_{MUTANTS.index(mutant)}", mutant)
    # Nothing but a failed assertion: a mutant that cannot be imported proves nothing.
    with pytest.raises(AssertionError):
        call(package, mutant["breaks"], mutant.get("arguments", {}))
    print(f"\n| {mutant['name']} | {mutant['file']} | {mutant['breaks']} |")


def test_a_copy_without_a_mutant_is_green(copy: Any, call: Any) -> None:
    package = copy("ling_mutant_none", None)
    for mutant in MUTANTS:
        if mutant["breaks"].startswith("test_rules.py"):
            call(package, mutant["breaks"], mutant.get("arguments", {}))


def test_the_documented_table_lists_every_mutant(repository: Path) -> None:
    text = (repository / "docs" / "numerics.md").read_text()
    rows = [f"| {m['name']} | `{m['file']}` | `{m['breaks'].split('::')[1]}` |" for m in MUTANTS]
    missing = [row for row in rows if row not in text]
    assert not missing, "docs/numerics.md lacks\n" + "\n".join(missing)
    assert len({m["name"] for m in MUTANTS}) == len(MUTANTS)
