"""metrics.jsonl: valid JSON in any case, and no step twice after a restart."""

import json
import math

import pytest

from ling_trainer.journal import Journal


def write(path, steps, *, resumed_step=0):
    with Journal(path, resumed_step=resumed_step) as journal:
        for step in steps:
            journal.append(step, 12.5, {"learning/loss": float(step)})


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_numbers_json_does_not_know_become_strings_that_float_reads(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Journal(path, resumed_step=0) as journal:
        journal.append(1, 0.0, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 0.5})

    def refuse(text):
        raise AssertionError(f"bare {text}")

    line = json.loads(path.read_text(), parse_constant=refuse)
    assert line == {
        "step": 1,
        "time": 0.0,
        "a": "NaN",
        "b": "Infinity",
        "c": "-Infinity",
        "d": 0.5,
    }
    assert [float(line[key]) for key in "bc"] == [math.inf, -math.inf]


def test_a_restart_cuts_the_lines_it_will_write_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 8))
    write(path, range(6, 9), resumed_step=5)
    assert steps_in(path) == list(range(1, 9))


def test_a_restart_from_nothing_starts_the_file_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 8))
    write(path, [1, 2])
    assert steps_in(path) == [1, 2]


@pytest.mark.parametrize("torn", [b'{"step": 6, "lear', b"\0\0\0\n", b"[6]\n", b'{"a": 1}\n'])
def test_a_torn_line_of_a_killed_process_is_cut(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 6))
    with path.open("ab") as file:
        file.write(torn)
    write(path, [6, 7], resumed_step=5)
    assert steps_in(path) == list(range(1, 8))


def test_a_line_is_on_disk_before_the_next_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    journal = Journal(path, resumed_step=0)
    journal.append(1, 0.0, {})
    assert steps_in(path) == [1]
    journal.close()
