"""The job that a command is about: the same flags everywhere, over a profile where one is given."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.base.units import number, whole
from megatron_adaptra.cli.once import Once, OnceSwitch
from megatron_adaptra.cli.output import note
from megatron_adaptra.cli.profile import activation_bytes_of, conditions_of, load_profile
from megatron_adaptra.cli.replica_job import (
    add_replicas,
    given_of_replicas,
    replicas_in_words,
    replicas_of,
)
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.replicas import ReplicaConditions

_MS = "milliseconds; one number, or one per {} with commas between"
_WHOLE = {
    "stages": "pipeline stages",
    "microbatches": "microbatches per iteration",
    "chunks": "model chunks per stage, as of Megatron's interleaved schedule (default: 1)",
}
_NUMBERS = {
    "forward_ms": "forward of a microbatch, " + _MS.format("stage"),
    "backward_ms": "its whole backward, in the same form",
    "backward_input_ms": "instead of --backward-ms: its part for the gradient of the input",
    "backward_weight_ms": "instead of --backward-ms: its part for the gradients of the weights",
    "link_delay_ms": "how much longer a message takes than on a healthy link, one per link; "
    "with chunks, the link from the last stage to the first may follow",
    "return_delay_ms": "the same for gradients, which go back (default: as --link-delay-ms)",
    "link_jitter": "standard deviation of a link's delay, as a share of the delay (default: 0)",
    "link_bandwidth": "bytes per second, such as 10MB/s or 1Gbit/s, one per link; needs "
    "--message-bytes (default: no limit)",
    "port_bandwidth": "what a stage sends, and receives, in all, over all its links, in the same "
    "form, one per stage",
    "message_bytes": "size of a message, such as 4MiB, for these two",
    "activation_budget": "what a stage may hold of activations: microbatches (12), or bytes "
    "(20GiB), which need --activation-bytes (default: no limit)",
    "activation_bytes": "what the activations of a microbatch take on a stage, such as 400MB; "
    "memory is then shown in bytes, too",
    "optimizer_ms": "from the last backward to the end of the optimizer step (default: 0)",
}
_HEALTHY = ", all links healthy"
_SINGLE = ("message_bytes", "optimizer_ms")
# Values that may have a unit, and the end of that unit.
_UNITS = {
    "activation_budget": "B", "activation_bytes": "B", "message_bytes": "B", "link_bandwidth": "/s",
    "port_bandwidth": "/s",
}  # fmt: skip
_SWITCHES = {
    "split": "let a backward run in two parts, input and weights (default: yes)",
    "recompute": "let single microbatches be recomputed, to save memory (default: no)",
}
# The shape of a job for which only slow replicas are given.
_SHAPE = {"stages": 1, "microbatches": 8, "forward_ms": 10.0, "backward_ms": 20.0}
_EXAMPLE = "--stages 4 --microbatches 12 --forward-ms 9 --backward-ms 16 --link-delay-ms 0,0,40"


def add_job(parser: argparse.ArgumentParser) -> None:
    """The flags that describe a job."""
    parser.usage = "%(prog)s [flags]"
    parser.epilog = f"example: {parser.prog} {_EXAMPLE}"
    group = parser.add_argument_group("the job", "by flags, or by --profile FILE; flags win")
    add = partial(group.add_argument, action=Once)
    for key, text in _WHOLE.items():
        add(_flag(key), dest=key, metavar="N", help=text)
    for key, text in _NUMBERS.items():
        add(_flag(key), dest=key, metavar="X" if key in _SINGLE else "X,...", help=text)
    for key, text in _SWITCHES.items():
        group.add_argument(_flag(key), dest=key, action=OnceSwitch, help=text)
    add("--profile", metavar="FILE", help="YAML or JSON file with these settings")
    add("--name", help="the job to take from a file that lists several")
    add_replicas(parser)


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
    flags = {**_given(args), **given_of_replicas(args)}
    values = {} if args.profile is None else load_profile(args.profile, args.name)
    if args.name and not args.profile:
        raise BadInput("--name", args.name, "it picks a job of --profile FILE, which is missing")
    if any(key.startswith("backward") for key in flags):
        values = {k: v for k, v in values.items() if not k.startswith("backward")}
    values = {**(default or {}), **values, **flags}
    values, taken = _with_a_shape(values)

    def field(key: str) -> str:
        return _flag(key) if key in flags or not args.profile else key

    conditions = conditions_of(values, field)
    replicas = replicas_of(values, conditions, field)
    if not conditions.message_bytes:
        needed = field("message_bytes")
        for key in _limited(conditions, replicas):
            note(f"{field(key)} changes nothing without {needed}, the size of a message")
    each = activation_bytes_of(values, conditions.stages, field)
    budget, whole_ones = values.get("activation_budget"), "slow_replica" in values
    return Job(conditions, each, budget, field, replicas, whole_ones, taken)


def _with_a_shape(values: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Complete `values` by a shape if whole replicas are slow; return them, and it in words.

    The gain of sharing out microbatches can be shown without the size of the job.
    """
    if "slow_replica" not in values:
        return values, ""
    taken = {key: value for key, value in _SHAPE.items() if key not in values}
    if any(key.startswith(("forward", "backward")) for key in values):
        taken = {key: value for key, value in taken.items() if not key.endswith("_ms")}
    words = ", ".join(f"{_flag(key)} {value:g}" for key, value in taken.items())
    return {**taken, **values}, f"taken, as they are not given: {words}" if words else ""


def _limited(conditions: Conditions, replicas: ReplicaConditions | None) -> Iterator[str]:
    """Give the keys of the job that limit bytes per second: of links, paths or ports."""
    if any(math.isfinite(link.bandwidth) for link in conditions.links.values()):
        yield "link_bandwidth"
    elif replicas and any(math.isfinite(path.bandwidth) for path in replicas.paths.values()):
        yield "slow_path"
    if conditions.ports:
        yield "port_bandwidth"
    if replicas and replicas.ports:
        yield "slow_port"


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
    return "--" + key.replace("_", "-")


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """Return the job's flags in the form of a profile; raises BadInput."""
    out = {key: getattr(args, key) for key in _SWITCHES if getattr(args, key) is not None}
    for key in (*_WHOLE, *_NUMBERS):
        text = getattr(args, key)
        if text is None:
            continue
        try:
            if key in _WHOLE:
                out[key] = whole(text)
            else:
                read = partial(_number_or_unit, end=_UNITS[key]) if key in _UNITS else number
                numbers = [read(word) for word in text.split(",")]
                out[key] = numbers if "," in text else numbers[0]
        except ValueError:
            allowed = "it has to be a number" + ", or several with commas between" * (
                key not in _SINGLE
            )
            if key in _WHOLE:
                allowed = "it has to be a whole number of at least 1"
            raise BadInput(_flag(key), text, allowed) from None
    return out


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
