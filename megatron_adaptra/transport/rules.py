"""Slow links as text, for the emulator and for the laboratory: which, how slow, and when."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from megatron_adaptra.errors import BadInput
from megatron_adaptra.units import parse_rate, parse_seconds, parse_share

FIELD = "--adaptra-emulate-link"  # where rules come from in a training
SYNTAX = (
    "a rule such as 2-3:40ms@10.. (both ways), 2>3:40ms,jitter=4ms,bandwidth=10MB/s@10..20 "
    "(iterations) or, of a network, 2-3:40ms,loss=0.1%@5s..30s"
)
PORT_SYNTAX = (
    "the rate of a host's port, each way, such as all:20MB/s, 3:10MB/s@10..20 (iterations) or "
    "3:10MB/s@5s..30s"
)
_LINK = re.compile(r"(\d{1,9})([->])(\d{1,9})", re.ASCII)
_PERIOD = r"(?:@([\d.]+)(s?)\.\.(?:([\d.]+)\4)?)?"
_RULE = re.compile(rf"(\d+[->]\d+):([^@]+){_PERIOD}", re.ASCII)
_PORT_RULE = re.compile(rf"(all|\d{{1,9}}):([^@]+){_PERIOD}", re.ASCII)
_LONGEST_RULE = 200  # characters; the pattern takes their square to fail


class _Rule:
    """In force from `first` up to, not including, `end`: iterations, or seconds if `timed`."""

    first: float
    end: float
    timed: bool

    def active(self, iteration: int, seconds: float = 0.0) -> bool:
        """Whether it is in force at `iteration`, or `seconds` after the start if `timed`."""
        return self.first <= (seconds if self.timed else iteration) < self.end


@dataclass(frozen=True)
class LinkRule(_Rule):
    """One directed link, slow from `first` up to, not including, `end`.

    These count iterations, or seconds if `timed`. `delay`, `jitter` (standard deviation): seconds;
    `bandwidth`: bytes per second; `loss`: share of packets.
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
class PortRule(_Rule):
    """What `host` can send, and can receive, over all its links: `rate` bytes per second each.

    From `first` up to, not including, `end`: iterations, or seconds if `timed`.
    """

    host: int
    rate: float
    first: float = 0
    end: float = math.inf
    timed: bool = False


def parse_link(
    text: str, stages: int, field: str = "link", anywhere: bool = False
) -> list[tuple[int, int]]:
    """`2-3` -> both directions, `2>3` -> one. Raises BadInput for a link that does not exist.

    `text`: the link; of so many `stages`. `field`: for errors. Stages have links to their
    neighbours, hosts (`anywhere`) to all others.
    """
    match = _LINK.fullmatch(str(text).strip())
    if match is None:
        raise BadInput(field, text, "it has to be a link such as 2-3 (both ways) or 2>3 (one way)")
    a, b = int(match[1]), int(match[3])
    if anywhere and (a == b or max(a, b) >= stages):
        raise BadInput(field, text, f"no such link; the hosts are 0 to {stages - 1}")
    if not anywhere and (abs(a - b) != 1 or max(a, b) >= stages):
        links = ", ".join(f"{i}-{i + 1}" for i in range(stages - 1)) or "none"
        raise BadInput(field, text, f"no such link; {stages} stages have the links {links}")
    return [(a, b), (b, a)] if match[2] == "-" else [(a, b)]


def parse_rules(
    text: str, stages: int, field: str = FIELD, anywhere: bool = False
) -> list[LinkRule]:
    """The rules of one `LINK:DELAY[,jitter=..][,bandwidth=..][,loss=..][@FROM..[TO]]`.

    `text`: the rule. `stages`, `field`, `anywhere`: see `parse_link`. Raises BadInput.
    """
    match = _RULE.fullmatch(text.strip()) if len(text) <= _LONGEST_RULE else None
    if match is None:
        raise BadInput(field, text, SYNTAX)
    link, what, first, unit, end = match.groups()
    delay, *options = what.split(",")
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
    begin, stop, timed = _period(first, unit, end, (field, text, SYNTAX))
    return [
        LinkRule(source, target, seconds, begin, stop, timed=timed, **values)
        for source, target in parse_link(link, stages, field, anywhere)
    ]


def parse_port_rules(text: str, hosts: int, field: str) -> list[PortRule]:
    """The rules of one `HOST:RATE[@FROM..[TO]]`; a HOST of `all` is each one.

    `text`: the rule, for so many `hosts`. `field`: for errors. Raises BadInput.
    """
    match = _PORT_RULE.fullmatch(text.strip()) if len(text) <= _LONGEST_RULE else None
    if match is None:
        raise BadInput(field, text, PORT_SYNTAX)
    host, what, first, unit, end = match.groups()
    if host != "all" and int(host) >= hosts:
        raise BadInput(field, text, f"no such host; the hosts are 0 to {hosts - 1}")
    rate = parse_rate(what, field)
    if not 1 <= rate < math.inf:
        raise BadInput(field, text, "it has to be a rate above 0, of at least 1B/s")
    begin, stop, timed = _period(first, unit, end, (field, text, PORT_SYNTAX))
    numbers = range(hosts) if host == "all" else [int(host)]
    return [PortRule(number, rate, begin, stop, timed) for number in numbers]


def _period(
    first: str | None, unit: str, end: str | None, of: tuple[str, str, str]
) -> tuple[float, float, bool]:
    """From, up to, and whether these are seconds, of a rule's `@FROM..TO`.

    `of`: the field, the text and the syntax, for errors.
    """
    field, text, syntax = of
    timed = bool(unit)
    try:
        begin, stop = float(first or 0), float(end or math.inf)
    except ValueError:
        raise BadInput(field, text, syntax) from None
    if begin >= stop:
        raise BadInput(field, text, f"it ends before it begins; {syntax}")
    if not timed and begin % 1:
        raise BadInput(field, text, "an iteration is a whole number; seconds end with s")
    return begin, stop, timed
