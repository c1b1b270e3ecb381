"""Conditions of a job from flags and profiles, whose milliseconds become seconds here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_adaptra.base.errors import BadFile, BadInput, as_text, refuse_unknown, shown
from megatron_adaptra.base.units import parse_bytes, parse_rate, size
from megatron_adaptra.base.user_files import read_data
from megatron_adaptra.ir.conditions import Conditions, LinkState

KEYS = (
    "stages", "microbatches", "chunks", "forward_ms", "backward_ms", "backward_input_ms",
    "backward_weight_ms", "link_delay_ms", "return_delay_ms", "link_jitter", "link_bandwidth",
    "port_bandwidth", "message_bytes", "activation_budget", "activation_bytes", "recompute",
    "split", "optimizer_ms", "replicas", "slow", "worker_budget",
)  # fmt: skip
# More keys that a profile may have: its job's name, and figures that others published.
CARRIED = ("name", "published_plan_ms", "published_warmup", "published_measured_ms")

_HEALTHY = {
    "link_delay_ms": 0.0, "return_delay_ms": 0.0, "link_jitter": 0.0, "link_bandwidth": math.inf,
}  # fmt: skip
MOST_CELLS = 1_000_000  # stages x microbatches x chunks; more is a slip, and takes hours to plan
# Bounds of numbers other than 0 and infinity: within them sums and shares stay finite.
MOST = {"message_bytes": 1e15, "activation_bytes": 1e15, "link_jitter": 1e3}
LEAST = {"link_bandwidth": 1.0, "port_bandwidth": 1.0}
LEAST_BYTES = 1.0
MOST_MS, LEAST_MS = 1e12, 1e-9

Field = Callable[[str], str]  # gives the name of a key as the user wrote it


def load_profile(path: str, name: str | None = None) -> dict[str, Any]:
    """The keys and values of the YAML or JSON file at `path`; `name` picks one of a list.

    Raises BadFile if it cannot be read, BadInput for unknown keys and names.
    """
    data = read_data(path, "--profile")
    if isinstance(data, list):
        data = _pick(data, name, path)
    elif name is not None and isinstance(data, dict) and data.get("name") != name:
        raise BadInput("--name", name, f"{path} holds the one job {shown(data.get('name'))}")
    if not isinstance(data, dict):
        raise BadFile("--profile", path, "it has to hold keys and values, or a list of such")
    refuse_unknown(data, (*KEYS, *CARRIED), path)
    return {key: value for key, value in data.items() if key in KEYS}


def _pick(jobs: list[Any], name: str | None, path: str) -> Any:
    from difflib import get_close_matches

    if name is None and len(jobs) == 1:
        return jobs[0]
    named = {as_text(job["name"]): job for job in jobs if isinstance(job, dict) and "name" in job}
    if name in named:
        return named[name]
    near = get_close_matches((name or "")[:99], named, n=1)
    has = f"{path} has {', '.join(list(named)[:20]) or 'no job with a name'}"
    raise BadInput("--name", name, f"did you mean {near[0]!r}?" if near else has)


def conditions_of(values: Mapping[str, Any], field: Field = str) -> Conditions:
    """Conditions from `values` by the keys of a profile.

    Raises BadInput with the name that `field` gives a key.
    """
    take = _Taker(values, field)
    stages, count = take.whole("stages"), take.whole("microbatches")
    chunks = take.whole("chunks", 1)
    if stages * count * chunks > MOST_CELLS:
        shape = {"microbatches": count, "stages": stages, "chunks": chunks}
        largest = max(shape, key=lambda key: shape[key])
        allowed = f"stages x microbatches x chunks may be {MOST_CELLS} at most"
        raise BadInput(field(largest), shape[largest], allowed)
    half, rest = take.backward(stages)
    return Conditions(
        microbatches=count,
        forward=_seconds(take.numbers("forward_ms", stages, "stage")),
        backward_input=_seconds(half),
        backward_weight=_seconds(rest),
        links=_links(values, field, stages, ring=chunks > 1 and stages > 2),
        message_bytes=take.number("message_bytes", values.get("message_bytes", 0.0)),
        activation_budget=take.budget(stages),
        step_seconds=take.number("optimizer_ms", values.get("optimizer_ms", 0.0)) / 1e3,
        chunks=chunks,
        split=take.truth("split", True),
        recompute=take.truth("recompute", False),
        ports=_ports(take, stages),
    )


def unit_of(text: str) -> str:
    """The unit of `text`, a size such as `20GiB`, without its number."""
    return text.strip().lstrip("0123456789.e- ")


def activation_bytes_of(
    values: Mapping[str, Any], stages: int, field: Field = str
) -> tuple[float, ...] | None:
    """Return the bytes of a microbatch's activations on each of `stages`; None if not known.

    Raises BadInput with the name that `field` gives a key of `values`.
    """
    return _Taker(values, field).activation_bytes(stages)


def _ports(take: _Taker, stages: int) -> dict[int, float]:
    """Return the rate of all links of a stage together, bytes per second each way, if limited."""
    key = "port_bandwidth"
    rates = take.numbers(key, stages, "stage", default=math.inf, infinite=True)
    if not all(rate > 0 for rate in rates):
        raise take.refusal(key, min(rates), "bytes per second, above 0")
    return {stage: rate for stage, rate in enumerate(rates) if rate < math.inf}


def _links(
    values: Mapping[str, Any], field: Field, stages: int, ring: bool
) -> dict[tuple[int, int], LinkState]:
    """Both directions between neighbours; on a ring, between the last stage and the first, too."""
    count = stages if ring else stages - 1
    if ring:
        values = {key: _with_return_link(key, value, stages) for key, value in values.items()}
    take = _Taker(values, field)
    down = take.numbers("link_delay_ms", count, "link", default=0.0)
    up = take.numbers("return_delay_ms", count, "link", default=down)
    share = take.numbers("link_jitter", count, "link", default=0.0)
    width = take.numbers("link_bandwidth", count, "link", default=math.inf, infinite=True)
    links = {}
    for i in range(count):
        if not width[i] > 0:
            raise BadInput(
                field("link_bandwidth"), width[i], "it has to be bytes per second, above 0"
            )
        below = (i + 1) % stages
        links[i, below] = LinkState(down[i] / 1e3, width[i], share[i] * down[i] / 1e3)
        links[below, i] = LinkState(up[i] / 1e3, width[i], share[i] * up[i] / 1e3)
    return links


def _with_return_link(key: str, value: Any, stages: int) -> Any:
    """Add the healthy link from the last stage to the first to a list that leaves it out."""
    short = key in _HEALTHY and isinstance(value, (list, tuple)) and len(value) == stages - 1
    return [*value, _HEALTHY[key]] if short else value


def _seconds(ms: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(x / 1e3 for x in ms)


class _Taker:
    """A taker reads values of a profile and names what is wrong with one."""

    def __init__(self, values: Mapping[str, Any], field: Field) -> None:
        self.values, self.field = values, field

    def refusal(self, key: str, value: Any, allowed: str) -> BadInput:
        return BadInput(self.field(key), value, f"it has to be {allowed}")

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refusal(key, value, "a whole number of at least 1")
        return value

    def truth(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.refusal(key, value, "true or false")
        return value

    def number(self, key: str, value: Any, least: float = 0.0, infinite: bool = False) -> float:
        if key in LEAST and isinstance(value, str):
            value = parse_rate(value, self.field(key))
        elif key in ("message_bytes", "activation_bytes"):
            value = self.size(key, value)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            try:
                number = float(value)
            except OverflowError:
                number = math.inf
            if number >= least and (infinite or number < math.inf):
                return self.sensible(key, number)
        kind = "number" if infinite else "finite number"
        raise self.refusal(key, value, f"a {kind} of at least {least:g}")

    def sensible(self, key: str, number: float) -> float:
        least, most = LEAST.get(key, LEAST_MS), MOST.get(key, MOST_MS)
        if number in (0.0, math.inf) or least <= number <= most:
            return number
        raise self.refusal(key, number, f"0, or from {least:g} to {most:g}")

    def numbers(
        self,
        key: str,
        count: int,
        noun: str,
        default: float | tuple[float, ...] | None = None,
        least: float = 0.0,
        infinite: bool = False,
    ) -> tuple[float, ...]:
        """One number for every stage or link, or a list with one for each."""
        each = self.each(key, count, noun, default)
        return tuple(self.number(key, one, least, infinite) for one in each)

    def each(self, key: str, count: int, noun: str, default: Any) -> Sequence[Any]:
        """One value for every stage or link, as given."""
        value = self.values.get(key, default)
        is_list = isinstance(value, (list, tuple))
        if value is None or (is_list and len(value) != count):
            allowed = f"one number, or a list of {count}, one per {noun}"
            raise self.refusal(key, value, allowed)
        return value if is_list else (value,) * count

    def activation_bytes(self, stages: int) -> tuple[float, ...] | None:
        key = "activation_bytes"
        if key not in self.values:
            return None
        each = self.each(key, stages, "stage", None)
        return tuple(self.number(key, one, LEAST_BYTES) for one in each)

    def budget(self, stages: int) -> tuple[float, ...]:
        """Return microbatches per stage; bytes are divided by those of one microbatch."""
        key, out = "activation_budget", []
        unit = self.activation_bytes(stages)
        for stage, one in enumerate(self.each(key, stages, "stage", math.inf)):
            if not isinstance(one, str):
                out.append(self.number(key, one, least=1.0, infinite=True))
                continue
            nbytes = self.size(key, one)
            if unit is None:
                known = self.field("activation_bytes")
                fault = f"give {known}, what one microbatch takes, or microbatches, 1 at least"
                raise BadInput(self.field(key), one, fault)
            if nbytes < unit[stage]:
                alone = isinstance(self.values[key], (list, tuple))
                least = size(unit[stage] if alone else max(unit), unit_of(one))
                where = f" on stage {stage}" if alone else ""
                fault = f"it has to be at least {least}{where}, what one microbatch takes"
                raise BadInput(self.field(key), one, fault)
            out.append(nbytes / unit[stage])
        return tuple(out)

    def size(self, key: str, value: Any) -> Any:
        """Return the bytes of a text, and any other value unchanged."""
        kind = "microbatches, or " if key == "activation_budget" else ""
        allowed = f"it has to be {kind}bytes such as 20GiB or 500MB"
        return parse_bytes(value, self.field(key), allowed) if isinstance(value, str) else value

    def backward(self, stages: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return both halves of the backward; one that is given as a whole is halved."""
        halves = ("backward_input_ms", "backward_weight_ms")
        given = [key for key in halves if key in self.values]
        if "backward_ms" not in self.values:
            if not given:
                both = " and ".join(map(self.field, halves))
                allowed = f"one number, a list, or else {both}"
                raise self.refusal("backward_ms", None, allowed)
            half, rest = (self.numbers(key, stages, "stage") for key in halves)
            return half, rest
        if given:
            name = self.field(given[0])
            raise BadInput(
                name, self.values[given[0]], f"it has no place beside {self.field('backward_ms')}"
            )
        half = tuple(b / 2 for b in self.numbers("backward_ms", stages, "stage"))
        return half, half
