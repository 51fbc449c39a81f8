"""`ling-train compare`: a run of ours beside Megatron's log, as a table, JSON or a picture."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ling_trainer.compare import (
    LM_KEYS,
    Bar,
    CompareError,
    Comparison,
    compare,
    read_journal,
)
from ling_trainer.ends import ExitCode
from ling_trainer.megatron_log import parse_log

OUTSIDE = 1
"""Exit code of a comparison that is outside the bar."""
_HELP = """\
OURS is the metrics.jsonl of a run, MEGATRON the output of Megatron-LM's last rank. The verdict is
the Ling team's bar: relative errors of at most 0.01 % at the first step that both have and 0.1 %
on the average of the later ones. Exit code 0 within it, 1 outside, 2 if the files cannot be
compared.

Megatron logs lm loss as the mean over all tokens, whatever its loss mode, and mtp_d loss without
its factor: compared are learning/lm_loss_token_avg (else learning/lm_loss) and
learning/mtp_d_loss (else learning/raw_mtp_loss).
"""


def add_compare_verb(verbs: Any) -> None:
    """Add `compare` to the parser's verbs (what add_subparsers returned)."""
    bar = Bar()
    verb = verbs.add_parser(
        "compare",
        help="compare a run's losses with Megatron's log",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument("ours", type=Path, metavar="OURS.jsonl")
    verb.add_argument("megatron", type=Path, metavar="MEGATRON.log")
    verb.add_argument(
        "--iteration-offset",
        type=int,
        default=0,
        metavar="N",
        help="our step s is Megatron's iteration s + N (default: 0: both count from 1, and both "
        "run the first at learning rate 0 where there is a warm-up)",
    )
    verb.add_argument(
        "--lm-loss",
        choices=[key.rpartition("/")[2] for key in LM_KEYS],
        help="our key beside Megatron's lm loss (default: lm_loss_token_avg)",
    )
    verb.add_argument(
        "--first-tolerance", type=float, default=bar.first, metavar="R", help="(default: 1e-4)"
    )
    verb.add_argument(
        "--later-tolerance", type=float, default=bar.later, metavar="R", help="(default: 1e-3)"
    )
    verb.add_argument(
        "--log-interval",
        type=int,
        metavar="N",
        help="Megatron's --log-interval (default: the usual distance of its lines)",
    )
    verb.add_argument(
        "--first-line",
        choices=("separate", "carried"),
        default="separate",
        help="carried: Megatron printed the first iteration and kept it in its sum, as recent "
        "versions do, so that its second line is the mean of two (default: separate)",
    )
    verb.add_argument("--plot", type=Path, metavar="FILE", help="draw losses and errors (PNG)")
    verb.add_argument("--json", action="store_true", help="print JSON in place of tables")
    verb.set_defaults(call=_compare)


def _compare(options: argparse.Namespace) -> int:
    from ling_trainer.compare_view import plot, show

    try:
        if options.log_interval is not None and options.log_interval < 1:
            raise CompareError(f"--log-interval {options.log_interval} must be 1 or more")
        found = compare(
            read_journal(options.ours),
            parse_log(
                _read(options.megatron),
                first_line=options.first_line,
                interval=options.log_interval,
            ),
            lm_key=f"learning/{options.lm_loss}" if options.lm_loss else None,
            iteration_offset=options.iteration_offset,
            bar=Bar(first=options.first_tolerance, later=options.later_tolerance),
        )
        if options.plot:
            plot(found, options.plot)
    except CompareError as error:
        print(f"ling-train: {error}", file=sys.stderr)  # noqa: T201
        return ExitCode.CONFIGURATION
    if options.json:
        print(json.dumps(_to_json(found, options), allow_nan=False))  # noqa: T201
    else:
        show(found)
    return ExitCode.FINISHED if found.within else OUTSIDE


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise CompareError(f"{path} cannot be read: {error.strerror}; name a file") from error


def _to_json(found: Comparison, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "within": found.within,
        "tolerances": {"first": options.first_tolerance, "later": options.later_tolerance},
        "iteration_offset": options.iteration_offset,
        "losses": [loss.to_json() for loss in found.losses],
        "notes": list(found.notes),
    }
