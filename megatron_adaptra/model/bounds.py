"""Closed forms and lower bounds of an iteration's time."""

from __future__ import annotations

from megatron_adaptra.ir.conditions import Conditions


def one_f_one_b_seconds(
    stages: int, microbatches: int, forward: float, backward: float
) -> float:
    """1F1B on equal stages and healthy links: (m + p - 1)(f + b).

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM" (SC 2021), section 2.2.
    """
    return (microbatches + stages - 1) * (forward + backward)


def lower_bound(conditions: Conditions, split: bool = False) -> float:
    """Seconds that no schedule beats, whatever its memory.

    `split`: whether schedules may send a gradient before its weight half is done. For each stage
    s: its first forward has to reach it; then it has all its work to do; its last gradient has to
    travel back to stage 0; and between its first forward and its first backward lies the round
    trip to the last stage. Besides, no link carries more than its bandwidth, and stages that share
    cores cannot do their work faster than all cores together.
    """
    c = conditions
    count = c.microbatches
    late = c.backward_weight if split else (0.0,) * c.stages
    early = [
        i + w - l for i, w, l in zip(c.backward_input, c.backward_weight, late, strict=True)
    ]
    best = 0.0
    reach = 0.0  # when the first activation can be on stage s
    back = 0.0  # from the end of stage s's last gradient to the end of the pipeline
    for s in range(c.stages):
        trip = _round_trip(c, s, early)
        best = max(
            best,
            reach + count * (c.forward[s] + early[s] + late[s]),
            reach + count * (c.forward[s] + early[s]) + back,
            reach + trip + (count - 1) * max(c.forward[s], early[s]) + back,
        )
        if s + 1 < c.stages:
            reach += c.forward[s] + _wire(c, s, s + 1)
            back = _wire(c, s + 1, s) + early[s] + max(back, late[s])
            busiest = max(1 / c.link(s, s + 1).bandwidth, 1 / c.link(s + 1, s).bandwidth)
            best = max(best, count * c.message_bytes * busiest)
    if c.cores is not None:
        work = sum(c.forward) + sum(c.backward_input) + sum(c.backward_weight)
        best = max(best, count * work / c.cores)
    return best + c.tail


def _wire(c: Conditions, source: int, target: int) -> float:
    link = c.link(source, target)
    return link.delay + c.message_bytes / link.bandwidth


def _round_trip(c: Conditions, start: int, early: list[float]) -> float:
    """One microbatch from stage `start` to the last stage and back to `start`'s gradient."""
    stages = range(start, c.stages)
    seconds = sum(c.forward[s] + early[s] for s in stages)
    return seconds + sum(_wire(c, s, s + 1) + _wire(c, s + 1, s) for s in stages[:-1])
