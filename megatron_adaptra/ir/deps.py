"""What each op needs and makes: the dependencies of a pipeline, written once.

Ops exchange *tokens*. A token stands at a position of the model: chunk c on stage s is position
`c * stages + s` (Megatron's loop placement). Check, simulation and lowering all read these rules.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from megatron_adaptra.ir.op import Kind, Op

ACTIVATION, GRADIENT, RECOMPUTED = "a", "g", "r"


class Token(NamedTuple):
    """The output of position `position` for one microbatch: activation, gradient, recomputed."""

    kind: str
    position: int
    microbatch: int


def position_of(op: Op, stage: int, stages: int) -> int:
    """The position in the model of an op on `stage`, of a pipeline of so many `stages`."""
    return op.chunk * stages + stage


def makes(op: Op, stage: int, stages: int) -> Token | None:
    """The token that running `op` on `stage`, of a pipeline of so many `stages`, produces."""
    kind = {
        Kind.F: ACTIVATION,
        Kind.B: GRADIENT,
        Kind.I: GRADIENT,
        Kind.R: RECOMPUTED,
    }.get(op.kind)
    return None if kind is None else Token(kind, position_of(op, stage, stages), op.microbatch)


def needs(op: Op, stage: int, stages: int, chunks: int, recomputed: bool = False) -> list[Token]:
    """The tokens `op` waits for on `stage`, of so many `stages` with so many `chunks` each.

    `recomputed`: its microbatch has an R op on this stage.
    """
    here = position_of(op, stage, stages)
    last = stages * chunks - 1
    if op.kind is Kind.F:
        return [] if here == 0 else [Token(ACTIVATION, here - 1, op.microbatch)]
    if op.kind in (Kind.B, Kind.I):
        own = Token(RECOMPUTED if recomputed else ACTIVATION, here, op.microbatch)
        return [own] if here == last else [own, Token(GRADIENT, here + 1, op.microbatch)]
    if op.kind is Kind.W:
        return [Token(GRADIENT, here, op.microbatch)]
    if op.kind is Kind.R:
        return [Token(ACTIVATION, here, op.microbatch)]
    return []


def recomputed_of(line: Iterable[Op]) -> set[tuple[int, int]]:
    """Microbatch and chunk of all that a stage recomputes: those with an R op in its `line`."""
    return {(op.microbatch, op.chunk) for op in line if op.kind is Kind.R}


def remote_need(op: Op, stage: int, stages: int, chunks: int) -> Token | None:
    """The one token `op` gets from another stage, if any.

    It runs on `stage`, of so many `stages` with so many `chunks` each.
    """
    for token in needs(op, stage, stages, chunks):
        if token.position % stages != stage:
            return token
    return None


def carried(op: Op, stage: int, stages: int) -> Token | None:
    """The token that a send or a post on `stage`, of so many `stages`, moves."""
    here = position_of(op, stage, stages)
    if op.kind is Kind.SEND_F:
        return Token(ACTIVATION, here, op.microbatch)
    if op.kind is Kind.SEND_B:
        return Token(GRADIENT, here, op.microbatch)
    if op.kind is Kind.POST_F:
        return Token(ACTIVATION, here - 1, op.microbatch)
    if op.kind is Kind.POST_B:
        return Token(GRADIENT, here + 1, op.microbatch)
    return None


def consumer(token: Token, stages: int, chunks: int) -> int | None:
    """The other stage that a token is sent to, if any, of `stages` with so many `chunks` each."""
    if token.kind == ACTIVATION and token.position < stages * chunks - 1:
        stage = (token.position + 1) % stages
    elif token.kind == GRADIENT and token.position > 0:
        stage = (token.position - 1) % stages
    else:
        return None
    return None if stage == token.position % stages else stage
