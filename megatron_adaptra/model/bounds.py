"""Closed forms and lower bounds of an iteration's time."""

from __future__ import annotations

from megatron_adaptra.ir.conditions import Conditions


def one_f_one_b_seconds(stages: int, microbatches: int, forward: float, backward: float) -> float:
    """1F1B on equal stages and healthy links: (m + p - 1)(f + b).

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM" (SC 2021), section 2.2.
    """
    return (microbatches + stages - 1) * (forward + backward)


def lower_bound(conditions: Conditions, split: bool = False, chunks: int = 1) -> float:
    """Seconds that no schedule beats, whatever its memory.

    `split`: whether schedules may send a gradient before its weight half is done. `chunks`: the
    virtual stages per device. For each stage: its first forward has to reach it; then it has all
    its work to do; its last gradient has to travel back to stage 0. A microbatch makes the round
    trip to the end of the model, and the others follow it no faster than the stage and its links
    let them through. Stages that share cores cannot do their work faster than all cores together.
    """
    c = conditions
    count, stages, positions = c.microbatches, c.stages, c.stages * chunks
    both = tuple(i + w for i, w in zip(c.backward_input, c.backward_weight, strict=True))
    early = c.backward_input if split else both  # what has to be done before a gradient is sent
    late = c.backward_weight if split else (0.0,) * stages

    def wire(source: int, target: int) -> tuple[float, float]:
        """Seconds on the wire, and in all, of one message between two positions of the model."""
        source, target = source % stages, target % stages
        if source == target:
            return 0.0, 0.0
        link = c.link(source, target)
        seconds = c.message_bytes / link.bandwidth
        return seconds, seconds + link.delay

    trip = [0.0] * positions  # from the start of a forward to the end of its backward
    for x in reversed(range(positions)):
        trip[x] = (c.forward[x % stages] + early[x % stages]) / chunks
        if x + 1 < positions:
            trip[x] += wire(x, x + 1)[1] + trip[x + 1] + wire(x + 1, x)[1]

    best = reach = back = 0.0  # reach: when the first activation can be there; back: the way home
    for s in range(stages):
        pace = max(c.forward[s], early[s]) / chunks  # seconds from one microbatch to the next
        if s:
            to, fro = wire(s - 1, s), wire(s, s - 1)
            pace = max(pace, to[0], fro[0])
            best = max(best, count * chunks * to[0])
            reach += c.forward[s - 1] / chunks + to[1]
            back = fro[1] + early[s - 1] / chunks + max(back, late[s - 1] / chunks)
        best = max(
            best,
            reach + count * (c.forward[s] + both[s]),
            reach + count * (c.forward[s] + early[s]) + back,
            reach + trip[s] + (count - 1) * pace + back,
        )
    if c.cores is not None:
        best = max(best, count * (sum(c.forward) + sum(both)) / c.cores)
    return best + c.tail
