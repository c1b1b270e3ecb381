"""Several replicas on the command line: planned, replayed, compared and drawn."""

import json
import xml.etree.ElementTree as ET

import pytest
from pages import page, titles, words
from read_timeline import timeline_of

from megatron_adaptra.cli.job import job_of
from megatron_adaptra.cli.main import _parser
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.schedule import Schedule

TIMES = ("--forward-ms", 9, "--set", "backward_input_ms=9", "--set", "backward_weight_ms=9")
JOB = ("--stages", 3, "--microbatches", 4, *TIMES, "--replicas", 3)
SLOW = (*JOB, "--slow", "0.1:2x")
PATH = (*JOB, "--slow", "1.0-1.1:1MB/s", "--message-bytes", "60kB")
DEAD = (*JOB, "--slow", "1.2:dead", "--set", "worker_budget=0.2:5,2.2:5", "--activation-budget", 3)
NAMES = [f"{replica}.{stage}" for replica in range(3) for stage in range(3)]


@pytest.fixture
def plan_file(here, tmp_path):
    """Writes what `adaptra plan --json` prints, and returns its path."""

    def write(*words):
        path = tmp_path / "plan.json"
        path.write_text(here(*("plan", *words, "--json"))[0])
        return path

    return write


def rows(out):
    """The cells of a printed table, by their first one."""
    lines = [line for line in out.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    return {row[0]: row[1:] for row in cells}


def test_plan_says_who_runs_what_and_how_long_it_takes(here):
    out, _ = here("plan", *DEAD)
    first, second, *_ = out.splitlines()
    assert first.startswith("re-route: ")
    assert "all 4 microbatches of worker 1.2 run " in first
    assert "healthy 1F1B (162.0 ms)" in second
    assert "untreated" not in second  # 1F1B cannot run with a dead worker
    assert "lower bound" in second
    found = rows(out)
    assert list(found) == [name + ", dead" * (name == "1.2") for name in NAMES]
    assert found["1.2, dead"] == ["", "", "4", "", "", ""]
    taken = {name: int(cells[1]) for name, cells in found.items() if cells[1]}
    assert sum(taken.values()) >= 4
    assert all(taken[name] == 0 for name in NAMES if not name.endswith(".2") and name != "1.2")
    assert found["0.2"][-1] == found["2.2"][-1] == "5"
    assert found["0.0"][-1] == "3"


def test_plan_as_json_holds_everything(here):
    data = here.json("plan", *SLOW)
    assert list(data["workers"]) == NAMES
    schedule = Schedule.from_json(data)
    assert data["move"] in ("shift", "re-route")
    assert data["why"].startswith(f"{data['move']}: ")
    assert "of the 4 microbatches of " in data["why"]
    best = min(move["predicted_ms"] for move in data["moves"])
    assert data["predicted_ms"] == pytest.approx(best)
    assert data["lower_bound_ms"] <= data["predicted_ms"] < data["untreated_ms"]
    assert data["healthy_1f1b_ms"] == pytest.approx(162)
    assert data["moves"][0]["name"] == "none"
    assert dict(zip(NAMES, schedule.peak_in_flight(), strict=True)) == data["peak_in_flight"]
    moved = {
        (stage, load["home"], microbatch): load["replica"]
        for load in data["loads"]
        for stage in range(load["stages"][0], load["stages"][1] + 1)
        for microbatch in load["microbatches"]
    }
    assert moved == schedule.routes.moved
    conditions = ReplicaConditions.from_json(data["conditions"])
    assert conditions.slow == {1: 2.0}
    assert conditions.replicas == 3


def jobs_of(*commands):
    """The conditions that all of the `commands` describe."""
    found = [
        job_of(_parser(["plan"])[0].parse_args(["plan", *map(str, words)])).replicas
        for words in commands
    ]
    assert all(one == found[0] for one in found)
    return found[0]


def test_flags_json_and_yaml_say_the_same(profile):
    job = {
        "stages": 3, "microbatches": 4, "forward_ms": 9, "backward_ms": 18, "replicas": 3,
        "message_bytes": "60kB", "activation_bytes": "100MB", "slow": [
            "1.2:dead", "0.1:2x", "2.0:1.5x,1.0-1.1:1MB/s", "2.1:4MB/s",
            "0.0>0.1:40ms,bandwidth=2MB/s",
        ],
        "worker_budget": {"0.2": 6, "2.2": "800MB"},
    }  # fmt: skip
    yaml = """
stages: 3
microbatches: 4
forward_ms: 9
backward_ms: 18
replicas: 3
message_bytes: 60kB
slow: [1.2:dead, 0.1:2x, 2.0:1.5x, 1.1-1.0:1MB/s, "0.0>0.1:40ms,bandwidth=2MB/s", 2.1:4MB/s]
activation_bytes: 100MB
worker_budget: {0.2: 6, 2.2: 800MB}
"""
    flags = (
        *JOB, "--message-bytes", "60kB", "--slow", "1.2:dead,0.1:2x", "--slow", "2.0:1.5x",
        "--slow", "1.0-1.1:1MB/s,0.0>0.1:40ms,bandwidth=2MB/s", "--slow", "2.1:4MB/s",
        "--activation-bytes", "100MB", "--set", "worker_budget=0.2:6,2.2:800MB",
    )  # fmt: skip
    conditions = jobs_of(
        flags,
        ("--profile", profile(job)),
        ("--profile", profile(yaml, "y.yaml")),
    )
    assert conditions.slow == {1: 2.0, 6: 1.5}
    assert {way: tuple(link[:2]) for way, link in conditions.paths.items()} == {
        (3, 4): (0.0, 1e6), (4, 3): (0.0, 1e6), (0, 1): (0.04, 2e6),
    }  # fmt: skip
    assert conditions.ports == {7: 4e6}
    assert (conditions.activation_budget[2], conditions.activation_budget[8]) == (6, 8)


def test_explain_compares_the_moves(here):
    out, _ = here("plan", *PATH, "--explain", "--activation-bytes", "300MB")
    found = rows(out)
    moves = ["1F1B, untreated", "none, best order", "swap"]
    assert [name for name in found if name in moves] == moves
    assert found["swap"][1] > found["1F1B, untreated"][1] == "1.00 x"
    away, messages, more = found["swap"][3:]
    assert int(away) > 0
    assert messages == "32 (1.92MB)"  # eight microbatches to stage 1 and on, there and back
    assert more == "0" or "MB on " in more
    data = here.json("plan", *PATH)
    swap = next(move for move in data["moves"] if move["name"] == "swap")
    assert swap["messages_between_replicas"] == 32
    assert here.refused("plan", "--stages", 3, "--microbatches", 4, *TIMES, "--explain").startswith(
        "--explain True: it compares moves between replicas"
    )


def test_memory_that_a_move_costs_is_in_microbatches_and_bytes(here):
    words = (*DEAD, "--explain")
    more = {name: row[-1] for name, row in rows(here("plan", *words)[0]).items()}
    sizes = rows(here("plan", *words, "--activation-bytes", "100MB")[0])
    count, _, worker = more["re-route"].partition(" on ")
    assert float(count) > 0
    assert sizes["re-route"][-1] == f"{count}, {float(count) * 100:g}MB on {worker}"


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_saved_plan_is_replayed(here, plan_file, tmp_path, form):
    path = plan_file(*SLOW)
    data = json.loads(path.read_text())
    if form == "text":
        path = tmp_path / "plan.txt"
        path.write_text(Schedule.from_json(data).text())
    words = ("simulate", "--schedule", path, *TIMES)
    same = here.json(*words, "--slow", "0.1:2x")
    assert same["iteration_ms"] == pytest.approx(data["predicted_ms"])
    assert same["workers"] == data["workers"]
    assert here.json(*words)["iteration_ms"] <= data["predicted_ms"] + 1e-6
    assert here.json(*words, "--slow", "1.1:9x")["iteration_ms"] > data["predicted_ms"]
    out, _ = here(*words, "--slow", "0.1:2x")
    assert out.startswith("3 replicas × 3 stages × 4 microbatches, worker 0.1 2x slow\n")
    assert "microbatches of " in out
    assert list(rows(out)) == [name + ", 2x slow" * (name == "0.1") for name in NAMES]


def test_a_plan_for_another_job_is_refused(here, plan_file, tmp_path):
    path = plan_file(*SLOW)
    line = here.refused("simulate", "--schedule", path, *TIMES, "--slow", "2.0:dead")
    assert line.endswith("it cannot run: worker 2.0 is dead, and has work there")
    words = ("simulate", "--schedule", path, *TIMES, "--slow", "0.1:2x")
    assert "it cannot run: " in here.refused(*words, "--set", "worker_budget=1.0:1")
    line = here.refused("simulate", "--schedule", path, *TIMES, "--replicas", 2)
    assert line.endswith("it has 3 replicas, the job has 2")
    one = tmp_path / "one.json"
    one.write_text(json.dumps({"stages": [["F0", "B0"]]}))
    line = here.refused("simulate", "--schedule", one, *TIMES, "--replicas", 2)
    assert line.endswith("it has 1 replicas, the job has 2")


def test_a_move_by_name(here):
    moves = {one["name"]: one["predicted_ms"] for one in here.json("plan", *SLOW)["moves"]}
    for name, predicted in moves.items():
        one = here.json("plan", *SLOW, "--policy", name)
        assert (one["move"], one["predicted_ms"]) == (name, pytest.approx(predicted))
    line = here.refused("plan", *DEAD, "--policy", "none")
    assert line.startswith("--policy 'none': this job has no such plan, only ")
    line = here.refused("plan", *SLOW, "--policy", "1f1b")
    assert line.endswith(
        "across replicas it has to be one of adaptive, none, swap, shift, re-route, share"
    )


@pytest.mark.long
def test_compare_has_each_move_beside_the_others(here, tmp_path):
    job = (*JOB, "--slow", "1.0-1.1:40ms")
    out, _ = here("compare", *job, "--budgets", "3,5", "--out", tmp_path / "new")
    found = rows(out)  # of two tables, whose moves have the same names
    assert {"1F1B, untreated", "none, best order", "swap", "re-route"} <= set(found)
    assert len(found["swap"]) == 3
    data = json.loads((tmp_path / "new" / "compare.json").read_text())
    assert [one["activation_budget"] for one in data["budgets"]] == [3, 5]
    for one in data["budgets"]:
        assert all(ms >= one["lower_bound_ms"] - 1e-6 for ms in one["moves"].values())
    shown = words(page(tmp_path / "new" / "compare.html"))
    assert all(
        name in shown for name in ("1F1B, untreated", "none, best order", "swap", "re-route")
    )


def test_draw_shows_rows_of_workers_and_homes(here, tmp_path):
    data = here.json("draw", *DEAD, "--out", tmp_path / "a.svg")
    timeline = timeline_of(data["timeline"])
    assert (timeline.replicas, timeline.stages) == (3, 3)
    guests = {
        str(span.op)
        for span in timeline.spans
        if span.op.kind.computes and span.op.home != span.stage // 3
    }
    assert guests
    drawn = ET.fromstring((tmp_path / "a.svg").read_text())
    assert "worker 1.2, dead" in titles(drawn)
    assert guests <= {title.split()[0] for title in titles(drawn)}
    out, _ = here("draw", *DEAD, "--width", 300)
    assert all(op in out for op in guests)
    assert "worker 1.2, dead |" in out


def test_many_workers_are_shown_where_something_moves(here, tmp_path):
    lines = [f"{replica}.{stage}: " for replica in range(4) for stage in range(12)]
    homes = [i // 12 for i in range(48)]
    homes[11], homes[47] = homes[47], homes[11]  # at the last stage
    head = {"replicas": 4, "microbatches": 1, "chunks": 1, "policy": "by hand", "why": ""}
    rest = [f"{name}F0@{home} B0@{home}" for name, home in zip(lines, homes, strict=True)]
    path = tmp_path / "plan.txt"
    path.write_text("\n".join([f"schedule {json.dumps(head)}", *rest, ""]))
    words = ("simulate", "--schedule", path, "--forward-ms", 1, "--backward-ms", 2)
    out, _ = here(*words, "--slow", "2.5:2x")
    assert list(rows(out)) == ["0.11", "2.5, 2x slow", "3.11"]
    assert "45 more workers run what is their own" in out
    assert "worker 0.11 and worker 3.11 run each other's microbatches" in out
