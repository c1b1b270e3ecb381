"""The adaptive planner: what it returns runs, fits, and is close to the best there is."""

import json
import random
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from ir.strategies import random_conditions
from jobs import jobs
from patience import in_time
from processes_alike import printed
from sim.reference import reference_seconds
from small_cases import OPTIMA, small_case

from benchmarks.common import both_ways
from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.cli.main import main
from megatron_adaptra.cli.profile import conditions_of, load_profile
from megatron_adaptra.ir.check import SENDS, check
from megatron_adaptra.ir.conditions import Conditions, LinkState
from megatron_adaptra.ir.program import lower
from megatron_adaptra.ir.schedule import Schedule, parse_line
from megatron_adaptra.model.bounds import unlimited_bound
from megatron_adaptra.plan import evaluate, make_plan
from megatron_adaptra.plan.pipeline.adaptive import RIVALS, adaptive
from megatron_adaptra.plan.pipeline.base import Plan

NEAR = 2e-9  # plans are ranked by ten digits
LIMITS = (0.0, 0.02)  # seconds: what takes next to nothing has to be as valid


def fits(plan: Plan, c: Conditions) -> bool:
    peaks = zip(plan.peak_in_flight, c.activation_budget, strict=True)
    return all(peak <= budget + NEAR for peak, budget in peaks)


def rivals(c: Conditions, sends: str) -> dict[str, float]:
    """Seconds of the other policies that take the job and fit its budget."""
    names = RIVALS if sends == "eager" and not c.shared else (*RIVALS, "warmup")
    out = {}
    for name in names:
        try:
            plan = make_plan(c, name, sends)
        except BadInput:
            continue
        if fits(plan, c):
            out[name] = plan.predicted
    return out


def assert_valid(plan: Plan, c: Conditions) -> None:
    """It cannot hang, fits, uses no lever that is not allowed, and keeps losses bit-identical."""
    check(plan.program, c.activation_budget)
    assert plan.timeline.peak_in_flight() == plan.peak_in_flight
    assert plan.lower_bound <= plan.predicted * (1 + NEAR)
    kinds = {op.kind.value for line in plan.schedule.order for op in line}
    assert c.split or not kinds & {"I", "W"}
    assert c.recompute or "R" not in kinds
    for line in plan.schedule.order:
        for chunk in range(c.chunks):
            for one in ("F", "BI", "BW"):  # forwards, input gradients, weight gradients
                mine = [op for op in line if op.chunk == chunk and op.kind.value in one]
                assert [op.microbatch for op in mine] == list(range(c.microbatches)), one


# --- any job -------------------------------------------------------------------------------------


@examples(200)
@given(jobs(), st.sampled_from(SENDS), st.sampled_from(LIMITS))
def test_any_job(c, sends, limit):
    plan = evaluate(adaptive(c, sends, limit), c, sends)
    assert_valid(plan, c)
    for name, seconds in rivals(c, sends).items():
        assert plan.predicted <= seconds * (1 + NEAR), name


@examples(40)
@given(jobs(stages=3, most=5).map(lambda c: replace(c, recompute=False)), st.sampled_from(SENDS))
def test_any_job_at_the_planners_own_measure(c, sends):
    plan = make_plan(c, sends=sends)
    assert_valid(plan, c)
    for name, seconds in rivals(c, sends).items():
        assert plan.predicted <= seconds * (1 + NEAR), name
    assert make_plan(c, sends=sends).schedule == plan.schedule


# --- optima that are proven ----------------------------------------------------------------------

PARTS = 8


@pytest.mark.parametrize(
    "part", [0, 4, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2, 3, 5, 6, 7))]
)
def test_close_to_proven_optima(part):
    """All 200; each part keeps to the mean that is asked of them all."""
    gaps = {}
    for seed, optimum in json.loads(OPTIMA.read_text()).items():
        if int(seed) % PARTS == part:
            assert optimum["proven"]
            plan = make_plan(small_case(int(seed)))
            assert_valid(plan, small_case(int(seed)))
            gaps[seed] = plan.predicted / optimum["seconds"] - 1
    assert len(gaps) == 200 // PARTS
    assert min(gaps.values()) > -1e-9
    assert max(gaps.values()) <= 0.05, gaps
    assert fmean(gaps.values()) <= 0.01, gaps


# --- published profiles, through the command line ------------------------------------------------

PUBLISHED = Path(__file__).parents[3] / "benchmarks" / "published" / "pipemorph_profiles.json"
PROFILES = json.loads(PUBLISHED.read_text())


@pytest.fixture
def planned(capsys):
    """What `adaptra plan --json` says of all profiles; each runs, and takes so long."""

    def plans(times: float | None = None, recompute: bool = False) -> list[dict]:
        out = []
        for profile in PROFILES:
            words = ["plan", "--profile", str(PUBLISHED), "--name", profile["name"], "--json"]
            budget = times * profile["stages"] if times else float("inf")
            if times:
                words += ["--activation-budget", str(budget)]
            assert main(words + ["--recompute"] * recompute) == 0
            plan = json.loads(capsys.readouterr().out)
            lines = tuple(parse_line(line) for line in plan["stages"])
            program = lower(Schedule(lines, profile["microbatches"]))
            check(program, (budget,) * profile["stages"])
            conditions = conditions_of(load_profile(str(PUBLISHED), profile["name"]))
            ms = 1e3 * reference_seconds(program, conditions, "eager")
            assert plan["predicted_ms"] == pytest.approx(ms, rel=1e-9)
            assert recompute or not any("R" in word for line in plan["stages"] for word in line)
            out.append(plan)
        return out

    return plans


def bound_ms(profile: dict) -> float:
    """What no schedule beats, whatever its memory."""
    return 1e3 * unlimited_bound(conditions_of(load_profile(str(PUBLISHED), profile["name"])))


def over_bound(plans: list[dict]) -> list[float]:
    pairs = zip(plans, PROFILES, strict=True)
    return [plan["predicted_ms"] / bound_ms(profile) for plan, profile in pairs]


@pytest.mark.long
def test_published_without_a_limit(planned):
    plans = planned()
    ratios = over_bound(plans)
    assert min(ratios) > 1 - 1e-9
    assert fmean(ratios) <= 1.003
    assert max(ratios) <= 1.01
    for plan, profile in zip(plans, PROFILES, strict=True):
        assert plan["lower_bound_ms"] == pytest.approx(bound_ms(profile))
        assert plan["predicted_ms"] <= profile["published_plan_ms"] * (1 + 1e-9)


@pytest.mark.long
def test_published_in_the_memory_of_1f1b(planned):
    plans = planned(1)
    ratios = [plan["predicted_ms"] / plan["stock_ms"] for plan in plans]
    assert max(ratios) <= 1 + NEAR
    assert fmean(ratios) <= 0.60


@pytest.mark.parametrize(
    ("times", "recompute", "most"),
    [
        (2, False, 1.05),
        pytest.param(1, True, 1.13, marks=pytest.mark.large),
        pytest.param(2, True, 1.025, marks=pytest.mark.long),
    ],
)
def test_published_in_little_memory(planned, times, recompute, most):
    """The mean, over the bound of unlimited memory."""
    assert fmean(over_bound(planned(times, recompute))) <= most


# --- chunks --------------------------------------------------------------------------------------


def of_chunks(seed: int, chunks: int, split: bool) -> Conditions:
    """Stages alike; on one link, or on all of the ring, delays of 2 to 6 forwards."""
    rng = random.Random(seed)
    stages = rng.choice((2, 4))
    f = rng.uniform(0.5, 2)
    ring = [(i, (i + 1) % stages) for i in range(stages)]
    slow = rng.choice((ring, [rng.choice(ring)]))
    ways = {way for a, b in slow for way in ((a, b), (b, a))}
    links = {way: LinkState(f * rng.uniform(2, 6)) for way in sorted(ways)}
    times = ((f * share,) * stages for share in (1.0, rng.uniform(0.8, 1.2), rng.uniform(0.6, 1)))
    return Conditions(stages * rng.randint(2, 4), *times, links, chunks=chunks, split=split)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("chunks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_faster_than_interleaved(chunks, split):
    gains = []
    for seed in range(5):
        c = of_chunks(seed, chunks, split)
        plan, stock = make_plan(c), make_plan(c, "interleaved")
        assert_valid(plan, c)
        gains.append(stock.predicted / plan.predicted)
        within = replace(c, activation_budget=stock.peak_in_flight)
        assert make_plan(within).predicted <= stock.predicted * (1 + NEAR), seed
    assert min(gains) >= 1 - NEAR
    assert fmean(gains) >= 1.3


# --- the same plan everywhere --------------------------------------------------------------------


def varied() -> list[tuple[Conditions, str]]:
    """A job for every lever, small enough to plan in no time."""
    out = []
    for seed, more in enumerate(
        (
            {},
            {"split": False},
            {"chunks": 2},
            {"recompute": True, "activation_budget": (2.0,) * 3},
            {"chunks": 2, "activation_budget": (2.3,) * 3},
            {"cores": 1.5},
        )
    ):
        c = random_conditions(random.Random(seed), 3, 4, **more)
        out += [(c, "eager"), (c, "rendezvous")]
    c = out[0][0]
    varying = {way: link._replace(jitter=link.delay / 2) for way, link in c.links.items()}
    return [*out, (replace(c, links=varying), "eager")]


PROGRAM = """
from megatron_adaptra.plan import make_plan
from test_adaptive import varied
for c, sends in varied():
    print(make_plan(c, sends=sends).schedule.digest())
"""


@pytest.mark.long
def test_the_same_bytes_in_every_process():
    assert len(printed(PROGRAM).split()) == len(varied())


@examples(20)
@given(jobs(stages=3, most=6).map(lambda c: replace(c, recompute=False)))
def test_the_same_bytes_from_the_same_job(c):
    again = Conditions.from_json(json.loads(json.dumps(c.to_json())))
    backwards = replace(c, links=dict(reversed(list(c.links.items()))))
    assert len({make_plan(one).schedule.text() for one in (c, again, backwards)}) == 1


# --- a limit of time -----------------------------------------------------------------------------


@pytest.mark.timing
@pytest.mark.quiet
def test_the_time_limit_is_what_it_takes():
    """On a job whose bound is not reached, so that there is always more to try."""
    c = Conditions(24, (9.0,) * 8, (10.0,) * 8, (6.0,) * 8, both_ways({3: 60.0}))
    c = replace(c, activation_budget=(8.0,) * 8, recompute=True)
    took = []
    for limit in (1.0, 4.0):  # far apart: what comes before the search takes its time, too
        began = time.perf_counter()
        plan = make_plan(c, time_limit=limit)
        took.append(time.perf_counter() - began)
        assert_valid(plan, c)
        assert plan.predicted > plan.lower_bound * 1.01
    in_time("a search of 1 s, beside one of 4", took[0] + 1, took[1])


# --- in words ------------------------------------------------------------------------------------


def test_why_names_the_slow_links_and_the_levers():
    c = Conditions(8, (1.0,) * 3, (1.0,) * 3, (1.0,) * 3, both_ways({1: 0.06}), recompute=True)
    plan = make_plan(replace(c, activation_budget=(2.0,) * 3))
    assert plan.schedule.policy == "adaptive"
    ops = [op.kind.value for line in plan.schedule.order for op in line]
    assert "1->2 60 ms; 2->1 60 ms: warmup " in plan.schedule.why
    assert f"{ops.count('I')} of 24 backwards split into" in plan.schedule.why
    assert f"{ops.count('R')} of 24 forwards recomputed" in plan.schedule.why
    assert make_plan(c.healthy()).schedule.why.startswith("no slow link: ")


def test_more_memory_is_never_used_in_vain():
    """Without a slow link, the time of unlimited memory asks for few microbatches in flight."""
    c = Conditions(32, (1.0,) * 4, (1.0,) * 4, (1.0,) * 4)
    plan = make_plan(c)
    assert plan.predicted == pytest.approx(plan.lower_bound)
    assert max(plan.peak_in_flight) <= 8
    assert all(a >= b for a, b in pairwise(plan.schedule.warmup))


@given(st.integers(0, 2**32 - 1))
def test_a_plan_over_a_port_is_no_slower_than_a_deeper_warmup(seed):
    """Of messages that two stages send to one at once the searches know nothing."""
    rng = random.Random(seed)
    stages = rng.randint(3, 5)
    delays = both_ways([rng.choice([0.0, rng.uniform(0, 5)]) for _ in range(stages - 1)])
    port, split = {rng.randrange(1, stages - 1): rng.uniform(0.4, 3)}, rng.random() < 0.7
    times = ((1.0,) * stages, (1.0,) * stages, (rng.choice([0.6, 1.0]),) * stages)
    c = Conditions(rng.randint(6, 12), *times, delays, 1.0, ports=port, split=split)
    others = [make_plan(c, policy).predicted for policy in ("1f1b", "warmup")]
    assert make_plan(c).predicted <= min(others) * (1 + 1e-9)
