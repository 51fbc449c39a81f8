"""Nothing in tests/golden is left out: neither a file nor an array."""

import tomllib
from typing import Any

import pytest

import golden_table as plugin


def test_golden_every_array_of_every_file_is_compared_with_something(golden_table: Any) -> None:
    """Runs last; what the tests read before it is measured by plugins/golden_table.py."""
    if not golden_table.whole:
        pytest.skip("only a part of the golden tests was selected")
    missed = {row.file: row.missed for row in golden_table.rows() if row.missed}
    assert not missed


def test_an_array_that_is_spared_is_in_its_file_and_has_a_reason() -> None:
    rules = tomllib.loads(plugin.SPARED.read_text())["spared"]
    for rule in rules:
        names = plugin.cases_in(plugin.GOLDEN / rule["file"])
        assert len(rule["why"]) > 10
        for pattern in rule["arrays"]:
            assert any(plugin.fnmatch.fnmatchcase(name, pattern) for name in names), pattern


def test_a_comparison_with_a_golden_that_does_not_exist_is_refused(show_golden: Any) -> None:
    with pytest.raises(LookupError, match=r"'maxtext/expect\.npz' is no file or folder"):
        show_golden("maxtext/expect.npz (grad)", cases="1/1", worst=0.0, tolerance=1.0)
