"""Flags of the demo that name data-parallel ranks, or replicas, by number: `2:30ms`, `2:2x`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.base.units import parse_seconds
from megatron_adaptra.emulate.rules import LONGEST_RULE
from megatron_adaptra.emulate.worker_rules import parse_slowness

V = TypeVar("V")


class Numbered(NamedTuple):
    """A numbered flag takes values of a number, a colon, and a rest that fits `rule`.

    `flag`: its name. `rule`: a pattern with two groups. `syntax`: what is allowed, in words.
    `one`, `all_of_them`: what is numbered.
    """

    flag: str
    rule: re.Pattern[str]
    syntax: str
    one: str
    all_of_them: str

    def parsed(
        self, given: Sequence[str], replicas: int, value: Callable[[str], V]
    ) -> Iterator[tuple[str, int, V]]:
        """Give each text of `given`, its number, and the result of `value` for its rest.

        `replicas`: how many there are, from 0 on. Raises BadInput for a text of another form, a
        number that does not exist or was named before, and all that `value` raises.
        """
        seen: set[int] = set()
        for text in given:
            if "@" in text:
                when = "--from-iteration and --to-iteration have the period"
                raise BadInput(self.flag, text, f"leave out what begins with @: {when}")
            match = self.rule.fullmatch(text.strip()) if len(text) <= LONGEST_RULE else None
            if match is None:
                raise BadInput(self.flag, text, self.syntax)
            number, rest = int(match[1]), value(match[2])
            if replicas == 1:
                raise BadInput(self.flag, text, "it needs several replicas, --data-parallel 4")
            if number >= replicas:
                allowed = f"no such {self.one}; {self.all_of_them} are 0 to {replicas - 1}"
                raise BadInput(self.flag, text, allowed)
            if number in seen:
                once = f"it has to name each {self.one} only once"
                raise BadInput(self.flag, ",".join(given), once)
            seen.add(number)
            yield text, number, rest


LATE = "--late-rank"
MIN_GAIN = 0.03  # of an iteration: a plan of an all-reduce saves less than one of a pipeline
_RANKS = Numbered(
    LATE, re.compile(r"(\d{1,9}):([^:@]+)", re.ASCII),
    "it has to be a data-parallel rank and how late it comes, such as 2:30ms",
    "rank", "data-parallel ranks",
)  # fmt: skip


def parse_late_ranks(given: Sequence[str], replicas: int, longest: float) -> dict[int, float]:
    """Return by data-parallel rank the seconds that each of `given`, such as `2:30ms`, names.

    `replicas`: how many there are. `longest`: seconds that no rank may be late by. Raises BadInput.
    """
    late: dict[int, float] = {}
    each = _RANKS.parsed(given, replicas, lambda rest: parse_seconds(rest, LATE))
    for text, rank, seconds in each:
        if not 0 < seconds < longest:
            allowed = f"it has to be above 0, and below the {longest:g} s of --timeout"
            raise BadInput(LATE, text, allowed)
        late[rank] = seconds
    if late and len(late) == replicas:
        raise BadInput(LATE, ",".join(given), "at least one rank has to come in time")
    return late


SLOW = "--slow-replica"
_REPLICAS = Numbered(
    SLOW, re.compile(r"(\d{1,9}):(\d{1,9}(?:\.\d{1,9})?x)", re.ASCII),
    "it has to be a replica and how many times as long its ops take, such as 2:2x",
    "replica", "replicas",
)  # fmt: skip


def parse_slow_replicas(given: Sequence[str], replicas: int) -> dict[int, str]:
    """Return by replica how many times as long its ops take, `2x`, from `given` such as `2:2x`.

    `replicas`: how many there are. Raises BadInput.
    """
    slow: dict[int, str] = {}
    for _, replica, times in _REPLICAS.parsed(given, replicas, str):
        parse_slowness(f"0.0:{times}", 1, 1, SLOW)  # its bounds
        slow[replica] = times
    if slow and len(slow) == replicas:
        allowed = "at least one replica has to stay as fast as it is, to take what others leave"
        raise BadInput(SLOW, ",".join(given), allowed)
    return slow


def check_slow_replicas(given: Sequence[str], replicas: int, chunks: int, reroute: str) -> None:
    """Raise BadInput where no microbatches of slow replicas can be shared out.

    `given`: as in `parse_slow_replicas`, of so many `replicas` with `chunks` per stage. `reroute`:
    the setting, or empty.
    """
    parse_slow_replicas(given, replicas)
    if given and chunks > 1:
        allowed = "with several --chunks per stage microbatches are not shared out"
        raise BadInput(SLOW, ",".join(given), allowed)
    if given and reroute not in ("", "off"):
        allowed = f"it has no place beside --reroute {reroute}: one remedy or the other"
        raise BadInput(SLOW, ",".join(given), allowed)


def slow_workers(slow: Mapping[int, str], stages: int) -> list[str]:
    """Return all workers of the `slow` replicas, of so many `stages`: `2.0:2x`, `2.1:2x`."""
    return [f"{one}.{stage}:{times}" for one, times in slow.items() for stage in range(stages)]


def op_times(ranks: int) -> float:
    """Return the factor by which ops of so many `ranks`, by waiting, exceed their computing time.

    Where ranks wait for a core, a replica takes as long as the others that share it, whatever its
    own speed is. Ops that wait as if a GPU worked leave the cores idle half of the time. The
    result is 1 where there is a core for each rank.
    """
    cores = len(os.sched_getaffinity(0))
    return 2.0 * ranks / cores if ranks > cores else 1.0
