"""The neighbours of a worker, with which it exchanges the messages of its ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megatron_adaptra.ir.deps import ACTIVATION, carried, maker
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.routes import Routes


class Exchange(NamedTuple):
    """One message of a worker: the output of `made`, F or B, which `peer` gets or has made."""

    made: Op
    peer: int


@dataclass(frozen=True)
class Neighbours:
    """The neighbours of a `worker`, microbatch by microbatch, as the `routes` have them.

    In a single pipeline they are the stages before and after it; with chunks the last stage and the
    first are neighbours, too.
    """

    worker: int
    routes: Routes

    @property
    def stage(self) -> int:
        """The stage of the worker."""
        return self.worker % self.stages

    @property
    def stages(self) -> int:
        """The number of stages of each replica."""
        return self.routes.stages

    def exchange(self, op: Op) -> Exchange:
        """The message that `op`, a send or a post, moves. Both ends name the same `made`."""
        token = carried(op, self.worker, self.routes)
        assert token is not None
        kind, _, microbatch, home = token
        chunk = token.position // self.stages
        made = Op(Kind.F if kind == ACTIVATION else Kind.B, microbatch, chunk, home)
        if op.kind in (Kind.POST_F, Kind.POST_B):
            return Exchange(made, maker(token, self.routes))
        position = token.position + (1 if op.kind is Kind.SEND_F else -1)
        return Exchange(made, self.routes.worker(position, microbatch, home))
