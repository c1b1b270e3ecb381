"""`adaptra plan` as its user sees it: its output and its exit status."""

import json
from pathlib import Path

import pytest
from commands import FLAGS, JOB, process, strict

KEYS = {
    "policy", "why", "warmup", "stages", "predicted_ms", "lower_bound_ms", "gap", "stock_ms",
    "unlimited_bound_ms",
    "peak_in_flight", "planning_ms",
}  # fmt: skip


def without_clock(plan):
    assert plan.pop("planning_ms") >= 0
    return plan


def test_a_process_prints_what_is_promised():
    plan = strict(process("plan", *FLAGS, "--policy", "warmup", "--json").stdout)
    assert set(plan) == KEYS
    assert plan["policy"] == "warmup"
    assert plan["warmup"] == plan["peak_in_flight"] == [9, 8, 7, 1]
    assert plan["predicted_ms"] == pytest.approx(495)
    # A period of 1F1B is two periods of a stage here and a round trip of 120 ms.
    assert plan["stock_ms"] == pytest.approx(1095)
    assert plan["stages"][0][:9] == [f"F{i}" for i in range(9)]
    assert [len(line) for line in plan["stages"]] == [24] * 4


def test_adaptive_is_the_default_and_no_worse(here):
    plan, warmup = here.json("plan", *FLAGS), here.json("plan", *FLAGS, "--policy", "warmup")
    assert plan["policy"] == "adaptive"
    assert plan["lower_bound_ms"] <= plan["predicted_ms"] <= warmup["predicted_ms"] + 1e-6
    assert plan["stock_ms"] == warmup["stock_ms"]


def test_the_table(here):
    out, _ = here("plan", *FLAGS, "--policy", "warmup")
    for words in ("495.0", "2.21 x", "9,8,7,1", "2->3 60 ms", "lower bound", "planned in"):
        assert words in out


def test_flags_json_and_yaml_say_the_same(here, profile):
    yaml = "\n".join(f"{key}: {value}" for key, value in JOB.items())
    plans = [
        without_clock(here.json("plan", *FLAGS)),
        without_clock(here.json("plan", "--profile", profile(JOB))),
        without_clock(here.json("plan", "--profile", profile(yaml, "job.yaml"))),
    ]
    assert plans[0] == plans[1] == plans[2]


def test_flags_win_over_the_file(here, profile):
    def warmup(*words):
        return here.json("plan", "--policy", "warmup", "--profile", path, *words)["warmup"]

    path = profile({**JOB, "activation_budget": 5})
    assert warmup()[0] == 5
    assert warmup("--activation-budget", "6,5,4,3")[0] == 6
    assert warmup("--backward-ms", "16", "--activation-budget", "12") == [9, 8, 7, 1]


def test_switches_win_over_the_file(here, profile):
    path = profile({**JOB, "split": False})
    whole = here.json("plan", "--profile", path)
    assert not any(op.startswith("I") for line in whole["stages"] for op in line)
    assert here.json("plan", "--profile", path, "--split")["lower_bound_ms"] < 495
    line = here.refused("plan", "--profile", path, "--policy", "zb-h1")
    assert line.startswith("split False: ")


def test_one_of_several(here, profile):
    path = profile([{**JOB, "name": "slow"}, {**JOB, "name": "healthy", "link_delay_ms": 0}])

    def refused(*words):
        return here.refused("plan", *words)

    healthy = here.json("plan", "--profile", path, "--name", "healthy", "--policy", "warmup")
    assert healthy["warmup"] == [4, 3, 2, 1]
    assert refused("--profile", path) == f"--name is missing: {path} has slow, healthy"
    assert "did you mean 'healthy'?" in refused("--profile", path, "--name", "heathy")
    assert "holds the one job" in refused("--profile", profile(JOB), "--name", "slow")
    assert "it picks a job of --profile FILE" in refused(*FLAGS, "--name", "slow")


def test_a_list_of_one_job_needs_no_name(here, profile):
    path = profile([{**JOB, "name": "only"}])
    plan = without_clock(here.json("plan", "--profile", path))
    assert plan == without_clock(here.json("plan", "--profile", profile(JOB, "b.json")))
    assert plan == without_clock(here.json("plan", "--profile", path, "--name", "only"))


def test_every_key_of_a_profile_counts(here, profile):
    def predicted(**more):
        path = profile({**JOB, **more})
        return here.json("plan", "--policy", "1f1b", "--profile", path)["predicted_ms"]

    base = predicted()
    assert predicted(optimizer_ms=30) == pytest.approx(base + 30)
    assert predicted(return_delay_ms=0) < base
    assert predicted(message_bytes=1000, link_bandwidth=[1e9, 1e9, 2e4]) > base
    assert predicted(message_bytes=1000) == base
    assert predicted(chunks=1, recompute=False, name="x", published_plan_ms=3) == base
    assert predicted(split=False, link_jitter=0.2) == base


def test_every_flag_counts(here):
    def predicted(*words):
        return here.json("plan", *FLAGS, "--policy", "1f1b", *words)["predicted_ms"]

    base = predicted()
    assert predicted("--optimizer-ms", 30) == pytest.approx(base + 30)
    assert predicted("--link-bandwidth", "inf,inf,2e4", "--message-bytes", 1000) > base
    assert predicted("--return-delay-ms", 0) < base
    # The words that allow the messages of two receives in a row share the slow link's way.
    assert predicted("--sends", "rendezvous") >= base


def test_policies(here):
    stock = here.json("plan", *FLAGS, "--policy", "1f1b")
    assert stock["policy"] == "1f1b"
    assert stock["predicted_ms"] == stock["stock_ms"]


def test_stock_with_chunks_is_megatrons_interleaved_schedule(here):
    chunks = [*FLAGS, "--chunks", 2, "--policy", "interleaved"]
    plan = here.json("plan", *chunks)
    assert plan["stock_ms"] == plan["predicted_ms"]
    assert "F0.1" in plan["stages"][0]
    # Megatron refuses a number of microbatches that the stages do not divide.
    line = here.refused("plan", *chunks, "--microbatches", 11)
    assert line.startswith("microbatches 11: ")


def test_the_link_from_the_last_stage_to_the_first(here):
    def predicted(delays):
        words = ("--chunks", 2, "--policy", "interleaved", "--link-delay-ms", delays)
        return here.json("plan", *FLAGS, *words)["predicted_ms"]

    assert predicted("0,0,0") == predicted("0,0,0,0") < predicted("0,0,0,60")
    assert predicted("20,20,20") < predicted("20") == predicted("20,20,20,20")


def test_a_return_delay_of_its_own(here):
    both = here.json("plan", *FLAGS, "--policy", "warmup")
    down = here.json("plan", *FLAGS, "--policy", "warmup", "--return-delay-ms", "0")
    assert down["predicted_ms"] == pytest.approx(both["predicted_ms"] - 60)
    assert "3->2" not in down["why"]


def test_what_cannot_run_is_one_line_and_status_1(here):
    line = here.failed("plan", *FLAGS, "--policy", "1f1b", "--activation-budget", 2)
    assert line == "stage 0 holds 4 microbatches' activations, its budget is 2"


@pytest.mark.parametrize("budget", ["1", "1,1,1,1"])
def test_the_least_budget_is_one_microbatch(here, budget):
    plan = here.json("plan", *FLAGS, "--activation-budget", budget)
    assert max(plan["peak_in_flight"]) <= 1


def test_a_published_profile_as_users_get_it(here):
    path = Path(__file__).parents[2] / "benchmarks" / "published" / "pipemorph_profiles.json"
    for job in json.loads(path.read_text()):
        plan = here.json("plan", "--profile", path, "--name", job["name"], "--policy", "warmup")
        assert len(plan["warmup"]) == job["stages"]
        assert plan["predicted_ms"] < plan["stock_ms"]
