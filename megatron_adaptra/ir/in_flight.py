"""The activations that a stage holds, counted in microbatches."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_adaptra.ir.deps import recomputed_of
from megatron_adaptra.ir.op import Kind, Op

INPUT_HALF = 0.5  # share of a microbatch's activations that the input-gradient half gives back
RECOMPUTED_SHARE = 0.05  # what a microbatch that is recomputed holds until its R: its input
_CHANGE = {
    Kind.R: 1.0 - RECOMPUTED_SHARE,
    Kind.B: -1.0,
    Kind.I: -INPUT_HALF,
    Kind.W: INPUT_HALF - 1.0,
}


def in_flight(line: Sequence[Op], chunks: int = 1) -> list[float]:
    """Return the activations that one stage holds after each op of `line`, in microbatches.

    A microbatch counts 1 on the whole stage; each of several `chunks` has an equal share of that.
    """
    recomputed = recomputed_of(line)
    held, out = 0.0, []
    for op in line:
        if op.kind is Kind.F:
            held += RECOMPUTED_SHARE if op[1:] in recomputed else 1.0
        else:
            held += _CHANGE.get(op.kind, 0.0)
        out.append(round(held / chunks, 9))
    return out


def peak_in_flight(line: Sequence[Op], chunks: int = 1) -> float:
    """The most activations held at once by one stage that runs `line`, in microbatches.

    `chunks`: how many the stage has.
    """
    return max(in_flight(line, chunks), default=0.0)
