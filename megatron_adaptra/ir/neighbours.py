"""With whom a stage exchanges the messages of its ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megatron_adaptra.ir.deps import ACTIVATION, carried
from megatron_adaptra.ir.op import Kind, Op


class Exchange(NamedTuple):
    """One message of a stage: the output of `made`, F or B, which `peer` gets or has made."""

    made: Op
    peer: int


@dataclass(frozen=True)
class Neighbours:
    """The neighbours of `stage` in a pipeline of so many `stages`.

    They are the stages before and after it; with chunks the last stage and the first are, too.
    """

    stage: int
    stages: int

    def exchange(self, op: Op) -> Exchange:
        """The message that `op`, a send or a post, moves. Both ends name the same `made`."""
        token = carried(op, self.stage, self.stages)
        assert token is not None
        chunk, maker = divmod(token.position, self.stages)
        made = Op(Kind.F if token.kind == ACTIVATION else Kind.B, token.microbatch, chunk)
        if op.kind in (Kind.POST_F, Kind.POST_B):
            return Exchange(made, maker)
        step = 1 if op.kind is Kind.SEND_F else -1
        return Exchange(made, (self.stage + step) % self.stages)
