"""A second simulator, slow and naive: go over all lines until no time changes any more.

No shared cores. It knows the rules of a program on its own; nothing comes from `ir.deps`.
"""

from __future__ import annotations

from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.program import Program

Key = tuple[str, int, int]  # activation or gradient, the position that made it, microbatch


def reference_seconds(program: Program, c: Conditions, sends: str) -> float:
    stages, chunks = program.stages, program.chunks
    last = stages * chunks - 1
    arrival: dict[Key, float] = {}
    while True:
        sent: dict[Key, float] = {}
        posted: dict[Key, tuple[float, int]] = {}
        ends = []
        for stage, line in enumerate(program.order):
            t = 0.0
            for i, op in enumerate(line):
                kind, x, k = op.kind.value, op.chunk * stages + stage, op.microbatch
                if kind == "SF":
                    sent["a", x, k] = t
                elif kind == "SB":
                    sent["g", x, k] = t
                elif kind == "PF":
                    posted["a", x - 1, k] = t, i
                elif kind == "PB":
                    posted["g", x + 1, k] = t, i
                else:
                    if kind == "F" and x > 0 and stages > 1:
                        t = max(t, arrival.get(("a", x - 1, k), 0.0))
                    if kind in "BI" and x < last and stages > 1:
                        t = max(t, arrival.get(("g", x + 1, k), 0.0))
                    forward, half = c.forward[stage], c.backward_input[stage]
                    rest = c.backward_weight[stage]
                    cost = {"F": forward, "R": forward, "I": half, "W": rest, "B": half + rest}
                    t += cost[kind] / chunks
            ends.append(t)
        new: dict[Key, float] = {}
        for source in range(stages):
            for target in range(stages):
                queue = []
                for (what, x, k), t in sent.items():
                    to = x + 1 if what == "a" else x - 1
                    if (x % stages, to % stages) != (source, target):
                        continue
                    came, i = posted[what, x, k]
                    word = came + c.link(target, source).delay
                    ready = max(t, word) if sends == "rendezvous" else t
                    # What was sent long ago and waited for words of one moment goes as posted.
                    queue.append((ready, i if ready > t else -1, (what, x, k)))
                free, link = 0.0, c.link(source, target)
                for ready, _, key in sorted(queue, key=lambda entry: entry[:2]):
                    free = max(free, ready) + c.message_bytes / link.bandwidth
                    new[key] = free + link.delay
        if new == arrival:
            return max(ends) + c.step_seconds
        arrival = new
