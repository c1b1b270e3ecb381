"""`adaptra simulate`: the time of planned and of given schedules, and under drawn delays."""

import json

import pytest
from commands import FLAGS, SMALL, process, strict

from benchmarks.common import both_ways
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.plan import make_plan

TIMES = ["--forward-ms", 9, "--set", "backward_input_ms=10", "--set", "backward_weight_ms=6"]
JOB = Conditions(6, (9e-3,) * 3, (10e-3,) * 3, (6e-3,) * 3, both_ways([0.0, 0.02]))


def test_a_policy_is_timed_as_it_is_planned():
    plan = strict(process("plan", *FLAGS, "--policy", "1f1b", "--json").stdout)
    timed = strict(process("simulate", *FLAGS, "--policy", "1f1b", "--json").stdout)
    assert timed["iteration_ms"] == plan["predicted_ms"]
    for key in ("policy", "why", "warmup", "peak_in_flight", "lower_bound_ms"):
        assert timed[key] == plan[key]
    assert timed["busy_ms"] == pytest.approx([300] * 4)
    for busy, bubble in zip(timed["busy_share"], timed["bubble_share"], strict=True):
        assert busy == pytest.approx(300 / plan["predicted_ms"])
        assert busy + bubble == pytest.approx(1)
    assert timed["activation_budget"] == [None] * 4
    assert timed["samples"] is None


def test_the_shares_leave_the_step_out(here):
    with_step = here.json("simulate", *SMALL, "--policy", "1f1b", "--set", "optimizer_ms=50")
    without = here.json("simulate", *SMALL, "--policy", "1f1b")
    assert with_step["iteration_ms"] == pytest.approx(without["iteration_ms"] + 50)
    assert with_step["bubble_share"] == pytest.approx(without["bubble_share"])


def test_the_table(here):
    out, _ = here(
        "simulate", *FLAGS, "--policy", "1f1b", "--set", "link_jitter=0.3", "--samples", 20
    )
    for words in (
        "1f1b: 1095.0 ms",
        "the lower bound of",
        "27.4 %",
        "72.6 %",
        "20 samples, seed 0",
    ):
        assert words in out


@pytest.mark.parametrize("policy", ["zb-h1", "interleaved"])
def test_a_schedule_from_a_file_in_every_form(here, tmp_path, policy):
    chunks = ["--chunks", 2] if policy == "interleaved" else []
    words = [*SMALL, "--policy", policy, *chunks]
    timed = here.json("simulate", *words)
    plan = here("plan", *words, "--json")[0]
    data = strict(plan)
    whole = {"microbatches": 6, "chunks": 1 + bool(chunks), "policy": policy, "why": "because"}
    text = f"schedule {json.dumps(whole)}\n"
    text += "".join(f"{i}: {' '.join(line)}\n" for i, line in enumerate(data["stages"]))
    forms = {
        "plan.json": plan,
        "s.json": json.dumps({**whole, "stages": data["stages"]}),
        "s": text,
    }
    for name, content in forms.items():
        path = tmp_path / name
        path.write_text(content)
        again = here.json("simulate", "--schedule", path, *TIMES, "--set", "link_delay_ms=0,20")
        for key in ("policy", "iteration_ms", "peak_in_flight", "busy_ms"):
            assert again[key] == timed[key]


def written(tmp_path, content):
    path = tmp_path / "schedule"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


GOOD = '{"stages": [["F0", "F1", "B0", "B1"], ["F0", "B0", "F1", "B1"]]}'


def test_the_shape_is_known_from_the_file(here, tmp_path):
    path = written(tmp_path, GOOD)
    assert here.json("simulate", "--schedule", path, *TIMES)["warmup"] == [2, 1]
    line = here.refused("simulate", "--schedule", path, *TIMES, "--stages", 3)
    assert line == f"--schedule '{path}': it has 2 stages, the job has 3"
    line = here.refused("simulate", "--schedule", path, *TIMES, "--microbatches", 3)
    assert line.endswith("it has 2 microbatches, the job has 3")
    line = here.refused("simulate", "--schedule", path)
    assert line.startswith("--backward-ms is missing: it has to be one number")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("", "in it, schedule '': the first line starts with 'schedule'"),
        ("{", "it is not JSON: "),
        ("{}", "in it, stages is missing: it has to be a list per stage of ops such as 'F3'"),
        ('{"stages": []}', "in it, stages []: it has to be at least 1 stage"),
        ('{"stages": [["F0", "Q0"]]}', "in it, op 'Q0': an op reads like F3"),
        (b"\xff\xfe\x00", "it is no UTF-8 text"),
    ],
)
def test_files_that_are_no_schedule(here, tmp_path, content, line):
    path = written(tmp_path, content)
    printed = here.refused("simulate", "--schedule", path, *TIMES)
    assert printed.startswith(f"--schedule '{path}': {line}")


@pytest.mark.parametrize(
    ("content", "budget", "line"),
    [
        ('{"stages": [["F0", "F1", "B0"]]}', "9", "stage 0 runs F of microbatch 1; it has to run"),
        ('{"stages": [["F0", "B0", "B0"]]}', "9", "B0 stands 2 times on stage 0"),
        ('{"stages": [["B0", "F0"], ["F0", "B0"]]}', "9", "deadlock under eager sends: "),
        (GOOD, "1", "stage 0 holds 2 microbatches' activations, its budget is 1"),
    ],
)
def test_schedules_that_cannot_run(here, tmp_path, content, budget, line):
    path = written(tmp_path, content)
    words = ("--schedule", path, *TIMES, "--activation-budget", budget)
    printed = here.refused("simulate", *words)
    assert printed.startswith(f"--schedule '{path}': it cannot run: {line}")


def test_draws_are_the_same_for_the_same_seed(here):
    def drawn(*words):
        return here.json("simulate", *SMALL, "--policy", "1f1b", *words)["samples"]

    words = ("--set", "link_jitter=0.5", "--samples", 50)
    assert drawn(*words) == drawn(*words, "--seed", 0) != drawn(*words, "--seed", 1)
    assert drawn("--set", "link_jitter=0.5")["count"] == 200
    assert drawn("--set", "link_jitter=0.5", "--samples", 0) is None


def test_draws_spread_around_the_time_without_jitter(here):
    words = (*SMALL, "--policy", "1f1b", "--samples", 400)
    quiet = here.json("simulate", *words, "--set", "link_jitter=0.001")["samples"]
    loud = here.json("simulate", *words, "--set", "link_jitter=0.8")["samples"]
    exact = 1e3 * make_plan(JOB, "1f1b").predicted
    assert quiet["mean_ms"] == pytest.approx(exact, rel=1e-3)
    assert loud["median_ms"] < loud["p90_ms"] < loud["p99_ms"] <= loud["max_ms"]
    assert loud["max_ms"] > exact > 0
    # Two links of 20 ms, which a round trip takes: the mean of 1F1B grows with the mean delay.
    assert loud["mean_ms"] == pytest.approx(exact, rel=0.1)


def test_draws_need_jitter(here):
    line = here.refused("simulate", *SMALL, "--samples", 10)
    assert (
        line
        == "--samples 10: there is nothing to sample, as no link has jitter (--set link_jitter=X)"
    )
    assert here.refused("simulate", *SMALL, "--samples", -1).startswith("--samples -1: ")
