"""`ling-train compare`: our journal beside lines as Megatron's training_log writes them."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ling_trainer.cli import main
from ling_trainer.compare import relative_error
from ling_trainer.megatron_log import parse_log

type Losses = Mapping[int, tuple[float, float]]
"""lm loss and mtp_1 loss by step."""


def curve(steps: range) -> dict[int, tuple[float, float]]:
    return {n: (2.179 - 0.002 * n, 2.385 - 0.002 * n) for n in steps}


def megatron_line(iteration: int, losses: Mapping[str, float], *, skipped: int = 0, nan: int = 0,
                  stamp: str = " [2026-09-05 16:08:14]") -> str:  # fmt: skip
    """Write what training_log does; a key whose average is NaN is left out."""
    line = f"{stamp} iteration {iteration:8d}/{100:8d} | consumed samples: {iteration * 128:12d} |"
    line += " elapsed time per iteration (ms): 11182.0 | throughput per GPU (TFLOP/s/GPU): 128.2 |"
    line += f" learning rate: {3e-5:.6E} | global batch size: {128:5d} |"
    for key, value in losses.items():
        if value >= 0:
            line += f" {key}: {value:.6E} |"
    line += " loss scale: 1.0 | grad norm: 0.258 |"
    return (
        f"{line} number of skipped iterations: {skipped:3d} | number of nan iterations: {nan:3d} |"
    )


def megatron_log(losses: Losses) -> str:
    lines = [
        megatron_line(n, {"lm loss": lm, "z_loss": 10.9, "mtp_1 loss": mtp})
        for n, (lm, mtp) in losses.items()
    ]
    memory = "[Rank 0] (after 1 iterations) memory (MB) | allocated: 26222.7 | reserved: 66802.0"
    evaluation = (
        " validation loss at iteration 3 | lm loss value: 9.1E+00 | lm loss PPL: 8.9E+03 |"
    )
    return "\n".join([*lines[:1], memory, *lines[1:], evaluation, ""])


def our_lines(losses: Losses) -> str:
    records = [
        {
            "step": n,
            "time": 1.5,
            "learning/lm_loss": lm * 1.01,  # by the loss mode: not what Megatron logs
            "learning/lm_loss_token_avg": lm,
            "learning/mtp_loss": 0.1 * mtp,
            "learning/raw_mtp_loss": mtp,
        }
        for n, (lm, mtp) in losses.items()
    ]
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Any]]:
    """Run the verb on the text of two files; returns the exit code and JSON or error output."""

    def run(ours: str, theirs: str, *arguments: str) -> tuple[int, Any]:
        (tmp_path / "ours.jsonl").write_text(ours)
        (tmp_path / "megatron.log").write_text(theirs)
        files = (str(tmp_path / "ours.jsonl"), str(tmp_path / "megatron.log"))
        code = main(["compare", *files, *arguments, "--json"])
        output = capsys.readouterr()
        return code, json.loads(output.out) if code < 2 else output.err

    return run


def test_equal_losses_are_within_the_bar(compared):
    losses = curve(range(1, 101))
    code, found = compared(our_lines(losses), megatron_log(losses))
    assert (code, found["within"], found["notes"]) == (0, True, [])
    lm, mtp = found["losses"]
    assert (lm["name"], lm["key"]) == ("lm_loss", "learning/lm_loss_token_avg")
    assert (mtp["name"], mtp["key"]) == ("mtp_1_loss", "learning/raw_mtp_loss")
    assert len(lm["points"]) == len(mtp["points"]) == 100
    assert max(lm["largest_error"], mtp["largest_error"]) < 1e-6
    assert lm["first_step_outside"] is None


@pytest.mark.parametrize(
    ("first", "later", "code"),
    [(0.9e-4, 0.9e-3, 0), (1.1e-4, 0.0, 1), (0.0, 1.1e-3, 1), (-1.1e-4, 0.0, 1)],
)
def test_the_bar_is_a_hundredth_of_a_percent_at_first_and_a_tenth_on_average(
    compared, first, later, code
):
    ours = curve(range(1, 51))
    theirs = {n: (lm / (1 + (later if n > 1 else first)), mtp) for n, (lm, mtp) in ours.items()}
    done, found = compared(our_lines(ours), megatron_log(theirs))
    assert done == code
    lm, mtp = found["losses"]
    assert lm["within"] is (code == 0)
    assert mtp["within"]
    assert lm["first_error"] == pytest.approx(abs(first), abs=1e-6)
    assert lm["mean_later_error"] == pytest.approx(later, abs=1e-6)


def test_one_step_may_leave_the_tolerance_while_the_average_does_not(compared):
    ours = curve(range(1, 51))
    theirs = {n: (lm * (1.01 if n == 7 else 1), mtp) for n, (lm, mtp) in ours.items()}
    code, found = compared(our_lines(ours), megatron_log(theirs))
    assert code == 0
    assert found["losses"][0]["first_step_outside"] == 7
    assert found["losses"][0]["largest_error"] == pytest.approx(0.01 / 1.01, abs=1e-6)


def test_an_error_of_multi_token_prediction_alone_is_outside(compared):
    ours = curve(range(1, 11))
    theirs = {n: (lm, mtp * 1.01) for n, (lm, mtp) in ours.items()}
    code, found = compared(our_lines(ours), megatron_log(theirs))
    assert (code, [loss["within"] for loss in found["losses"]]) == (1, [True, False])


def test_an_offset_puts_our_step_beside_a_later_iteration(compared):
    ours = curve(range(1, 21))
    theirs = {n + 1: losses for n, losses in ours.items()} | {1: (9.0, 9.0)}
    log = megatron_log(dict(sorted(theirs.items())))
    assert compared(our_lines(ours), log)[0] == 1
    code, found = compared(our_lines(ours), log, "--iteration-offset", "1")
    assert code == 0
    point = found["losses"][0]["points"][0]
    assert (point["step"], point["iteration"]) == (1, 2)


def test_each_depth_has_its_own_key_and_is_not_compared_with_a_mean_over_depths(compared):
    ours = [json.loads(line) for line in our_lines(curve(range(1, 4))).splitlines()]
    for record in ours:
        record["learning/mtp_2_loss"] = 2.5
    log = "\n".join(
        megatron_line(n, {"lm loss": lm, "mtp_1 loss": mtp, "mtp_2 loss": 2.5})
        for n, (lm, mtp) in curve(range(1, 4)).items()
    )
    code, found = compared("\n".join(map(json.dumps, ours)) + "\n", log)
    assert code == 0
    assert [loss["key"] for loss in found["losses"]] == [
        "learning/lm_loss_token_avg",
        "learning/mtp_2_loss",
    ]
    assert any("'mtp_1 loss'" in note for note in found["notes"])


def test_the_loss_of_the_mode_can_be_compared_instead(compared):
    losses = curve(range(1, 4))
    code, found = compared(our_lines(losses), megatron_log(losses), "--lm-loss", "lm_loss")
    assert code == 1
    assert found["losses"][0]["first_error"] == pytest.approx(0.01, abs=1e-6)


def test_lines_of_an_interval_are_compared_with_our_mean_over_it(compared):
    ours = curve(range(1, 31))
    spans = {n: [ours[m] for m in range(n - 9, n + 1)] for n in (10, 20, 30)}
    means = {
        n: (sum(lm for lm, _ in span) / 10, sum(mtp for _, mtp in span) / 10)
        for n, span in spans.items()
    }
    code, found = compared(our_lines(ours), megatron_log(means))
    assert code == 0
    assert found["losses"][0]["largest_error"] < 1e-6
    assert [point["step"] for point in found["losses"][0]["points"]] == [10, 20, 30]
    assert "means over up to 10 iterations" in found["notes"][0]


def test_a_first_line_that_stays_in_the_sum_is_taken_out_of_the_next():
    first, second = {"lm loss": 4.0}, {"lm loss": 3.0}
    log = "\n".join(
        [megatron_line(1, first), megatron_line(2, second), megatron_line(3, first), ""]
    )
    carried = parse_log(log, first_line="carried")
    assert [line.losses["lm loss"] for line in carried] == [4.0, 2.0, 4.0]
    separate = parse_log(log, first_line="separate")
    assert [line.losses["lm loss"] for line in separate] == [4.0, 3.0, 4.0]
    # A first iteration at which no interval ends is printed by such a version only.
    log = "\n".join(
        [megatron_line(n, {"lm loss": loss}) for n, loss in ((1, 4.0), (10, 3.1), (20, 2.0))]
        + [""]
    )
    lines = parse_log(log, first_line="separate")
    assert [(line.first, line.last) for line in lines] == [(1, 1), (2, 10), (11, 20)]
    assert lines[1].losses["lm loss"] == pytest.approx((31 - 4) / 9)


def test_after_a_restart_the_later_lines_count():
    runs = [*((n, 5.0) for n in range(1, 6)), *((n, 4.0) for n in range(4, 7))]
    log = "\n".join([megatron_line(n, {"lm loss": loss}) for n, loss in runs] + [""])
    lines = parse_log(log, first_line="separate")
    assert [line.last for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line.losses["lm loss"] for line in lines] == [5.0, 5.0, 5.0, 4.0, 4.0, 4.0]


def test_lines_of_a_start_that_did_not_get_as_far_again_do_not_count():
    runs = [*((n, 5.0) for n in range(1, 6)), (2, 4.0)]
    log = "\n".join([megatron_line(n, {"lm loss": loss}) for n, loss in runs] + [""])
    assert [line.last for line in parse_log(log, first_line="separate")] == [1, 2]


@pytest.mark.parametrize(
    "line",
    [
        " iteration        2/     100 | consumed samples: 4 | lm loss: 2.179000E+00 |",
        "1:  iteration       2/73242187 | lm loss: 2.179000E+00 | loss scale: 4294967296.0 |",
        "\titeration 2/ 100 | lm loss: 2.179",
        "[\x1b[32m20251202 06:56:28\x1b[0m][\x1b[1mINFO \x1b[0m] : iteration 2/ 5000 | elapsed"
        " time per iteration (ms): 13100.0/13240.9 | lm loss: 2.179000E+00 | loss: 1 |\x1b[0m",
        "iteration 2/2 | lm loss: 2.179E+00 | GPU utilization: 50.0MODEL[Rank 0] (after)",
    ],
)
def test_a_line_is_found_whatever_stands_around_it(line):
    (found,) = parse_log(line + "\n", first_line="separate")
    assert (found.first, found.last, found.losses) == (2, 2, {"lm loss": 2.179})


def test_two_lines_that_were_written_on_one_are_two():
    log = megatron_line(1, {"lm loss": 3.0}) + megatron_line(2, {"lm loss": 2.0}) + "\n"
    lines = parse_log(log, first_line="separate")
    assert [(line.last, line.losses["lm loss"]) for line in lines] == [(1, 3.0), (2, 2.0)]


def test_a_line_that_is_cut_off_gives_its_loss_or_none_but_never_part_of_it():
    whole = megatron_line(1, {"lm loss": 3.0}) + "\n"
    log = whole + megatron_line(2, {"lm loss": 2.123456})
    found = [
        [line.losses["lm loss"] for line in parse_log(log[:end], first_line="separate")]
        for end in range(len(whole), len(log) + 1)
    ]
    kept = found.index([3.0, 2.123456])
    assert found == [[3.0]] * kept + [[3.0, 2.123456]] * (len(found) - kept)


@pytest.mark.parametrize("kind", ["left out", "counted", "printed", "ours"])
def test_a_loss_that_is_nan_is_outside(compared, kind):
    ours = {n: (lm, mtp) for n, (lm, mtp) in curve(range(1, 6)).items()}
    lines = [megatron_line(n, {"lm loss": lm, "mtp_1 loss": mtp}) for n, (lm, mtp) in ours.items()]
    journal = our_lines(ours)
    match kind:
        case "left out":
            lines[2] = megatron_line(3, {"lm loss": math.nan, "mtp_1 loss": 2.379})
        case "counted":
            lines[2] = megatron_line(3, {"lm loss": 2.173}, skipped=1, nan=1)
        case "printed":
            lines[2] = lines[2].replace("lm loss: 2.173000E+00", "lm loss: nan")
        case _:
            journal = journal.replace("2.173,", '"NaN",')
    code, found = compared(journal, "\n".join([*lines, ""]))
    assert code == 1
    assert found["losses"][0]["first_step_outside"] == 3
    assert found["losses"][0]["points"][2]["error"] == "Infinity"


def test_an_iteration_that_megatron_skipped_is_left_out_and_said_so(compared):
    ours = curve(range(1, 6))
    lines = [megatron_line(n, {"lm loss": lm}) for n, (lm, _) in ours.items()]
    lines[0] = megatron_line(1, {"lm loss": 0.0}, skipped=1)
    code, found = compared(our_lines(ours), "\n".join([*lines, ""]))
    assert code == 0
    assert [point["step"] for point in found["losses"][0]["points"]] == [2, 3, 4, 5]
    assert any("1 lines with iterations that Megatron skipped" in n for n in found["notes"])
    assert any("multi-token prediction" in note for note in found["notes"])


def test_a_journal_that_ends_in_the_middle_of_a_line_is_read_up_to_there(compared):
    losses = curve(range(1, 6))
    code, found = compared(our_lines(losses)[:-30], megatron_log(losses))
    assert code == 0
    assert len(found["losses"][0]["points"]) == 4


def test_one_common_step_is_said_to_prove_little(compared):
    code, found = compared(our_lines(curve(range(1, 2))), megatron_log(curve(range(1, 9))))
    assert code == 0
    assert found["losses"][0]["mean_later_error"] is None
    assert any("only one step" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("ours", "theirs", "problem"),
    [
        ("", "x", "ours.jsonl holds no step"),
        ('{"step": 1}\nnot json\n{"step": 3}\n', "x", "ours.jsonl:2 is no line of metrics.jsonl"),
        ('{"loss": 1}\n\n', "x", "ours.jsonl:1 is no line of metrics.jsonl"),
        (our_lines(curve(range(1, 3))), "nothing\n", "no line `iteration N/M | ... | lm loss"),
        (our_lines(curve(range(1, 3))), megatron_line(1, {"loss": 2.0}), "| lm loss: ... |`"),
        ('{"step": 1, "eval/lm_loss": 2}\n', megatron_log(curve(range(1, 3))), "our log has no"),
        (our_lines(curve(range(1, 3))), megatron_log(curve(range(8, 10))),
         "ours with learning/lm_loss_token_avg are 1 to 2, Megatron's iterations 8 to 9"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_compared_are_named_and_end_with_2(compared, ours, theirs, problem):
    code, message = compared(ours, theirs)
    assert code == 2
    assert problem in message


def test_the_log_interval_can_be_named_where_lines_were_left_out(compared):
    ours = curve(range(1, 31))
    kept = {n: ours[n] for n in (10, 20, 30)}
    assert compared(our_lines(ours), megatron_log(kept))[0] == 1  # as if means over 10
    code, found = compared(our_lines(ours), megatron_log(kept), "--log-interval", "1")
    assert (code, found["notes"]) == (0, [])
    code, message = compared(our_lines(ours), megatron_log(kept), "--log-interval", "0")
    assert (code, "--log-interval 0 must be 1 or more" in message) == (2, True)


def test_a_missing_file_is_named(capsys, tmp_path):
    (tmp_path / "ours.jsonl").write_text(our_lines(curve(range(1, 3))))
    assert main(["compare", str(tmp_path / "ours.jsonl"), str(tmp_path / "no.log")]) == 2
    assert "no.log cannot be read" in capsys.readouterr().err


def test_the_table_says_steps_errors_and_the_verdict_and_the_plot_is_a_png(capsys, tmp_path):
    ours = curve(range(1, 41))
    theirs = {n: (lm * 1.01, mtp) for n, (lm, mtp) in ours.items()}
    (tmp_path / "ours.jsonl").write_text(our_lines(ours))
    (tmp_path / "megatron.log").write_text(megatron_log(theirs))
    files = [str(tmp_path / name) for name in ("ours.jsonl", "megatron.log")]
    assert main(["compare", *files, "--plot", str(tmp_path / "plot.png")]) == 1
    text = capsys.readouterr().out
    assert "0.99 %" in text
    assert "outside the bar: 0.01 % at the first step, 0.1 % on the average" in text
    assert "..." in text
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    missing = str(tmp_path / "no" / "plot.png")
    assert main(["compare", *files, "--plot", missing]) == 2
    assert f"{missing} cannot be written" in capsys.readouterr().err


def test_no_error_is_infinite_only_where_a_number_is_missing():
    assert relative_error(0.0, 0.0) == 0.0
    assert relative_error(1.0, 0.0) == math.inf
    assert relative_error(math.inf, math.inf) == math.inf
    assert relative_error(1.98, 2.0) == pytest.approx(0.01)
