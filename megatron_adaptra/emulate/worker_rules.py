"""Slow workers as text: which, how many times as long its ops take, and when.

A worker is one stage of one replica, `1.2`; see ir/routes.py for its number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.emulate.rules import PERIOD, Rule, parts_of

FIELD = "--adaptra-emulate-worker"  # where rules come from in a training
SYNTAX = (
    "a rule such as 1.2:2x@10.. (replica.stage, times as long, from iteration 10 on) or "
    "1.2:1.5x@10..20"
)
MOST_TIMES = 1000  # as long: above, a training stands still
_WORKER = re.compile(r"(\d{1,9})\.(\d{1,9})", re.ASCII)
_TIMES = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)x", re.ASCII)
_RULE = re.compile(rf"([^:@]+):([^:@]+){PERIOD}", re.ASCII)


@dataclass(frozen=True)
class WorkerRule(Rule):
    """A worker rule makes ops take `times` as long in iterations from `first` to before `end`."""

    worker: int
    times: float
    first: float = 0
    end: float = inf
    timed: bool = False


def parse_slowness(text: str, stages: int, replicas: int, field: str = FIELD) -> list[WorkerRule]:
    """The rules of `REPLICA.STAGE:TIMESx[@FROM..[TO]]`, one or several with commas between.

    `text`: the rules, for so many `replicas` of so many `stages`. `field`: for errors. Raises
    BadInput.
    """
    slow = []
    for one in text.split(","):
        name, times, begin, stop, timed = parts_of(_RULE, one, field, SYNTAX)
        worker, factor = _WORKER.fullmatch(name), _TIMES.fullmatch(times)
        if worker is None or factor is None:
            raise BadInput(field, one, SYNTAX)
        replica, stage = int(worker[1]), int(worker[2])
        if replica >= replicas or stage >= stages:
            last = f"{replicas - 1}.{stages - 1}"
            raise BadInput(field, one, f"no such worker; they are 0.0 to {last}, replica.stage")
        if not 1 <= float(factor[1]) <= MOST_TIMES:
            raise BadInput(field, one, f"it has to take from 1x to {MOST_TIMES}x as long")
        if timed:
            raise BadInput(field, one, f"its period has to be iterations; {SYNTAX}")
        slow.append(WorkerRule(replica * stages + stage, float(factor[1]), begin, stop))
    return slow


def load_slowness(
    rules: Sequence[str], stages: int, replicas: int, flag: str = FIELD
) -> list[WorkerRule]:
    """The rules in `rules`: text (`1.2:2x@10..`) or names of scenario files. Raises BadInput.

    `stages`: of each of so many `replicas`. `flag`: by which the rules came.
    """
    from megatron_adaptra.emulate.scenario import texts_of  # YAML is for files only

    return [
        rule
        for text, field in texts_of(rules, flag, "workers")
        for rule in parse_slowness(text, stages, replicas, field)
    ]


def check_slowness(rules: Sequence[str]) -> None:
    """Raise BadInput for the first of `rules` that suits no job, of any size."""
    load_slowness(rules, 10**9, 10**9)


def why_no_slowness(device: bool) -> str:
    """Describe why no worker of a job can be slowed, or return an empty string.

    `device`: its ops are on GPUs.
    """
    if device:
        return (
            "not on GPUs, where an op is over only later and a wait keeps the host from launching "
            "others: leave it out, or train on the CPU"
        )
    return ""
