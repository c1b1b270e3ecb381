"""The job that a command is about: the same flags everywhere, over a profile where one is given."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_adaptra.base.errors import BadInput, refuse_unknown
from megatron_adaptra.base.units import number, whole
from megatron_adaptra.cli.once import Once
from megatron_adaptra.cli.output import note
from megatron_adaptra.cli.profile import KEYS, activation_bytes_of, conditions_of, load_profile
from megatron_adaptra.cli.slow_job import replicas_in_words, slow_conditions, slow_replicas
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.replicas import ReplicaConditions

_MS = "milliseconds; one number, or one per stage with commas between"
# The flags of a job: key of a profile -> form of its value, help.
_FLAGS = {
    "stages": ("N", "pipeline stages"),
    "microbatches": ("N", "microbatches of an iteration, in each replica"),
    "replicas": ("N", "data-parallel replicas of the pipeline, which may run each other's "
                 "microbatches (default: 1)"),
    "forward_ms": ("X,...", "forward of a microbatch, " + _MS),
    "backward_ms": ("X,...", "its whole backward, in the same form"),
    "slow": ("RULE", "what is slow; may be repeated. 2-3:40ms a link, both ways (2>3: one "
             "way), 2-3:10MB/s what it carries, 0.1-1.2:40ms a path between workers "
             "(replica.stage), 1.2:2x a worker, 2:2x a replica, 1.2:10MB/s a worker's port, "
             "1.2:dead"),
    "chunks": ("N", "model chunks per stage, as of Megatron's interleaved schedule (default: 1)"),
    "message_bytes": ("X", "size of a message, such as 4MiB, for rates"),
    "activation_budget": ("X,...", "what a stage may hold of activations: microbatches (12), or "
                          "bytes (20GiB), which need --activation-bytes (default: no limit)"),
    "activation_bytes": ("X,...", "what the activations of a microbatch take on a stage, such as "
                         "400MB; memory is then shown in bytes, too"),
}  # fmt: skip
_WHOLE = ("stages", "microbatches", "chunks", "replicas")
_SWITCHES = ("split", "recompute")
_HEALTHY = ", all links healthy"
_SINGLE = ("message_bytes", "optimizer_ms")
# Values that may have a unit, and the end of that unit.
_UNITS = {
    "activation_budget": "B", "activation_bytes": "B", "message_bytes": "B", "link_bandwidth": "/s",
    "port_bandwidth": "/s",
}  # fmt: skip
# The shape of a job for which only slow replicas are given.
_SHAPE = {"stages": 1, "microbatches": 8, "forward_ms": 10.0, "backward_ms": 20.0}
_EXAMPLE = "--stages 4 --microbatches 12 --forward-ms 9 --backward-ms 16 --slow 2-3:40ms"


def add_job(parser: argparse.ArgumentParser) -> None:
    """The flags that describe a job."""
    parser.usage = "%(prog)s [flags]"
    parser.epilog = f"example: {parser.prog} {_EXAMPLE}"
    group = parser.add_argument_group("the job", "by flags, or by --profile FILE; flags win")
    for key, (form, text) in _FLAGS.items():
        action = "append" if key == "slow" else Once
        group.add_argument(_flag(key), dest=key, action=action, metavar=form, help=text)
    text = "let single microbatches be recomputed, to save memory"
    group.add_argument("--recompute", action="store_true", default=None, help=text)
    rest = [key for key in KEYS if key not in (*_FLAGS, "recompute")]
    for flag, form, text in (
        ("--profile", "FILE", "YAML or JSON file with these settings"),
        ("--name", "NAME", "the job to take from a file that lists several"),
    ):
        group.add_argument(flag, action=Once, metavar=form, help=text)
    text = f"one more setting of a profile (docs/planner.md): {', '.join(rest)}"
    group.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=text)


@dataclass(frozen=True)
class Job:
    """A job as its user describes it.

    `activation_bytes`: of a microbatch, per stage, if known. `budget`: the activation budget as it
    was given. `field`: how a key of a profile is called where the user wrote it. `replicas`: all
    workers, of which `conditions` are those of each replica; None for one pipeline. `whole`: whole
    replicas are described as slow. `taken`: what was not given and is taken, in words; or empty.
    """

    conditions: Conditions
    activation_bytes: tuple[float, ...] | None
    budget: Any
    field: Callable[[str], str]
    replicas: ReplicaConditions | None = None
    whole: bool = False
    taken: str = ""

    def nbytes(self, held: Sequence[float]) -> list[float] | None:
        """Return the bytes of `held` microbatches per stage, or worker; None if not known."""
        if self.activation_bytes is None:
            return None
        each = self.activation_bytes * (self.replicas.replicas if self.replicas else 1)
        return [count * one for count, one in zip(held, each, strict=True)]


def job_of(args: argparse.Namespace, default: Mapping[str, Any] | None = None) -> Job:
    """The job that flags and file describe, over `default`; raises BadInput."""
    flags = _given(args)
    values = {} if args.profile is None else load_profile(args.profile, args.name)
    if args.name and not args.profile:
        raise BadInput("--name", args.name, "it picks a job of --profile FILE, which is missing")
    if any(key.startswith("backward") for key in flags):
        values = {k: v for k, v in values.items() if not k.startswith("backward")}
    values = {**(default or {}), **values, **flags}

    def field(key: str) -> str:
        return _flag(key) if key in flags or not args.profile else key

    whole_ones = slow_replicas(values, field)
    values, taken = _with_a_shape(values) if whole_ones else (values, "")
    conditions, replicas = slow_conditions(values, conditions_of(values, field), field)
    if not conditions.message_bytes:
        needed = field("message_bytes")
        for key in _limited(values, conditions, replicas):
            note(f"{field(key)} changes nothing without {needed}, the size of a message")
    each = activation_bytes_of(values, conditions.stages, field)
    budget = values.get("activation_budget")
    return Job(conditions, each, budget, field, replicas, whole_ones, taken)


def _with_a_shape(values: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Complete `values`, of slow replicas, by a shape; return them, and what is added in words.

    The gain of sharing out microbatches can be shown without the size of the job.
    """
    taken = {key: value for key, value in _SHAPE.items() if key not in values}
    if any(key.startswith(("forward", "backward")) for key in values):
        taken = {key: value for key, value in taken.items() if not key.endswith("_ms")}
    words = ", ".join(f"{_flag(key)} {value:g}" for key, value in taken.items())
    return {**taken, **values}, f"taken, as they are not given: {words}" if words else ""


def _limited(
    values: Mapping[str, Any], conditions: Conditions, replicas: ReplicaConditions | None
) -> Iterator[str]:
    """Give the keys of the job that limit bytes per second: of links, paths or ports."""
    found = [link.bandwidth for link in conditions.links.values()] + [*conditions.ports.values()]
    if replicas:
        found += [path.bandwidth for path in replicas.paths.values()] + [*replicas.ports.values()]
    if any(map(math.isfinite, found)):
        keys = ("link_bandwidth", "port_bandwidth", "slow")
        yield from (key for key in keys if key in values)


def title_of(args: argparse.Namespace) -> str:
    """Return the user's name of the job, else the name of its profile, else empty text."""
    return args.name or (Path(args.profile).stem if args.profile else "")


def in_words(conditions: Conditions, replicas: ReplicaConditions | None = None) -> str:
    """The job in a line, for titles; with `replicas`, each of which has these `conditions`."""
    c = conditions
    text = f"{c.stages} stage{'s' * (c.stages > 1)} × {c.microbatches} microbatch"
    text += "es" * (c.microbatches > 1)
    if replicas is not None:
        text = f"{replicas.replicas} replicas × {text}"
    if c.chunks > 1:
        text += f" × {c.chunks} chunks"
    slow = {pair: 1e3 * link.delay for pair, link in c.links.items() if link.delay}
    thin = {pair: 1e3 * wire for pair in c.links if (wire := c.wire(*pair))}
    if slow:
        text += f", {_which(slow)} slower by {_span(slow)} ms"
    if c.ports:
        names = ", ".join(map(str, sorted(c.ports)))
        text += f", port{'s' * (len(c.ports) > 1)} of stage {names} limited"
    if thin:
        text += f", {_which(thin)} busy for {_span(thin)} ms with each message"
    unusual = replicas_in_words(replicas) if replicas is not None else ""
    return ", ".join([text, *filter(None, [unusual])]) + _HEALTHY * (
        not (slow or thin or c.ports or unusual)
    )


def _which(links: Iterable[tuple[int, int]]) -> str:
    pairs = sorted({(min(pair), max(pair)) for pair in links})
    return f"link {pairs[0][0]}–{pairs[0][1]}" if len(pairs) == 1 else f"{len(pairs)} links"


def _span(ms: Mapping[tuple[int, int], float]) -> str:
    values = sorted({round(value, 3) for value in ms.values()})
    return f"{values[0]:g}" if len(values) == 1 else f"{values[0]:g} to {values[-1]:g}"


def _flag(key: str) -> str:
    known = key in _FLAGS or key == "recompute"
    return "--" + key.replace("_", "-") if known else f"--set {key}"


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """Return the job's flags in the form of a profile; raises BadInput."""
    out: dict[str, Any] = {"recompute": True} if args.recompute else {}
    texts = {key: text for key in _FLAGS if (text := getattr(args, key)) is not None}
    for text in args.set:
        key, equals, value = text.partition("=")
        if not equals:
            raise BadInput("--set", text, "it has to be of the form KEY=VALUE")
        refuse_unknown({key: value}, KEYS, "--set")
        if texts.setdefault(key, value) != value or key in out:
            raise BadInput("--set", text, f"{key} is given twice")
    return {**out, **{key: _read(key, text) for key, text in texts.items()}}


def _read(key: str, text: Any) -> Any:
    """Return the value that `text` has for the `key` of a profile; raises BadInput."""
    if key in ("slow", "worker_budget"):
        return text
    if key in _SWITCHES:
        if text not in ("yes", "no"):
            raise BadInput(_flag(key), text, "it has to be yes or no")
        return text == "yes"
    allowed = "it has to be a number"
    try:
        if key in _WHOLE:
            allowed = "it has to be a whole number of at least 1"
            return whole(text)
        allowed += ", or several with commas between" * (key not in _SINGLE)
        read = partial(_number_or_unit, end=_UNITS[key]) if key in _UNITS else number
        numbers = [read(word) for word in text.split(",")]
    except ValueError:
        raise BadInput(_flag(key), text, allowed) from None
    return numbers if "," in text else numbers[0]


def _number_or_unit(text: str, end: str) -> float | str:
    """Return a number, or text that ends with a unit unchanged; ValueError for any other text.

    Args:
        end: of the unit.
    """
    word = text.strip()
    digit = word[:1].isascii() and word[:1].isdigit()
    if digit and word.lower().endswith(end.lower()) and len(word) < 60:
        return word
    return number(text)
