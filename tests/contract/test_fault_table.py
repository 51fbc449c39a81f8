"""docs/faults.md has a row for each fault that a test measures, and no other."""

import ast
import re
from pathlib import Path


def measured(tests: Path) -> dict[str, str]:
    """Return the fault of each `faults.record(...)`, and the file that it is in."""
    found: dict[str, str] = {}
    for path in sorted(tests.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id="faults"), attr="record"),
                    args=[ast.Constant(value=str(fault)), *_],
                ):
                    found[fault] = path.name
                case _:
                    pass
    return found


def test_the_committed_table_has_the_faults_that_tests_measure(repository: Path) -> None:
    text = (repository / "docs" / "faults.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \| `?(test_\w+\.py)`? \|$", text, re.M)
    table = {fault: file for fault, _, _, file in rows}
    assert table == measured(repository / "tests" / "cluster")
    assert all(re.search(r"\d", times) for _, times, _, _ in rows), "a row without a figure"
