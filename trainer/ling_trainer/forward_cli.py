"""`ling-train forward`: logits, token losses and gradients of given weights and tokens."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ling_trainer.ends import EndRun, ExitCode
from ling_trainer.schema import ConfigError

if TYPE_CHECKING:  # JAX takes seconds to import, and --help should not
    from ling_trainer.forward_weights import Weights

_HELP = """\
Compute what weights make of tokens, in float32 on the CPU, and write it as safetensors (float32):

  logits               [B, S, V]    of the next token
  mtp_logits_d         [B, S, V]    of depth d = 1, 2, ... of multi-token prediction
  token_losses         [B, S-1]     at t: cross-entropy of logits[t] and tokens[t+1]
  mtp_token_losses_d   [B, S-1-d]   at t: of mtp_logits_d[t] and tokens[t+1+d]
  grads/NAME           with --grads, under Hugging Face's names and in its layout, of
                       mean(token_losses) + factor x mean over d of mean(mtp_token_losses_d)

A loss is 0 where its target is padding, or in another document than the position; means leave
these out, and go over all rows at once. Router biases (expert_bias) have no gradient.

Without --segment-ids each row is one document without padding. With them 0 is padding and each
other id a document: attention, recurrent states and positions start anew in each, so packed
documents give the logits they give alone. Only mtp_logits_d at the last d tokens of a document
depend on --mtp-roll: they read the tokens that follow in the row (plain) or token 0 (segment).
"""


def add_forward_verb(verbs: Any) -> None:
    """Add `forward` to the parser's verbs (what add_subparsers returned)."""
    verb = verbs.add_parser(
        "forward",
        help="compute logits, losses and gradients of given weights and tokens",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    weights = verb.add_mutually_exclusive_group(required=True)
    weights.add_argument("--hf", type=Path, metavar="DIR", help="a Hugging Face directory")
    weights.add_argument(
        "--checkpoint", metavar="DIR", help="a run, one of its checkpoints, or a converted one"
    )
    verb.add_argument("--step", type=int, help="of the run's checkpoint (default: the newest)")
    verb.add_argument(
        "--tokens", type=Path, required=True, metavar="T.npy", help="integers [B, S] or [S]"
    )
    verb.add_argument("--segment-ids", type=Path, metavar="S.npy", help="of the same shape")
    verb.add_argument("--out", type=Path, required=True, metavar="O.safetensors")
    verb.add_argument("--grads", action="store_true", help="write gradients too")
    verb.add_argument(
        "--lightning-slope-layer-offset",
        type=int,
        choices=(0, 1),
        help="how lightning attention's decay counts layers (default: 1, Hugging Face's, for "
        "--hf; the run's for --checkpoint)",
    )
    verb.add_argument(
        "--mtp-roll",
        choices=("segment", "plain"),
        help="(default: plain, Hugging Face's, for --hf; the run's for --checkpoint)",
    )
    verb.add_argument(
        "--mtp-loss-scaling-factor",
        type=float,
        metavar="F",
        help="(default: config.json's or 0.1 for --hf; the run's for --checkpoint)",
    )
    verb.set_defaults(call=_forward)


def _forward(options: argparse.Namespace) -> int:
    import jax

    jax.config.update("jax_platforms", "cpu")
    from ling_trainer.data.index_file import DataError
    from ling_trainer.forward_file import write_forward

    try:
        summary = write_forward(
            _weights(options), tokens=options.tokens, segment_ids=options.segment_ids,
            out=options.out, with_gradients=options.grads,
        )  # fmt: skip
    except DataError as error:
        return _refuse(str(error), ExitCode.DATA)
    except ConfigError as error:
        return _refuse(str(error), ExitCode.CONFIGURATION)
    except EndRun as error:
        return _refuse(error.ending.message, error.ending.code)
    except ValueError as error:  # of the directory of weights; each names its file
        return _refuse(str(error), ExitCode.CHECKPOINT)
    print(summary)  # noqa: T201
    return ExitCode.FINISHED


def _weights(options: argparse.Namespace) -> "Weights":
    """Open the weights, with the options in the place of what their home has."""
    import dataclasses

    from ling_trainer.forward_weights import open_checkpoint_weights, open_hf_weights

    if options.hf is not None and options.step is not None:
        raise ConfigError(f"--step {options.step} is of a run; it goes with --checkpoint")
    if options.hf is not None:
        weights = open_hf_weights(options.hf)
    else:
        weights = open_checkpoint_weights(options.checkpoint, step=options.step)
    offset = options.lightning_slope_layer_offset
    if offset is not None:
        model = weights.model.model_copy(update={"lightning_slope_layer_offset": offset})
        weights = dataclasses.replace(weights, model=model)
    given = {
        name: value
        for name in ("mtp_roll", "mtp_loss_scaling_factor")
        if (value := getattr(options, name)) is not None
    }
    return dataclasses.replace(weights, **given)


def _refuse(problem: str, code: int) -> int:
    for line in problem.splitlines():
        print(f"ling-train: {line}", file=sys.stderr)  # noqa: T201
    return code
