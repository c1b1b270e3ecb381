"""Plans for delays that vary: for the quantile of them whose plan is the fastest on average.

A pipeline suffers more from a delay that is longer than planned for than it gains from a shorter
one, so planning for a high quantile is often better on average. Which quantile is decided by draws
of the delays that all candidates share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist, fmean, stdev

from megatron_adaptra.ir.conditions import Conditions, LinkState
from megatron_adaptra.ir.program import lower
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.plan.pipeline.search.job_shop import JobShop, exact_times
from megatron_adaptra.plan.pipeline.search.search_budget import late
from megatron_adaptra.sim.clock import simulate
from megatron_adaptra.sim.jitter import draws, log_deviation

QUANTILES = (0.75, 0.9)
DRAWS, SEED = 240, 20250419
FEW = 30  # draws that decide nothing
CERTAIN = 3.0  # standard errors by which another plan has to beat the one for the mean delays


def candidates(conditions: Conditions) -> list[Conditions]:
    """Return the job at its mean delays, then at high quantiles of them."""
    out = [replace(conditions, links=_links(conditions, None))]
    out += [replace(conditions, links=_links(conditions, q)) for q in QUANTILES]
    return out


def _links(conditions: Conditions, quantile: float | None) -> dict[tuple[int, int], LinkState]:
    return {
        way: link._replace(
            delay=link.delay if quantile is None else lognormal_quantile(link, quantile),
            jitter=0.0,
        )
        for way, link in conditions.links.items()
    }


def lognormal_quantile(link: LinkState, quantile: float) -> float:
    """Return the `quantile`, 0 to 1, in seconds, of the delay that `sim.jitter` draws."""
    if link.delay <= 0 or link.jitter <= 0:
        return link.delay
    sigma = log_deviation(link.delay, link.jitter)
    return link.delay * math.exp(sigma * NormalDist().inv_cdf(quantile) - sigma * sigma / 2)


def least_mean(
    plans: Sequence[Schedule], conditions: Conditions, sends: str, end: float = math.inf
) -> Schedule:
    """Return the plan with the least mean over draws; the first, unless another surely beats it.

    `sends`: "eager" or "rendezvous". `end`: of the draws, on the monotonic clock.
    """
    samples: list[list[float]] = [[] for _ in plans]
    plain = exact_times(conditions, sends)
    for drawn in draws(conditions, DRAWS, SEED):
        if late(end):
            break
        shop = JobShop(drawn) if plain else None
        for plan, times in zip(plans, samples, strict=True):
            times.append(_seconds(plan, drawn, sends, shop))
    best = 0
    for i in range(1, len(plans) if len(samples[0]) >= FEW else 0):
        saved = [a - b for a, b in zip(samples[0], samples[i], strict=True)]
        sure = fmean(saved) > CERTAIN * stdev(saved) / math.sqrt(len(saved))
        if sure and fmean(samples[i]) < fmean(samples[best]):
            best = i
    return plans[best]


def _seconds(plan: Schedule, drawn: Conditions, sends: str, shop: JobShop | None) -> float:
    """Return the makespan: of the `shop`, which is quicker and halves backwards, or simulated."""
    if shop is None:
        return simulate(lower(plan), drawn, sends).makespan
    timing = shop.time(shop.order_of(plan))
    return math.inf if timing is None else timing.makespan
