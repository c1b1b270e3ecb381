"""The options of a measurement, checked before anything starts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.bench.sizes import LARGEST
from megatron_adaptra.emulate.rules import LinkRule
from megatron_adaptra.emulate.scenario import load_rules

KiB, MiB = 1 << 10, 1 << 20
MOST_RANKS, MOST_ROUNDS, MOST_SIZES = 16, 1000, 64
P2P, COLLECTIVE, HOL = "p2p", "collective", "hol"
RESULT = "@adaptra "  # before the rows, as rank 0 prints them
LEAST = {P2P: 8, COLLECTIVE: 4, HOL: 8}  # bytes of a message
SIZES = {
    P2P: tuple(4 * KiB << 2 * n for n in range(9)),  # to 256 MiB
    COLLECTIVE: (4, 256, 4 * KiB, 64 * KiB),
    HOL: (64 * KiB, MiB, 16 * MiB),
}


def check_sizes(what: str, sizes: Sequence[int], flag: str) -> None:
    """Raise BadInput, with the `flag` they came by, for `sizes` that `what` cannot measure."""
    least = LEAST[what]
    for size in sizes:
        of_numbers = what == COLLECTIVE  # of four bytes
        if not least <= size <= LARGEST or (of_numbers and size % 4):
            of = " that are a multiple of 4" if of_numbers else ""
            raise BadInput(flag, size, f"it has to be {least} to {LARGEST} bytes{of}")
    if not 1 <= len(sizes) <= MOST_SIZES:
        raise BadInput(flag, len(sizes), f"it has to be 1 to {MOST_SIZES} sizes")


@dataclass(frozen=True)
class Options:
    """Options choose a measurement: `what`, one of SIZES, with messages of `sizes` bytes.

    `ranks`: processes, two but for collectives. `rounds`: the median of so many is reported.
    `link`: of a laboratory, between any two ranks, as the part of a rule behind the colon
    (40ms,bandwidth=100MB/s); empty: this machine as it is.
    """

    what: str
    sizes: tuple[int, ...]
    ranks: int = 2
    rounds: int = 9
    link: str = ""

    def __post_init__(self) -> None:
        check_sizes(self.what, self.sizes, "--sizes")
        if not 1 <= self.rounds <= MOST_ROUNDS:
            raise BadInput("--rounds", self.rounds, f"it has to be 1 to {MOST_ROUNDS}")
        if not 2 <= self.ranks <= MOST_RANKS:
            raise BadInput("--ranks", self.ranks, f"it has to be 2 to {MOST_RANKS}")
        if "@" in self.link:
            raise BadInput(
                "--link", self.link, "the link has to stay the same: leave out the @ part"
            )
        _ = self.rules

    @property
    def rules(self) -> list[LinkRule]:
        """The laboratory's links; none without one."""
        if not self.link:
            return []
        pairs = [(a, b) for a in range(self.ranks) for b in range(a + 1, self.ranks)]
        texts = [f"{a}-{b}:{self.link}" for a, b in pairs]
        return load_rules(texts, self.ranks, network=True, flag="--link")

    @property
    def least_seconds(self) -> dict[int, float]:
        """The least seconds of a message over the link, by its bytes; empty without a link."""
        return {
            nbytes: rule.delay + nbytes / rule.bandwidth
            for rule in self.rules[:1]
            for nbytes in self.sizes
        }

    def dump(self) -> str:
        """Return the options as the text that `load` reads, for a rank's command line."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> Options:
        """Return the options in the `text` that `dump` gave."""
        read = json.loads(text)
        data: dict[str, Any] = {k: tuple(v) if type(v) is list else v for k, v in read.items()}
        return cls(**data)
