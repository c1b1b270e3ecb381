"""Words for unusual workers of several replicas: dead, slow, or with slow paths or ports."""

from __future__ import annotations

import math

from megatron_adaptra.base.units import size
from megatron_adaptra.ir.replicas import ReplicaConditions

MOST = 6  # paths, ports or workers of one kind that are named


def replicas_in_words(conditions: ReplicaConditions) -> str:
    """Describe what is unusual about the workers, for titles; empty where all are alike.

    `conditions`: of all workers.
    """
    c, parts = conditions, []
    if c.failed:
        parts.append(f"{_workers([c.name(w) for w in sorted(c.failed)])} dead")
    times: dict[float, list[str]] = {}
    for worker, each in sorted(c.slow.items()):
        times.setdefault(each, []).append(c.name(worker))
    parts += [f"{_workers(names)} {each:g}x slow" for each, names in sorted(times.items())]
    seen: dict[str, str] = {}
    for (source, target), link in sorted(c.paths.items()):
        both = c.paths.get((target, source)) == link
        if both and source > target:
            continue
        name = f"{c.name(source)}{'-' if both else '>'}{c.name(target)}"
        limits = [f"at {rate(link.bandwidth)}"] if math.isfinite(link.bandwidth) else []
        limits += [f"{1e3 * link.delay:g} ms later"] if link.delay else []
        seen[name] = " and ".join(limits) or "healthy"
    parts += [f"path {name} {limit}" for name, limit in list(seen.items())[:MOST]]
    if len(seen) > MOST:
        parts.append(f"{len(seen) - MOST} more paths slow")
    parts += [f"port of {c.name(w)} at {rate(each)}" for w, each in sorted(c.ports.items())[:MOST]]
    return ", ".join(parts)


def rate(bandwidth: float) -> str:
    """`bandwidth`, bytes per second, as text."""
    return f"{size(bandwidth)}/s"


def _workers(names: list[str]) -> str:
    if len(names) > MOST:
        return f"{len(names)} workers"
    return f"worker{'s' * (len(names) > 1)} {', '.join(names)}"
