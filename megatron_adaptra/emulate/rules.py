"""Slow links as text, for the emulator and for the laboratory: which, how slow, and when.

A pipeline's link is named by its two stages, `2-3`, and means that link in every replica. A path
between two workers is named by these, `0.1-0.2` or `0.1-1.2`: replica and stage.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.base.units import parse_rate, parse_seconds, parse_share

FIELD = "--adaptra-emulate-link"  # where rules come from in a training
SYNTAX = (
    "a rule such as 2-3:40ms@10.. (both ways), 2-3:10MB/s, "
    "2>3:40ms,jitter=4ms,bandwidth=10MB/s@10..20 (iterations) or, of a network, "
    "2-3:40ms,loss=0.1%@5s..30s"
)
PORT_SYNTAX = (
    "the rate of a host's port, each way, such as all:20MB/s, 3:10MB/s@10..20 (iterations) or "
    "3:10MB/s@5s..30s"
)
_LINK = re.compile(r"(\d{1,9})([->])(\d{1,9})", re.ASCII)
_PATH = re.compile(r"(\d{1,9})\.(\d{1,9})([->])(\d{1,9})\.(\d{1,9})", re.ASCII)
PERIOD = r"(?:@([\d.]+)(s?)\.\.(?:([\d.]+)\4)?)?"
_RULE = re.compile(rf"([\d.]+[->][\d.]+):([^@]+){PERIOD}", re.ASCII)
_PORT_RULE = re.compile(rf"(all|\d{{1,9}}):([^@]+){PERIOD}", re.ASCII)
LONGEST_RULE = 200  # characters; the pattern takes their square to fail


class Rule:
    """A rule holds from `first` up to, not including, `end`: iterations, or seconds if `timed`."""

    first: float
    end: float
    timed: bool

    def active(self, iteration: int, seconds: float = 0.0) -> bool:
        """Return whether it holds at `iteration`, or `seconds` after the start if `timed`."""
        return self.first <= (seconds if self.timed else iteration) < self.end


@dataclass(frozen=True)
class LinkRule(Rule):
    """A link rule slows one directed link from `first` up to, not including, `end`.

    These count iterations, or seconds if `timed`. `source`, `target`: workers (see ir/routes.py),
    which are the stages where there is one replica, or hosts of a laboratory. `delay`, `jitter`
    (standard deviation): seconds; `bandwidth`: bytes per second; `loss`: share of packets.
    """

    source: int
    target: int
    delay: float
    first: float = 0
    end: float = math.inf
    jitter: float = 0.0
    bandwidth: float = math.inf
    loss: float = 0.0
    timed: bool = False


@dataclass(frozen=True)
class PortRule(Rule):
    """A port rule limits `host`, over all its links, to `rate` bytes per second each way.

    It holds from `first` up to, not including, `end`: iterations, or seconds if `timed`.
    """

    host: int
    rate: float
    first: float = 0
    end: float = math.inf
    timed: bool = False


def parse_link(
    text: str, stages: int, field: str = "link", anywhere: bool = False, replicas: int = 1
) -> list[tuple[int, int]]:
    """`2-3` -> both directions, `2>3` -> one. Raises BadInput for a link that does not exist.

    `text`: the link, of so many `stages`, and then both ends are workers: those of each of the
    `replicas`; or a path between two workers, see `parse_path`. `field`: for errors. Stages have
    links to their neighbours, hosts (`anywhere`) to all others.
    """
    text = str(text).strip()
    if not anywhere and _PATH.fullmatch(text):
        return parse_path(text, stages, replicas, field)
    match = _LINK.fullmatch(text)
    if match is None:
        raise BadInput(field, text, "it has to be a link such as 2-3 (both ways) or 2>3 (one way)")
    a, b = int(match[1]), int(match[3])
    if anywhere and (a == b or max(a, b) >= stages):
        raise BadInput(field, text, f"no such link; the hosts are 0 to {stages - 1}")
    if not anywhere and (abs(a - b) != 1 or max(a, b) >= stages):
        links = ", ".join(f"{i}-{i + 1}" for i in range(stages - 1)) or "none"
        raise BadInput(field, text, f"no such link; {stages} stages have the links {links}")
    firsts = [replica * stages for replica in range(replicas)]
    return [way for first in firsts for way in _ways(first + a, first + b, match[2])]


def parse_path(text: str, stages: int, replicas: int, field: str = "path") -> list[tuple[int, int]]:
    """`0.1-1.2` -> both directions between two workers, `0.1>1.2` -> one.

    `text`: the path. So many `replicas` of so many `stages` have paths from each worker to those of
    the stages beside its own, in its own replica and in others. `field`: for errors. Raises
    BadInput for a path that does not exist.
    """
    match = _PATH.fullmatch(str(text).strip())
    if match is None:
        allowed = "it has to be a path such as 0.1-0.2 (both ways) or 0.1>1.2 (one way)"
        raise BadInput(field, text, allowed)
    ends = [(int(match[1]), int(match[2])), (int(match[4]), int(match[5]))]
    if any(replica >= replicas or stage >= stages for replica, stage in ends):
        last = f"{replicas - 1}.{stages - 1}"
        raise BadInput(field, text, f"no such path; the workers are 0.0 to {last}, replica.stage")
    if abs(ends[0][1] - ends[1][1]) != 1:
        allowed = "no such path; workers have paths to those of the stages beside their own"
        raise BadInput(field, text, allowed)
    a, b = (replica * stages + stage for replica, stage in ends)
    return _ways(a, b, match[3])


def _ways(a: int, b: int, sign: str) -> list[tuple[int, int]]:
    return [(a, b), (b, a)] if sign == "-" else [(a, b)]


def in_replica(rules: Sequence[LinkRule], replica: int, stages: int) -> list[LinkRule]:
    """Return the `rules` for links within a `replica`, with its stages in place of workers.

    `stages`: of each replica. A path to another replica has messages only where replicas are
    planned together.
    """
    first = replica * stages
    own = range(first, first + stages)
    return [
        replace(rule, source=rule.source - first, target=rule.target - first)
        for rule in rules
        if rule.source in own and rule.target in own
    ]


def parse_rules(
    text: str, stages: int, field: str = FIELD, anywhere: bool = False, replicas: int = 1
) -> list[LinkRule]:
    """The rules of one `LINK:DELAY[,jitter=..][,bandwidth=..][,loss=..][@FROM..[TO]]`.

    `text`: the rule; a rate in place of DELAY leaves the link without delay. `stages`, `field`,
    `anywhere`, `replicas`: see `parse_link`. Raises BadInput.
    """
    link, what, begin, stop, timed = parts_of(_RULE, text, field, SYNTAX)
    delay, *options = what.split(",")
    if delay.endswith("/s"):
        delay, options = "0ms", [f"bandwidth={delay}", *options]
    values: dict[str, float] = {}
    parsers = {"jitter": parse_seconds, "bandwidth": parse_rate, "loss": parse_share}
    for option in options:
        key, _, value = option.partition("=")
        if key not in parsers:
            raise BadInput(field, text, f"{key!r} is unknown; {SYNTAX}")
        values[key] = parsers[key](value, f"{field} {key}")
        if key == "bandwidth" and values[key] < 1:
            raise BadInput(f"{field} {key}", value, "it has to be a rate above 0, of at least 1B/s")
    seconds = parse_seconds(delay, field)
    return [
        LinkRule(source, target, seconds, begin, stop, timed=timed, **values)
        for source, target in parse_link(link, stages, field, anywhere, replicas)
    ]


def parse_port_rules(text: str, hosts: int, field: str) -> list[PortRule]:
    """The rules of one `HOST:RATE[@FROM..[TO]]`; a HOST of `all` is each one.

    `text`: the rule, for so many `hosts`. `field`: for errors. Raises BadInput.
    """
    host, what, begin, stop, timed = parts_of(_PORT_RULE, text, field, PORT_SYNTAX)
    if host != "all" and int(host) >= hosts:
        raise BadInput(field, text, f"no such host; the hosts are 0 to {hosts - 1}")
    rate = parse_rate(what, field)
    if not 1 <= rate < math.inf:
        raise BadInput(field, text, "it has to be a rate above 0, of at least 1B/s")
    numbers = range(hosts) if host == "all" else [int(host)]
    return [PortRule(number, rate, begin, stop, timed) for number in numbers]


def parts_of(
    pattern: re.Pattern[str], text: str, field: str, syntax: str
) -> tuple[str, str, float, float, bool]:
    """Return the parts of the rule `text`: two texts, FROM and TO, and whether these are seconds.

    `pattern`: of two groups and PERIOD. `field`, `syntax`: for errors. Raises BadInput.
    """
    match = pattern.fullmatch(text.strip()) if len(text) <= LONGEST_RULE else None
    if match is None:
        raise BadInput(field, text, syntax)
    what, how, first, unit, end = match.groups()
    timed = bool(unit)
    try:
        begin, stop = float(first or 0), float(end or math.inf)
    except ValueError:
        raise BadInput(field, text, syntax) from None
    if begin >= stop:
        raise BadInput(field, text, f"it ends before it begins; {syntax}")
    if not timed and begin % 1:
        raise BadInput(field, text, "an iteration is a whole number; seconds end with s")
    return what, how, begin, stop, timed
