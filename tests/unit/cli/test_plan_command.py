"""`adaptra plan` as its user sees it: its output and its exit status."""

import json
from pathlib import Path

import pytest
from commands import FLAGS, JOB, SMALL, process, strict

from megatron_adaptra.cli import plugin
from megatron_adaptra.cli.main import main
from megatron_adaptra.config import SPLITTING, AdaptraConfig

KEYS = {
    "policy", "why", "warmup", "stages", "predicted_ms", "lower_bound_ms", "gap", "stock_ms",
    "unlimited_bound_ms", "default_engine_ms", "peak_bytes",
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
    assert here.json("plan", "--profile", path, "--set", "split=yes")["lower_bound_ms"] < 495
    line = here.refused("plan", "--profile", path, "--policy", "zb-h1")
    assert line.startswith("split False: policies zb-h1 and zb-h2")


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


def test_every_flag_counts(here):
    def predicted(*words):
        return here.json("plan", *FLAGS, "--policy", "1f1b", *words)["predicted_ms"]

    base = predicted()
    assert predicted("--set", "optimizer_ms=30") == pytest.approx(base + 30)
    thin = predicted("--set", "link_bandwidth=inf,inf,2e4", "--message-bytes", 1000)
    assert thin > base
    assert predicted("--set", "link_bandwidth=inf,inf,20kB/s", "--message-bytes", "1kB") == thin
    assert predicted("--set", "link_bandwidth=inf,inf,160kbit/s", "--message-bytes", "1kB") == thin
    shared = predicted("--set", "port_bandwidth=inf,inf,20kB/s,inf", "--message-bytes", "1kB")
    assert shared > predicted("--set", "link_bandwidth=inf,20kB/s,20kB/s", "--message-bytes", "1kB")
    assert predicted("--set", "return_delay_ms=0") < base
    # The words that allow the messages of two receives in a row share the slow link's way.
    assert predicted("--sends", "rendezvous") >= base


def test_stock_with_chunks_is_megatrons_interleaved_schedule(here):
    chunks = [*FLAGS, "--chunks", 2, "--policy", "interleaved"]
    plan = here.json("plan", *chunks)
    assert plan["stock_ms"] == plan["predicted_ms"]
    assert "F0.1" in plan["stages"][0]
    # Megatron refuses a number of microbatches that the stages do not divide.
    line = here.refused("plan", *chunks, "--microbatches", 11)
    assert line.startswith("--microbatches 11: ")


@pytest.mark.parametrize("command", ["plan", "simulate", "draw"])
@pytest.mark.parametrize(
    ("policy", "budget", "least"),
    [
        ("1f1b", "2", "2.0: policy 1f1b needs at least 4; adaptive needs 1"),
        ("1f1b", "4,3,1,1", "[4.0, 3.0, 1.0, 1.0]: policy 1f1b needs at least 4,3,2,1; adaptive"),
        ("1f1b", "1GB", "'1GB': policy 1f1b needs at least 1.6GB; adaptive needs 0.4GB"),
        ("adaptive", "1B", "'1B': it has to be at least 400000000B, what one microbatch takes"),
        ("adaptive", "1GB,1kB,1GB,1GB", "'1kB': it has to be at least 400000kB on stage 1"),
    ],
)
def test_a_budget_that_cannot_be_met_names_the_least(here, command, policy, budget, least):
    words = ("--policy", policy, "--activation-bytes", "400MB", "--activation-budget", budget)
    assert here.refused(command, *FLAGS, *words).startswith(f"--activation-budget {least}")


def test_the_least_budget_works(here):
    words = (*FLAGS, "--policy", "1f1b", "--activation-bytes", "400MB", "--activation-budget")
    plan = here.json("plan", *words, "1.6GB")
    assert plan["peak_bytes"] == [1.6e9, 1.2e9, 0.8e9, 0.4e9]
    assert here.json("plan", *words, "1526MiB")["peak_bytes"] == plan["peak_bytes"]
    line = here.refused("plan", *FLAGS, "--activation-budget", "20GiB")
    assert line.startswith("--activation-budget '20GiB': give --activation-bytes, what one")


def test_what_runs_by_default_comes_first(here):
    plan = here.json("plan", *FLAGS)
    warmup = here.json("plan", *FLAGS, "--policy", "warmup")
    assert plan["predicted_ms"] < plan["default_engine_ms"] == warmup["predicted_ms"]
    rows = [line.split("│") for line in here("plan", *FLAGS)[0].splitlines() if "│" in line]
    flags = [(row[1].strip(), row[2].strip()) for row in rows]
    assert flags == [
        ("warmup", "--adaptra"),
        ("adaptive", "--adaptra --adaptra-engine executor"),
        ("1f1b", "none: stock Megatron"),
        ("lower bound", ""),
    ]
    out, _ = here("plan", *FLAGS, "--policy", "zb-h1")
    assert "--adaptra --adaptra-engine executor --adaptra-policy zb-h1" in out
    assert "num_warmup_microbatches" in out
    out, _ = here("plan", *FLAGS, "--recompute", "--activation-budget", 3)
    assert "--adaptra --adaptra-engine executor --adaptra-recompute" in out


def test_the_default_stays_where_a_plan_saves_too_little(here):
    """The plugin adopts no plan that saves less than --adaptra-min-gain."""
    words = (*FLAGS, "--set", "link_delay_ms=0,0,4", "--policy", "warmup")
    plan = here.json("plan", *words)
    assert plan["predicted_ms"] < plan["stock_ms"] == plan["default_engine_ms"]
    out, _ = here("plan", *words)
    assert "--adaptra stays with 1f1b here" in out
    (row,) = [line for line in out.splitlines() if "│ 1f1b" in line]
    assert "--adaptra, or none: stock Megatron" in row
    gain = int(100 * (1 - plan["predicted_ms"] / plan["stock_ms"])) / 100
    assert gain < 0.15
    assert f" --adaptra --adaptra-min-gain {gain:g} " in out


def test_nothing_is_planned_while_links_are_healthy(here):
    words = (*FLAGS, "--set", "link_delay_ms=0")
    plan = here.json("plan", *words)
    assert plan["default_engine_ms"] == plan["stock_ms"]
    out, _ = here("plan", *words)
    assert "while links are healthy --adaptra stays with 1f1b" in out
    assert "not run while links are healthy" in out


def test_what_is_known_of_the_plugin_is_what_its_flags_say():
    assert plugin.RULE.min_gain == AdaptraConfig().min_gain
    assert plugin.SPLITTING == SPLITTING
    assert AdaptraConfig().engine == "native"


def test_several_chunks_have_a_default_too(here):
    words = (*FLAGS, "--chunks", 2)
    warmup = here.json("plan", *words, "--policy", "warmup")
    assert here.json("plan", *words)["default_engine_ms"] == warmup["predicted_ms"]
    assert "not run in training" in here("plan", *words)[0]
    out, _ = here("plan", *words, "--activation-budget", 3)
    assert "--adaptra does not keep to this budget with several chunks: it holds" in out
    refused = here.json("plan", *words, "--microbatches", 11)
    assert refused["default_engine_ms"] is refused["stock_ms"] is None


def test_a_flag_is_given_once(capsys):
    assert main(["plan", *FLAGS, "--stages", "5"]) == 2
    assert capsys.readouterr().err == (
        "adaptra: error: --stages '5': it is given twice, '4' and '5'\n"
    )
    assert main(["plan", *FLAGS, "--set", "split=yes", "--set", "split=no"]) == 2
    assert capsys.readouterr().err == "adaptra: error: --set 'split=no': split is given twice\n"
    assert main(["plan", *FLAGS, "--stages", "4", "--json"]) == 0


@pytest.mark.long
def test_many_stages_are_ranges(here):
    words = (
        "--forward-ms",
        1,
        "--backward-ms",
        2,
        "--set",
        "link_delay_ms=1",
        "--policy",
        "warmup",
    )
    out, _ = here("plan", "--stages", 100, "--microbatches", 4, *words)
    assert max(map(len, out.splitlines())) < 250
    out, _ = here("simulate", "--stages", 100, "--microbatches", 4, *words)
    assert len(out.splitlines()) < 50


def test_a_plan_that_takes_minutes_is_refused_unless_asked_for(here):
    words = ("--forward-ms", 1, "--backward-ms", 2, "--stages", 10_000, "--microbatches", 100)
    line = here.refused("plan", *words)
    assert line.startswith("--time-limit is missing: a plan of this size takes ")
    assert "give at least " in line


def test_a_published_profile_as_users_get_it(here):
    path = Path(__file__).parents[3] / "benchmarks" / "published" / "pipemorph_profiles.json"
    for job in json.loads(path.read_text()):
        plan = here.json("plan", "--profile", path, "--name", job["name"], "--policy", "warmup")
        assert len(plan["warmup"]) == job["stages"]
        assert plan["predicted_ms"] < plan["stock_ms"]


JOB_IN_WORDS = (
    *("--stages", 4, "--microbatches", 12, "--forward-ms", 9, "--backward-ms", 16),
    *("--slow", "2-3:40ms", "--slow", "0.1:1.2x"),
)


def test_a_job_is_written_once_for_all_commands(here):
    """Its words, from the demo's too, with iterations in which something is slow."""
    (plan, simulated) = (here.json(command, *JOB_IN_WORDS) for command in ("plan", "simulate"))
    drawn, compared = (here.json(command, *JOB_IN_WORDS) for command in ("draw", "compare"))
    best = compared["policies"]["adaptive"]["unlimited"]["iteration_ms"]
    assert plan["predicted_ms"] == simulated["iteration_ms"] == drawn["predicted_ms"] == best
    with_period = [f"{word}@5..9" if ":" in str(word) else word for word in JOB_IN_WORDS]
    assert here.json("plan", *with_period)["predicted_ms"] == best


def test_links_paths_ports_and_workers_of_one_pipeline_are_slow_by_rules(here):
    def predicted(*words):
        return here.json("plan", *SMALL, *words)["predicted_ms"]

    base = predicted()
    assert predicted("--slow", "1-2:20ms") == predicted("--slow", "0.1-0.2:20ms") == base
    one_way = predicted("--slow", "2>1:0ms")
    assert one_way == predicted("--set", "link_delay_ms=0,20", "--set", "return_delay_ms=0") < base
    rate = predicted("--slow", "0-1:20kB/s", "--message-bytes", "1kB")
    assert rate == predicted("--set", "link_bandwidth=20kB/s,inf", "--message-bytes", "1kB") > base
    port = predicted("--slow", "0.1:20kB/s", "--message-bytes", "1kB")
    assert port == predicted("--set", "port_bandwidth=inf,20kB/s,inf", "--message-bytes", "1kB")
    assert predicted("--slow", "0.1:2x") == predicted(
        *("--forward-ms", "9,18,9", "--set", "backward_input_ms=10,20,10"),
        *("--set", "backward_weight_ms=6,12,6"),
    )


def test_a_misspelt_flag_is_answered_with_the_nearest(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--stage", "4"])
    assert "unrecognized arguments: --stage 4; did you mean --stages?" in capsys.readouterr().err


@pytest.mark.parametrize("stages", [8, 16])
@pytest.mark.parametrize("command", ["plan", "compare"])
def test_nothing_is_cut_in_80_columns(here, monkeypatch, command, stages):
    words = ("--microbatches", stages, "--forward-ms", 9, "--backward-ms", 16)
    words = (command, "--stages", stages, *words, "--slow", f"{stages - 2}-{stages - 1}:60ms")
    wide, _ = here(*words)
    monkeypatch.setenv("COLUMNS", "80")
    out, _ = here(*words)
    assert max(map(len, out.splitlines())) <= 80
    cells = [cell.strip() for line in wide.splitlines() if "│" in line for cell in line.split("│")]
    assert len(cells) > 20
    text = "".join(out.split())
    assert not [cell for cell in cells if "".join(cell.split()) not in text]
