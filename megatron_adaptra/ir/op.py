"""One step of a stage's work, and its text form."""

from __future__ import annotations

import re
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from megatron_adaptra.base.errors import BadInput


class Kind(str, Enum):
    """A kind names what an op does. The first five compute; `lower` or telemetry adds the rest."""

    F = "F"  # forward
    B = "B"  # full backward
    I = "I"  # backward, input-gradient half  # noqa: E741
    W = "W"  # backward, weight-gradient half
    R = "R"  # recompute of a forward whose activations were not kept
    SEND_F = "SF"  # send a forward's output to the next stage
    SEND_B = "SB"  # send an input gradient to the previous stage
    POST_F = "PF"  # post the receive of a forward's input
    POST_B = "PB"  # post the receive of an output gradient
    STEP = "T"  # what an iteration does after its last backward, up to the optimizer step
    SYNC = "X"  # the parts of the step in which stages wait for each other

    __hash__ = str.__hash__  # Enum's own is Python code, and ops are looked up all the time

    @property
    def computes(self) -> bool:
        """True for the work of a stage; False for that of the links and of the optimizer step."""
        return self in COMPUTE


COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.R})
_TEXT = re.compile(r"([A-Z]{1,2})([0-9]+)(?:\.([0-9]+))?(?:@([0-9]+))?")


class Op(NamedTuple):
    """`F3` forward of microbatch 3; `B3.1` chunk 1; `F3@2` of home 2, the replica whose data it is.

    An op of one replica has no home; of several, each op names its own, whichever worker runs it.
    """

    kind: Kind
    microbatch: int
    chunk: int = 0
    home: int | None = None

    def __str__(self) -> str:
        chunk = f".{self.chunk}" if self.chunk else ""
        home = f"@{self.home}" if self.home is not None else ""
        return f"{self.kind.value}{self.microbatch}{chunk}{home}"

    @staticmethod
    def parse(text: str) -> Op:
        """The op that `text` stands for; raises BadInput for any other text."""
        return _parsed(text)


@lru_cache(1 << 14)  # the same ones are read in every iteration
def _parsed(text: str) -> Op:
    match = _TEXT.fullmatch(text)
    try:
        if match is None:
            raise ValueError(text)
        kind, microbatch, chunk, home = match.groups()
        return Op(
            Kind(kind),
            int(microbatch),
            int(chunk or 0),
            None if home is None else int(home),
        )
    except ValueError:
        raise BadInput("op", text, "an op reads like F3, B3, I3.1, W3 or F3@2") from None
