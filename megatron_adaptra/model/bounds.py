"""Lower bounds of an iteration's time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.schedule import RECOMPUTED_SHARE
from megatron_adaptra.model.starts import Floats, Ints, Job, Starts, earliest


def unlimited_bound(conditions: Conditions) -> float:
    """Seconds that no schedule beats, whatever its memory."""
    return lower_bound(replace(conditions, activation_budget=(), recompute=False))


def lower_bound(conditions: Conditions) -> float:
    """Seconds that no schedule within the activation budget beats.

    The iteration lasts until each stage has done all its work, and no op before its earliest start
    (`model.starts`). Where microbatches may be recomputed, `_recomputed` says what still holds.
    """
    c, job = conditions, Job(conditions)
    room = job.room(c)
    if c.recompute and (room < job.most).any():
        return _recomputed(c, job, room) + c.step_seconds
    starts = earliest(job, room)
    return max(_end(c, job, starts), _carried(c, job, starts)) + c.step_seconds


def _recomputed(c: Conditions, job: Job, room: Ints) -> float:
    """The bound where microbatches may be recomputed, from three relaxations.

    *In flight.* Of n microbatches between F and I on a stage, one is the first to get to its I; it
    then holds 1, the others s = RECOMPUTED_SHARE or more: 1 + (n - 1) s fit. So I frees room for F,
    of 2 n halves, and W frees none.

    *Made.* Take for the forward of a microbatch the op that makes its activations: F, or R
    where there is one. What else a stage runs and holds only adds, so the rules hold for these,
    except that R does not wait for the stage before, and I need not wait for the round trip after
    R. Not with chunks, where R of one need not follow R of the one before.

    *Kept.* See `_kept`.
    """
    fit = 1 + (np.array(c.activation_budget) * c.chunks - 1) / RECOMPUTED_SHARE + 1e-6
    fit = np.floor(np.minimum(fit, c.microbatches * c.chunks))
    held = Job(replace(c, backward_weight=(0.0,) * c.stages)) if c.split else job
    starts = earliest(held, 2 * fit.astype(int))
    best = max(_end(c, job, starts), _carried(c, job, starts), _kept(job, room, starts))
    if c.chunks == 1:
        either = np.minimum(job.forward, job.again)
        quick = Job(replace(c, forward=tuple(either)))
        made = earliest(quick, room, known=starts, linked=(False, True), turn=either)
        best = max(best, _end(c, quick, made))
    return best


def _end(c: Conditions, job: Job, starts: Starts) -> float:
    """When the stages are done, each alone and all on the cores they share."""
    ops, seconds = _work(job, starts)
    done = float(_finish(ops, seconds).max())
    if c.cores is not None and c.shared:
        computed = seconds * [c.on_core(stage) for stage in range(c.stages)]
        shared = _finish(ops.reshape(-1, 1), computed.reshape(-1, 1) / c.cores)
        done = max(done, float(shared.max()))
    return done


def _carried(c: Conditions, job: Job, starts: Starts) -> float:
    """When links, and ports, have carried all their messages, one after another."""
    made = starts.forward + job.forward, starts.backward + job.early
    made_at = [seconds.reshape(job.count, -1) for seconds in made]
    done = 0.0
    for ways, seconds in _narrow(c, job):
        sent = [made_at[kind][:, x] for way in ways for kind, x in job.sent[way]]
        left = _finish(np.concatenate(sent)[:, None], np.full((len(sent) * job.count, 1), seconds))
        done = max(done, float(left.max()) + min(c.link(*way).delay for way in ways))
    return done


def _narrow(c: Conditions, job: Job) -> Iterator[tuple[list[tuple[int, int]], float]]:
    """Links that share what passes one message at a time, and the seconds of a message there."""
    for way in job.sent:
        if (wire := c.wire(*way)) > 0:
            yield [way], wire
    for stage in c.ports:
        for side in (0, 1):
            ways = [way for way in job.sent if way[side] == stage]
            if ways and c.port(stage) > 0:
                yield ways, c.port(stage)


def _work(job: Job, starts: Starts) -> tuple[Floats, Floats]:
    """Per stage, the earliest start and the seconds of each of its ops."""
    kinds = starts.forward, starts.backward, starts.backward + job.early
    n = job.count * job.chunks
    ops = np.concatenate([kind.reshape(n, job.stages) for kind in kinds])
    return ops, np.repeat([job.forward, job.early, job.late], n, 0)


def _finish(starts: Floats, seconds: Floats) -> Floats:
    """Per column, when one machine is done at the earliest.

    All that starts at t or later is after t, for every t.
    """
    order = np.argsort(-starts, 0)
    after = np.cumsum(np.take_along_axis(seconds, order, 0), 0)
    done: Floats = (np.take_along_axis(starts, order, 0) + after).max(0)
    return done


def _kept(job: Job, room: Ints, known: Starts) -> float:
    """Seconds that a stage needs, for the L of its microbatches to recompute that is best for it.

    Each costs it a recomputation. And take those L away: what is left is a schedule of m - L
    microbatches that does without recompute on this stage, so that it waits for their round
    trips. What is `known` of the first m - L microbatches holds for it too.
    """
    alone = earliest(job, room, known=known, linked=(False, False))
    trips = (alone.backward + job.early + job.home).max(1)  # [m - L - 1, stage]
    trips = np.concatenate([np.zeros((1, job.stages)), trips])
    n = job.count * job.chunks
    recomputed = np.arange(1, job.count + 1)[:, None] * job.again
    work = n * (job.forward + job.early) + recomputed + np.maximum(n * job.late, job.home[0])
    some = np.maximum(job.down[0] + work, trips[-2::-1]).min(0)
    return float(np.minimum(trips[-1], some).max())
