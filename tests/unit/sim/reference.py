"""A second simulator, slow and naive: go over all lines until no time changes any more.

No shared cores. It knows the rules of a program on its own; nothing comes from `ir.deps`.
"""

from __future__ import annotations

import math

from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.program import Program
from megatron_adaptra.ir.replicas import ReplicaConditions

# Activation or gradient, the position that made it, microbatch, home.
Key = tuple[str, int, int, int | None]


def reference_seconds(program: Program, costs: Conditions | ReplicaConditions, sends: str) -> float:
    """The end of the iteration."""
    several = costs if isinstance(costs, ReplicaConditions) else None
    c = costs.pipeline if isinstance(costs, ReplicaConditions) else costs
    slow, paths, ports = (
        (several.slow, several.paths, several.ports) if several else ({}, {}, c.ports)
    )
    stages, chunks = len(program.order) // program.replicas, program.chunks
    ran = {  # who computes it
        (op.kind.value, op.chunk * stages + worker % stages, op.microbatch, op.home): worker
        for worker, line in enumerate(program.order)
        for op in line
    }

    def foreign(kinds: str, x: int, mine: tuple[int, int | None], worker: int) -> bool:
        return any(ran.get((kind, x, *mine), worker) != worker for kind in kinds)

    arrival: dict[Key, float] = {}
    while True:
        sent: dict[Key, tuple[float, int]] = {}
        posted: dict[Key, tuple[float, int, int]] = {}
        ends = []
        for worker, line in enumerate(program.order):
            t, stage = 0.0, worker % stages
            for i, op in enumerate(line):
                kind, x, mine = op.kind.value, op.chunk * stages + stage, (op.microbatch, op.home)
                if kind == "SF":
                    sent[("a", x, *mine)] = t, worker
                elif kind == "SB":
                    sent[("g", x, *mine)] = t, worker
                elif kind == "PF":
                    posted[("a", x - 1, *mine)] = t, worker, i
                elif kind == "PB":
                    posted[("g", x + 1, *mine)] = t, worker, i
                else:
                    if kind == "F" and foreign("F", x - 1, mine, worker):
                        t = max(t, arrival.get(("a", x - 1, *mine), 0.0))
                    if kind in "BI" and foreign("BI", x + 1, mine, worker):
                        t = max(t, arrival.get(("g", x + 1, *mine), 0.0))
                    forward, half = c.forward[stage], c.backward_input[stage]
                    rest = c.backward_weight[stage]
                    cost = {"F": forward, "R": forward, "I": half, "W": rest, "B": half + rest}
                    t += slow.get(worker, 1.0) * cost[kind] / chunks
            ends.append(t)
        queue = []
        for key, (t, source) in sent.items():
            came, target, i = posted[key]
            back = target, source
            word = came + paths.get(back, c.link(*(w % stages for w in back))).delay
            ready = max(t, word) if sends == "rendezvous" else t
            # What was sent long ago and waited for words of one moment goes as posted.
            queue.append((ready, i if ready > t else -1, source, target, key))
        new: dict[Key, float] = {}
        free: dict[object, float] = {}
        for ready, _, source, target, key in sorted(queue, key=lambda entry: entry[:2]):
            link = paths.get((source, target), c.link(source % stages, target % stages))
            rates = [ports.get(worker, math.inf) for worker in (source, target)]
            ways: list[object] = [(source, target)]
            if rates[0] < math.inf:
                ways.append(("out", source))
            if rates[1] < math.inf:
                ways.append(("in", target))
            left = max(ready, *(free.get(way, 0.0) for way in ways), 0.0)
            left += c.message_bytes / min(link.bandwidth, *rates)
            free.update(dict.fromkeys(ways, left))
            new[key] = left + link.delay
        if new == arrival:
            return max(ends) + c.step_seconds
        arrival = new
