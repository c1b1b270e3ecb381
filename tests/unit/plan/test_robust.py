"""Plans for delays that vary: on delays they have not seen, no slower than plans for the mean."""

import json
import random
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from ir.strategies import random_conditions
from jobs import jobs

from benchmarks.common import both_ways
from megatron_adaptra.cli.profile import KEYS, conditions_of
from megatron_adaptra.ir.check import SENDS, check
from megatron_adaptra.ir.conditions import Conditions, LinkState
from megatron_adaptra.plan import evaluate, make_plan
from megatron_adaptra.plan.pipeline.adaptive import adaptive
from megatron_adaptra.plan.pipeline.base import Plan
from megatron_adaptra.plan.pipeline.robust import candidates, least_mean, lognormal_quantile
from megatron_adaptra.sim.clock import simulate
from megatron_adaptra.sim.jitter import draws, lognormal

FRESH = 20260101  # a seed of delays that no planner has seen
PUBLISHED = Path(__file__).parents[3] / "benchmarks" / "published" / "pipemorph_profiles.json"
PROFILES = {profile["name"]: profile for profile in json.loads(PUBLISHED.read_text())}


def published(name: str) -> Conditions:
    return conditions_of({key: value for key, value in PROFILES[name].items() if key in KEYS})


def jittered(c: Conditions, sigma: float = 0.5) -> Conditions:
    """The same delays in the mean, with a deviation of that share."""
    links = {way: link._replace(jitter=sigma * link.delay) for way, link in c.links.items()}
    return replace(c, links=links)


def mean_seconds(plan: Plan, c: Conditions, sends: str = "eager") -> float:
    """Over 200 fresh draws, the same for every plan of a job."""
    drawn = draws(c, 200, FRESH)
    return fmean(simulate(plan.program, one, sends).makespan for one in drawn)


def gain(c: Conditions, sends: str = "eager") -> float:
    """Of the plan for delays that vary over the one for their mean, as a share of its time."""
    varying = jittered(c)
    robust, plain = (make_plan(one, sends=sends) for one in (varying, c))
    if robust.schedule.order == plain.schedule.order:
        return 0.0
    return 1 - mean_seconds(robust, varying, sends) / mean_seconds(plain, varying, sends)


# --- what it gains -------------------------------------------------------------------------------

SEVERAL = ("single-7B-0_1-30ms", "single-7B-2_3-30ms", "single-7B-2_3-60ms", "single-14B-0_1-30ms")


@pytest.mark.long
def test_published_profiles():
    """Never slower in the mean, and faster where depth is cheap."""
    gains = {name: gain(published(name)) for name in SEVERAL}
    assert min(gains.values()) >= -1e-9, gains
    assert fmean(gains.values()) > 0.005, gains


@pytest.mark.parametrize("seed", range(4))
def test_random_jobs(seed):
    sends = SENDS[seed % 2]
    rng = random.Random(seed)
    stages = rng.randint(2, 3)
    more = rng.choice(({}, {"split": False}, {"chunks": 2}))
    budget = rng.choice(((), (2.0,) * stages))
    c = random_conditions(rng, stages, rng.randint(3, 6), activation_budget=budget, **more)
    assert gain(c, sends) >= -1e-9


# --- what it is ----------------------------------------------------------------------------------


@examples(30)
@given(jobs(stages=3, most=4), st.floats(0, 3), st.sampled_from(SENDS))
def test_any_job_has_a_plan_within_its_budget(c, sigma, sends):
    c = jittered(c, sigma)
    plan = evaluate(adaptive(c, sends, 0.03), c, sends)
    check(plan.program, c.activation_budget)
    assert plan.schedule.policy == "adaptive"


@examples(8)
@given(jobs(stages=3, most=4).map(lambda c: replace(c, recompute=False)))
def test_links_that_do_not_vary_have_the_plan_of_their_delays(c):
    """A delay of zero does not vary, whatever its jitter."""
    still = {way: link._replace(delay=0.0, jitter=1.0) for way, link in c.links.items()}
    calm = {way: link._replace(delay=0.0) for way, link in c.links.items()}
    plans = [make_plan(replace(c, links=links)).schedule for links in (still, calm)]
    assert plans[0] == plans[1]


def test_candidates_plan_for_the_mean_and_for_longer_delays():
    c = jittered(published(SEVERAL[0]))
    mean, *others = candidates(c)
    assert mean == published(SEVERAL[0])
    way = (0, 1)
    delays = [one.link(*way).delay for one in (mean, *others)]
    assert delays == sorted(delays)
    assert len(set(delays)) == len(delays)
    for one in others:
        assert replace(one, links=c.links) == c
        assert {link.jitter for link in one.links.values()} == {0.0}


@pytest.mark.parametrize("sigma", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("quantile", [0.25, 0.75, 0.9])
def test_quantiles_are_those_of_the_draws(sigma, quantile):
    rng = random.Random(5)
    drawn = [lognormal(rng, 0.04, 0.04 * sigma) for _ in range(20_000)]
    value = lognormal_quantile(LinkState(0.04, jitter=0.04 * sigma), quantile)
    assert sum(one <= value for one in drawn) / len(drawn) == pytest.approx(quantile, abs=0.01)


def test_a_delay_that_does_not_vary_is_its_own_quantile():
    assert lognormal_quantile(LinkState(0.04), 0.9) == 0.04
    assert lognormal_quantile(LinkState(0.0, jitter=1.0), 0.9) == 0.0


# --- how it chooses ------------------------------------------------------------------------------

JOB = jittered(Conditions(5, (1.0,) * 2, (1.0,) * 2, (1.0,) * 2, both_ways([4.0])))
POLICIES = ("1f1b", "gpipe", "zb-h1")


@pytest.mark.long
@pytest.mark.parametrize(("sends", "cores"), [("eager", None), ("rendezvous", None), ("eager", 1)])
def test_the_fastest_in_the_mean_is_chosen_wherever_it_stands(sends, cores):
    c = replace(JOB, cores=cores)
    plans = [make_plan(c, name) for name in POLICIES]
    best = min(plans, key=lambda plan: mean_seconds(plan, c, sends)).schedule
    schedules = [plan.schedule for plan in plans]
    for turn in range(len(plans)):
        assert least_mean(schedules[turn:] + schedules[:turn], c, sends) == best


def test_of_equals_the_first_is_kept():
    one = make_plan(JOB, "1f1b").schedule
    other = replace(one, why="another")
    assert least_mean([one, other], JOB, "eager") is one
    assert least_mean([other, one], JOB, "eager") is other
