"""A time limit is kept, by a clock that counts the calls of functions instead of seconds."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.check import check
from megatron_adaptra.ir.conditions import Conditions, LinkState
from megatron_adaptra.plan import make_plan
from megatron_adaptra.plan.pipeline.search import search_budget


class Calls:
    """`monotonic` is how many functions have been called: the same on every machine."""

    def __init__(self):
        self.count = 0

    def monotonic(self):
        return float(self.count)

    def called(self, frame, event, argument):
        self.count += event in ("call", "c_call")

    def of(self, function):
        begun = self.count
        sys.setprofile(self.called)
        try:
            return function(), self.count - begun
        finally:
            sys.setprofile(None)


@pytest.fixture
def clock(monkeypatch):
    calls = Calls()
    monkeypatch.setattr(
        search_budget,
        "time",
        SimpleNamespace(monotonic=calls.monotonic, thread_time=calls.monotonic),
    )
    return calls


def job(stages, count, **more):
    links = {(i, i + 1): LinkState(0.06) for i in range(stages - 1)}
    even = (0.01,) * stages
    return Conditions(count, even, even, even, links, **more)


SLOW = job(6, 40)
TIGHT = replace(SLOW, activation_budget=(5.0,) * 6)
JITTER = {way: link._replace(jitter=0.02) for way, link in SLOW.links.items()}
JOBS = {
    "little memory": ("adaptive", "eager", TIGHT),
    "recompute": ("adaptive", "eager", replace(TIGHT, recompute=True)),
    "rendezvous": ("adaptive", "rendezvous", TIGHT),
    "jitter": ("adaptive", "eager", replace(SLOW, links=JITTER)),
    "warmup": ("warmup", "eager", replace(SLOW, cores=2.0)),
    "chunks": ("warmup", "eager", job(6, 18, chunks=2)),
}
MOST = 1.1  # times the limit


@pytest.mark.long
@pytest.mark.parametrize("name", JOBS)
def test_a_limit_is_kept(clock, name):
    policy, sends, conditions = JOBS[name]
    limit = 2 * least_of(clock, conditions, policy, sends)
    plan, took = clock.of(lambda: make_plan(conditions, policy, sends, limit))
    assert limit / 4 < took < MOST * limit
    assert "not searched" not in plan.schedule.why


@pytest.mark.parametrize("name", JOBS)
def test_a_plan_without_time_to_search_has_that_as_its_reason(clock, name):
    policy, sends, conditions = JOBS[name]
    least = least_of(clock, conditions, policy, sends)
    plan, took = clock.of(lambda: make_plan(conditions, policy, sends, 1.01 * least))
    assert took < MOST * least
    assert plan.schedule.why.endswith("not searched, for want of time")
    check(plan.program, conditions.activation_budget)


def test_the_least_time_is_enough_for_what_is_done_to_every_plan(clock):
    """Its proof, and that of stock, with what each takes."""

    def work():
        plan = make_plan(SLOW, "1f1b", "eager", 1e12)
        check(plan.program, SLOW.activation_budget)
        make_plan(SLOW, "1f1b")

    _, took = clock.of(work)
    assert took < MOST * least_of(clock, SLOW, "1f1b", "eager")


def least_of(clock, conditions, policy, sends):
    """What is asked for where a limit is too short."""
    with pytest.raises(BadInput, match=r"--time-limit 1\.0: plans of this size") as error:
        clock.of(lambda: make_plan(conditions, policy, sends, 1.0))
    return float(error.value.allowed.split()[5])
