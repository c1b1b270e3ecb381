"""The rules of `adaptra demo --slow`: which links, workers and ranks get slow or late, and when."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.base.units import parse_seconds, size
from megatron_adaptra.emulate.rules import LinkRule, PortRule, parse_port_rules
from megatron_adaptra.emulate.scenario import load_rules
from megatron_adaptra.emulate.slow import (
    DEAD,
    LATE,
    LINK,
    PORT,
    REPLICA,
    WORKER,
    period_of,
    sorted_rules,
)
from megatron_adaptra.emulate.worker_rules import WorkerRule, parse_slowness
from megatron_adaptra.ir.routes import parse_worker

FLAG = "--slow"
DELAY = "40ms"  # of the last link, where nothing else gets slow
PORTS = "all:5MB/s"  # of a laboratory beside late ranks, unless others are given
MIN_GAIN = 0.03  # of an iteration: a plan of an all-reduce saves less than one of a pipeline
ALWAYS = (0, math.inf)


@dataclass(frozen=True)
class Slowness:
    """A slowness holds what gets slow or late in a run, and the slow phase.

    Args:
        links, workers: rules that the emulation reads, with their iterations.
        slow_links, slow_paths, slow_workers, slow_replicas, late_ranks: the same by kind, with
            iterations only where they are not the slow phase.
        lateness: seconds by data-parallel rank that comes late to its gradients.
        ports: of hosts of a laboratory.
        first, end: of the slow phase, from its first iteration up to, not including, its end.
    """

    links: tuple[str, ...]
    link_rules: tuple[LinkRule, ...]
    workers: tuple[WorkerRule, ...]
    slow_links: list[str]
    slow_paths: list[str]
    slow_workers: list[str]
    slow_replicas: list[str]
    late_ranks: list[str]
    lateness: dict[int, float]
    ports: tuple[PortRule, ...]
    port_texts: list[str]
    first: int
    end: int

    @property
    def slow_hosts(self) -> list[str]:
        """Hosts whose ports get slow, each with its rate, `2:20MB/s`; the first rule counts."""
        rates = {rule.host: rule.rate for rule in reversed(() if self.late_ranks else self.ports)}
        return [f"{host}:{size(rate)}/s" for host, rate in sorted(rates.items())]


def slowness_of(
    rules: Sequence[str], stages: int, replicas: int, iterations: int, netlab: bool, longest: float
) -> Slowness:
    """Return what `rules` make slow; none makes the last link slow.

    A rule without iterations holds in the slow phase: those that other rules name, else the second
    third of the run.

    Args:
        rules: of --slow.
        stages: of each pipeline.
        replicas: pipelines.
        iterations: of the run.
        netlab: ranks have hosts, with ports.
        longest: seconds that no rank may be late by.

    Raises:
        BadInput: for a rule that fits no such run.
    """
    kinds = sorted_rules(rules or [f"{stages - 2}-{stages - 1}:{DELAY}"], FLAG)
    if kinds[DEAD]:
        raise BadInput(FLAG, kinds[DEAD][0], "a training ends with its worker: adaptra plan has it")
    late, always = bool(kinds[LATE]), [] if not kinds[LATE] else kinds[PORT]
    given = [text for texts in kinds.values() for text in texts if texts is not always]
    first, end = _phase(given, iterations)

    def timed(kind: str) -> list[str]:
        if kinds[kind] is always:
            return kinds[kind] or ([PORTS] if netlab and late else [])
        return [text if "@" in text else f"{text}@{first}..{end}" for text in kinds[kind]]

    def shown(texts: Sequence[str]) -> list[str]:
        here = f"@{first}..{end}"
        return [text.removesuffix(here) for text in texts]

    links, ports = timed(LINK), timed(PORT)
    link_rules = load_rules(links, stages, flag=FLAG, replicas=replicas)
    texts = [*timed(WORKER), *_of_replicas(timed(REPLICA), stages, replicas)]
    workers = [rule for text in texts for rule in parse_slowness(text, stages, replicas, FLAG)]
    if kinds[PORT] and not netlab:
        raise BadInput(FLAG, kinds[PORT][0], "it needs --netlab, whose hosts have ports")
    if netlab and links and (late or ports):
        allowed = "beside ports of hosts no link can be slow, as beside late ranks with --netlab"
        raise BadInput(FLAG, kinds[LINK][0], allowed)
    return Slowness(
        tuple(links),
        tuple(link_rules),
        tuple(workers),
        shown([text for text in links if "." not in text.partition(":")[0]]),
        shown([text for text in links if "." in text.partition(":")[0]]),
        shown(timed(WORKER)),
        shown(timed(REPLICA)),
        shown(timed(LATE)),
        _lateness(timed(LATE), replicas, (first, end), longest),
        tuple(rule for text in ports for rule in _port_rules(text, stages, replicas)),
        ports,
        first,
        end,
    )


def _phase(given: Sequence[str], iterations: int) -> tuple[int, int]:
    """Return the slow phase of a run of so many `iterations`; `given`: the rules."""
    own = [period_of(text, FLAG) for text in given if "@" in text]
    # Rules for the whole run make no phase, unless there are no others.
    own = [one for one in own if one != ALWAYS] or (own if len(own) == len(given) else [])
    if not own:
        return iterations // 3, max(iterations // 3 + 1, 2 * iterations // 3)
    first, end = min(one[0] for one in own), min(max(one[1] for one in own), iterations)
    if first >= iterations:
        allowed = f"it has to begin before the last of the {iterations} iterations"
        raise BadInput(FLAG, ", ".join(given), allowed)
    return int(first), int(end)


def _numbered(texts: Sequence[str], replicas: int, what: str) -> Iterator[tuple[str, int, str]]:
    """Give each rule of `texts`, its replica, and the rest; `what`: replica or rank."""
    seen: set[int] = set()
    for text in texts:
        about, _, rest = text.partition(":")
        number = int(about) if about.isascii() and about.isdecimal() and len(about) < 10 else -1
        bare = text.partition("@")[0]
        if replicas == 1:
            raise BadInput(FLAG, bare, "it needs several replicas: give --replicas 4")
        if not 0 <= number < replicas:
            allowed = f"no such {what}; {what}s are 0 to {replicas - 1}"
            raise BadInput(FLAG, bare, allowed)
        seen.add(number)
        yield text, number, rest
    if len(seen) == replicas:
        allowed = f"at least one {what} has to stay as it is"
        raise BadInput(FLAG, ",".join(texts), allowed)


def _of_replicas(texts: Sequence[str], stages: int, replicas: int) -> list[str]:
    """Return the rules of all workers of slow replicas: `2.0:2x`, `2.1:2x`."""
    found = _numbered(texts, replicas, "replica")
    return [f"{one}.{stage}:{rest}" for _, one, rest in found for stage in range(stages)]


def _lateness(
    texts: Sequence[str], replicas: int, phase: tuple[int, int], longest: float
) -> dict[int, float]:
    late: dict[int, float] = {}
    for text, rank, rest in _numbered(texts, replicas, "rank"):
        late[rank] = parse_seconds(rest.partition("@")[0], FLAG)
        if not 0 < late[rank] < longest:
            allowed = f"it has to be above 0, and below the {longest:g} s of --timeout"
            raise BadInput(FLAG, text, allowed)
        first, end = period_of(text, FLAG)
        if (first, min(end, phase[1])) != phase:
            allowed = f"ranks are late in the whole slow phase, @{phase[0]}..{phase[1]}"
            raise BadInput(FLAG, text, allowed)
    return late


def _port_rules(text: str, stages: int, replicas: int) -> list[PortRule]:
    """Return the rules of a port of a host, or of a worker's: rank, and host, is by stage first."""
    about, colon, rest = text.partition(":")
    if "." in about:
        replica, stage = divmod(parse_worker(about, stages), stages)
        about = str(stage * replicas + replica)
    return parse_port_rules(about + colon + rest, stages * replicas, FLAG)


def changes(rules: Sequence[LinkRule | PortRule], iterations: int) -> set[int]:
    """Return those of the run's `iterations` in which one of the `rules` begins or ends.

    Turns of the arms end there: the laboratory counts an iteration once both arms have run it.
    """
    ends = {end for rule in rules for end in (rule.first, rule.end)}
    return {int(end) for end in ends if 0 < end < iterations}


def op_times(ranks: int) -> float:
    """Return the factor by which ops of so many `ranks`, by waiting, exceed their computing time.

    Where ranks wait for a core, a replica takes as long as the others that share it, whatever its
    own speed is. Ops that wait as if a GPU worked leave the cores idle half of the time. The
    result is 1 where there is a core for each rank.
    """
    cores = len(os.sched_getaffinity(0))
    return 2.0 * ranks / cores if ranks > cores else 1.0
