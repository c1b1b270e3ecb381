"""Data-parallel replicas that get slow, with all workers of each, and how slow they get."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.demo.numbered import Numbered
from megatron_adaptra.emulate.worker_rules import parse_slowness

FLAG = "--slow-replica"
_REPLICAS = Numbered(
    FLAG, re.compile(r"(\d{1,9}):(\d{1,9}(?:\.\d{1,9})?x)", re.ASCII),
    "it has to be a replica and how many times as long its ops take, such as 2:2x",
    "replica", "replicas",
)  # fmt: skip


def parse_slow_replicas(given: Sequence[str], replicas: int) -> dict[int, str]:
    """Return by replica how many times as long its ops take, `2x`, from `given` such as `2:2x`.

    `replicas`: how many there are. Raises BadInput.
    """
    slow: dict[int, str] = {}
    for _, replica, times in _REPLICAS.parsed(given, replicas, str):
        parse_slowness(f"0.0:{times}", 1, 1, FLAG)  # its bounds
        slow[replica] = times
    if slow and len(slow) == replicas:
        allowed = "at least one replica has to stay as fast as it is, to take what others leave"
        raise BadInput(FLAG, ",".join(given), allowed)
    return slow


def check_slow_replicas(given: Sequence[str], replicas: int, chunks: int, reroute: str) -> None:
    """Raise BadInput where no microbatches of slow replicas can be shared out.

    `given`: as in `parse_slow_replicas`, of so many `replicas` with `chunks` per stage. `reroute`:
    the setting, or empty.
    """
    parse_slow_replicas(given, replicas)
    if given and chunks > 1:
        allowed = "with several --chunks per stage microbatches are not shared out"
        raise BadInput(FLAG, ",".join(given), allowed)
    if given and reroute not in ("", "off"):
        allowed = f"it has no place beside --reroute {reroute}: one remedy or the other"
        raise BadInput(FLAG, ",".join(given), allowed)


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
