"""The dependencies of a pipeline, written once: the tokens that each op needs and makes.

Ops exchange *tokens*. A token stands at a position of the model: chunk c on stage s is position
`c * stages + s` (Megatron's loop placement). Check, simulation and lowering all read these rules.
`Routes` say which worker makes or uses a token, in one replica or in several.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.routes import Routes

ACTIVATION, GRADIENT, RECOMPUTED = "a", "g", "r"
_MAKES = {Kind.F: ACTIVATION, Kind.B: GRADIENT, Kind.I: GRADIENT, Kind.R: RECOMPUTED}
# The token that a send or a post moves, and how far from its own position that token is made.
_CARRIES = {
    Kind.SEND_F: (ACTIVATION, 0),
    Kind.SEND_B: (GRADIENT, 0),
    Kind.POST_F: (ACTIVATION, -1),
    Kind.POST_B: (GRADIENT, 1),
}


class Token(NamedTuple):
    """The output of position `position` for one microbatch: activation, gradient, recomputed."""

    kind: str
    position: int
    microbatch: int
    home: int | None = None


def position_of(op: Op, worker: int, routes: Routes) -> int:
    """The position in the model of an op that `worker` runs."""
    return op.chunk * routes.stages + worker % routes.stages


def maker(token: Token, routes: Routes) -> int:
    """The worker that makes a token."""
    return routes.worker(token.position, token.microbatch, token.home)


def makes(op: Op, worker: int, routes: Routes) -> Token | None:
    """The token that running `op` on `worker` produces."""
    kind = _MAKES.get(op.kind)
    if kind is None:
        return None
    return Token(kind, position_of(op, worker, routes), op.microbatch, op.home)


def needs(op: Op, worker: int, routes: Routes, recomputed: bool = False) -> list[Token]:
    """The tokens that `op` waits for on `worker`.

    `recomputed`: its microbatch has an R op on this worker.
    """
    here = position_of(op, worker, routes)
    tokens = []
    if op.kind in (Kind.B, Kind.I):
        own = RECOMPUTED if recomputed else ACTIVATION
        tokens.append(Token(own, here, op.microbatch, op.home))
    elif op.kind is Kind.W:
        tokens.append(Token(GRADIENT, here, op.microbatch, op.home))
    elif op.kind is Kind.R:
        tokens.append(Token(ACTIVATION, here, op.microbatch, op.home))
    came = _next_to(op, here, routes)
    if came is not None:
        tokens.append(came)
    return tokens


def _next_to(op: Op, here: int, routes: Routes) -> Token | None:
    """Return the token that `op` needs from the position before its own, `here`, or after it."""
    if op.kind is Kind.F and here > 0:
        return Token(ACTIVATION, here - 1, op.microbatch, op.home)
    if op.kind in (Kind.B, Kind.I) and here < routes.positions - 1:
        return Token(GRADIENT, here + 1, op.microbatch, op.home)
    return None


def recomputed_of(line: Iterable[Op]) -> set[tuple[int, int, int | None]]:
    """Microbatch, chunk and home of all that a worker recomputes: those with an R in its `line`."""
    return {op[1:] for op in line if op.kind is Kind.R}


def remote_need(op: Op, worker: int, routes: Routes) -> Token | None:
    """The one token that `op` gets from another worker, if any, when `worker` runs it."""
    token = _next_to(op, position_of(op, worker, routes), routes)
    return None if token is None or maker(token, routes) == worker else token


def carried(op: Op, worker: int, routes: Routes) -> Token | None:
    """The token that a send or a post of `worker` moves."""
    carries = _CARRIES.get(op.kind)
    if carries is None:
        return None
    kind, apart = carries
    return Token(kind, position_of(op, worker, routes) + apart, op.microbatch, op.home)


def user(token: Token, routes: Routes) -> int | None:
    """The worker that runs the next op of the microbatch with a token, if there is one."""
    if token.kind == ACTIVATION and token.position < routes.positions - 1:
        return routes.worker(token.position + 1, token.microbatch, token.home)
    if token.kind == GRADIENT and token.position > 0:
        return routes.worker(token.position - 1, token.microbatch, token.home)
    return None


def consumer(token: Token, routes: Routes) -> int | None:
    """The other worker that a token is sent to, if any."""
    to = user(token, routes)
    return None if to == maker(token, routes) else to
