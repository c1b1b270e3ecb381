"""Swaps: which workers of adjacent stages form a pipeline, so that slow paths carry nothing.

A *chain* is one worker per stage, through which the microbatches of one home go where nothing else
is planned. Other partners at a stage boundary cost neither memory nor work.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from megatron_adaptra.ir.replicas import ReplicaConditions

Chains = list[list[int]]  # per home and stage, the worker


def own_chains(conditions: ReplicaConditions) -> Chains:
    """Return one chain per replica, of its own workers."""
    c = conditions
    return [[d * c.stages + s for s in range(c.stages)] for d in c.all_replicas]


def swapped_chains(conditions: ReplicaConditions) -> Iterator[Chains]:
    """Yield chains that avoid slow paths; then those that gather slow workers in few chains, too.

    Each differs from `own_chains` and from the others.
    """
    seen = [own_chains(conditions)]
    for gather in (False, True):
        chains = _joined(conditions, gather)
        if chains not in seen:
            seen.append(chains)
            yield chains


def _joined(c: ReplicaConditions, gather: bool) -> Chains:
    chains = [[d * c.stages] for d in c.all_replicas]
    for stage in range(1, c.stages):
        above = [chain[-1] for chain in chains]
        below = [d * c.stages + stage for d in c.all_replicas]
        wanted = below
        if gather:
            wanted = _slow_together(
                [_slowness(c, x) for x in chains], [_slowness(c, [w]) for w in below]
            )
            wanted = [below[k] for k in wanted]
        for chain, worker in zip(chains, _matched(c, above, wanted), strict=True):
            chain.append(worker)
    return chains


def _slow_together(above: list[float], below: list[float]) -> list[int]:
    """Return, for each chain of slowness `above`, one of those `below`: slowest with slowest.

    Of equals each keeps its own, which has the same number.
    """
    partner: dict[int, int] = {}
    pairs = product(range(len(above)), range(len(below)))
    for i, k in sorted(pairs, key=lambda ik: (-above[ik[0]], -below[ik[1]], ik[0] != ik[1], ik)):
        if i not in partner and k not in partner.values():
            partner[i] = k
    return [partner[i] for i in range(len(above))]


def _slowness(c: ReplicaConditions, chain: list[int]) -> float:
    dead = any(worker in c.failed for worker in chain)
    return float("inf") if dead else max(c.slow.get(worker, 1.0) for worker in chain)


def _matched(c: ReplicaConditions, above: list[int], wanted: list[int]) -> list[int]:
    """Return a worker of `wanted` for each one of `above`, over the quickest paths.

    The slowest path is as quick as possible, and as many as possible keep what is wanted.
    """
    cost = [[_both_ways(c, a, b) for b in wanted] for a in above]
    for most in sorted({x for row in cost for x in row}):
        fits = [[x <= most for x in row] for row in cost]
        partner = _perfect(fits)
        if partner is not None:
            return [wanted[k] for k in partner]
    raise AssertionError("the last limit lets every pair through")


def _both_ways(c: ReplicaConditions, a: int, b: int) -> tuple[float, float]:
    """Return the cost of a path: seconds on its wire, which set the pace, then its delays."""
    there, back = c.link(a, b), c.link(b, a)
    return max(c.wire(a, b), c.wire(b, a)), there.delay + back.delay


def _perfect(fits: list[list[bool]]) -> list[int] | None:
    """Find a partner for each, by augmenting paths, starting from all that keep their own."""
    count = len(fits)
    partner = [i if fits[i][i] else -1 for i in range(count)]  # of each one above
    taken = [k if fits[k][k] else -1 for k in range(count)]  # of each one below

    def augment(i: int, tried: set[int]) -> bool:
        for k in range(count):
            if fits[i][k] and k not in tried:
                tried.add(k)
                if taken[k] < 0 or augment(taken[k], tried):
                    taken[k], partner[i] = i, k
                    return True
        return False

    free = [i for i in range(count) if partner[i] < 0]
    return partner if all(augment(i, set()) for i in free) else None
