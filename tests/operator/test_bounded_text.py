"""Text of processes made fit for an object."""

import json

from hypothesis import given
from hypothesis import strategies as st

from ling_operator.bounded_text import clip, last_lines, printable

ANYTHING = st.text(st.characters(exclude_categories=()), max_size=400)


@given(ANYTHING, st.integers(16, 120))
def test_a_clipped_text_is_short_printable_utf_8_whatever_it_was(text: str, limit: int) -> None:
    short = clip(text, limit)
    assert len(short.encode()) <= limit
    assert all(c.isprintable() or c in "\n\t" for c in short)
    json.dumps(short)


@given(st.lists(ANYTHING, max_size=12), st.integers(1, 5), st.integers(0, 200))
def test_last_lines_keep_both_bounds_and_the_order(
    texts: list[str], lines: int, limit: int
) -> None:
    text = "\n".join(texts)
    kept = last_lines(text, lines=lines, limit=limit)
    assert len(kept) <= lines
    assert sum(len(line.encode()) + 1 for line in kept) <= limit
    assert all(line.strip() and "\n" not in line for line in kept)


def test_the_last_lines_are_the_last_ones() -> None:
    text = "".join(f"step {i}\n\n" for i in range(100))
    assert last_lines(text, lines=3, limit=4096) == ("step 97", "step 98", "step 99")


def test_a_line_that_is_too_long_keeps_its_beginning_and_its_end() -> None:
    line = "Traceback " + "x" * 5000 + " ValueError: no"
    (kept,) = last_lines(f"before\n{line}\n", lines=5, limit=100)
    assert kept.startswith("Traceback xxx")
    assert kept.endswith("xxx ValueError: no")
    assert len(kept) < 100


def test_a_clipped_message_begins_and_ends_as_it_did() -> None:
    short = clip('{"reason": "NonFiniteLoss", ' + "x" * 900 + "the end}", 512)
    assert short.startswith('{"reason": "NonFiniteLoss", ')
    assert short.endswith("xxthe end}")
    assert len(short) == 512


def test_colours_progress_bars_and_control_characters_do_not_reach_the_object() -> None:
    text = "\x1b[31mred\x1b[0m \x1b]8;;http://x\x07link\x1b]8;;\x07\r 10%\r 20%\nend\x00\ud800"
    assert last_lines(text, lines=9, limit=99) == ("red link", " 10%", " 20%", "end\ufffd\ufffd")
    assert printable("a\tb") == "a\tb"
