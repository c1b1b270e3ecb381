"""Shares of microbatches on the command line: planned, predicted for given counts, drawn."""

import json
import xml.etree.ElementTree as ET
from fractions import Fraction

import pytest
from pages import page, words
from read_timeline import timeline_of
from test_replica_commands import rows

from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.sync import parse_sync
from megatron_adaptra.plan.ladder import BY_COUNTS, REMEDIES

ONE = ("--replicas", 4, "--slow", "2:2x")
TWO = ("--stages", 2, "--microbatches", 8, "--forward-ms", 1, "--backward-ms", 2, *ONE)
UNKNOWN = "what the reduction of gradients takes is not known"
TAKEN = (
    "adaptra: taken, as they are not given: --stages 1, --microbatches 8, --forward-ms 10, "
    "--backward-ms 20\n"
)


def test_plan_says_what_it_would_bring(here):
    out, err = here("plan", *ONE)
    assert err == TAKEN
    job, first, second, *_ = out.splitlines()
    assert job == "4 replicas × 1 stage × 8 microbatches, worker 2.0 2x slow"
    assert first == (
        "share: replica 2 runs 5 microbatches, replicas 0, 1 and 3 run 9 microbatches, "
        "instead of 8 each"
    )
    assert second == (
        "300.0 ms an iteration, with 8 each 480.0 ms (1.60 x); with parts of microbatches it "
        "would be 274.3 ms at least"
    )
    assert rows(out) == {
        "0": ["9", "9/8", "1", "270.0", "240.0"],
        "1": ["9", "9/8", "1", "270.0", "240.0"],
        "2, 2x slow": ["5", "5/8", "0", "300.0", "480.0"],
        "3": ["9", "9/8", "1", "270.0", "240.0"],
        "full": ["480.0", "1.00 x", "nothing changes"],
        "another order in the pipeline": ["480.0", "1.00 x", "one stage never waits for another"],
        "shares of a collective": ["–", "–", UNKNOWN],
        "routes": ["–", "–", "they need at least 2 stages"],
        "shares of microbatches, chosen": ["300.0", "1.60 x", BY_COUNTS],
    }
    assert out.splitlines()[-1] == (
        "auto: shares of microbatches: an iteration is expected to take 300 ms, without 480 ms; "
        "nothing cheaper makes it less"
    )


@pytest.mark.parametrize(
    ("flags", "chosen", "leaves"),
    [
        ((), "routes", 31),  # whole microbatches can go to other replicas, as they can by shares
        (("--slow", "2:1.1x"), "full", 29.7),
    ],
)
def test_plan_shows_all_rungs_of_the_ladder(here, flags, chosen, leaves):
    flags = (*TWO[:-2], *(flags or TWO[-2:]))
    out, _ = here("plan", *flags)
    found = rows(out)
    names = list(found)[-5:]
    assert [name.removesuffix(", chosen") for name in names] == ["full", *REMEDIES]
    assert f"{chosen}, chosen" in names
    ladder = here.json("plan", *flags)["ladder"]
    assert ladder["chosen"] == chosen
    assert ladder["predicted_ms"] == pytest.approx(leaves)
    assert ladder["predicted_ms"] <= ladder["full_ms"]
    for one in ladder["remedies"]:
        cells = found[one["remedy"] + ", chosen" * (one["remedy"] == chosen)]
        assert cells[0] == ("–" if one["leaves_ms"] is None else f"{one['leaves_ms']:.1f}")
    assert "auto: " in out


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--microbatches", 1, "--slow", "2:2x"), "one microbatch per replica: there is"),
        (("--microbatches", 2, "--slow", "2:1.3x"), "no whole microbatch can move and"),
        (("--policy", "share", "--slow", "2:1x"), "no replica is slow: each keeps its"),
        (
            ("--slow", "2:2x", "--counts", "10,10,10,2"),
            "these counts make an iteration slower",
        ),
    ],
)
def test_it_says_where_it_cannot_help(here, flags, line):
    out, _ = here("plan", "--replicas", 4, *flags)
    assert out.splitlines()[-1].startswith(line)


def test_many_replicas_are_shown_by_kind(here):
    out, _ = here("plan", "--replicas", 64, "--slow", "2:2x,7:2x,40:1.5x")
    found = rows(out)
    assert found["2 alike, 2x slow"][0] == "4"
    assert found["40, 1.5x slow"][0] == "6"
    assert sum(int(name.split()[0]) for name in found if name.endswith("alike")) == 61
    data = here.json("plan", "--replicas", 64, "--slow", "2:2x,7:2x,40:1.5x")
    assert len(data["counts"]) == 64


def test_plan_as_json_holds_everything(here):
    data = here.json("plan", *TWO)
    sync = parse_sync(data["text"])
    assert list(sync.counts) == data["counts"] == [10, 9, 4, 9]
    assert [Fraction(text) for text in data["weights"]] == [sync.weight(r) for r in range(4)]
    assert [tuple(map(tuple, share)) for share in data["shares"]] == [
        sync.share(r) for r in range(4)
    ]
    assert (data["policy"], data["why_not"]) == ("share", None)
    assert (data["predicted_ms"], data["full_ms"]) == pytest.approx((33, 54))
    assert max(data["replica_ms"]) == pytest.approx(33)
    assert data["lower_bound_ms"] <= 33
    assert ReplicaConditions.from_json(data["conditions"]).slow == {4: 2.0, 5: 2.0}


def test_yaml_says_the_same(here, tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(
        "{stages: 2, microbatches: 8, forward_ms: 1, backward_ms: 2, replicas: 4, slow: '2:2x'}"
    )
    assert here.json("plan", "--profile", path) == here.json("plan", *TWO)
    path.write_text("{replicas: 4, slow: ['2:2x']}")
    assert here.json("plan", "--profile", path)["counts"] == [9, 9, 5, 9]


def test_other_remedies_by_name_and_other_descriptions(here):
    assert here.json("plan", *TWO, "--policy", "shift")["move"] == "shift"
    workers = (*TWO[:8], "--replicas", 4, "--slow", "2.0:2x,2.1:2x")
    assert here.json("plan", *workers)["policy"] != "share"
    assert here.json("plan", *workers, "--policy", "share") == here.json("plan", *TWO)
    assert here.json("plan", *workers, "--counts", "9,9,5,9")["predicted_ms"] == pytest.approx(36)
    assert here.json("simulate", *TWO) == here.json("plan", *TWO)


@pytest.mark.long
def test_compare_has_shares_beside_the_moves(here, tmp_path):
    out, _ = here("compare", *TWO, "--out", tmp_path / "new")
    found = rows(out)
    assert found["share"][:2] == ["33.0", "1.64 x"]
    assert {"1F1B, untreated", "shift", "re-route"} <= set(found)
    assert "share: replica 2 runs 4 microbatches" in out
    data = json.loads((tmp_path / "new" / "compare.json").read_text())
    assert data["share"]["counts"] == [10, 9, 4, 9]
    assert "share" in words(page(tmp_path / "new/compare.html"))
    dead = (*TWO, "--slow", "1.1:dead")
    assert here.json("compare", *dead)["share"] is None


def test_draw_shows_an_iteration_before_and_after(here, tmp_path):
    data = here.json("draw", *TWO, "--out", tmp_path / "new")
    lengths = [timeline_of(data["timelines"][name]).makespan for name in ("full", "share")]
    assert lengths == pytest.approx([0.054, 0.033])
    drawn = ET.fromstring((tmp_path / "new" / "share.svg").read_text())
    shown = words(drawn)
    assert all(
        f"{name} {row // 2}.{row % 2}" in shown for name in ("full", "share") for row in range(8)
    )
    assert shown.count("2x slow") >= 4  # two stages, twice
    root = page(tmp_path / "new" / "share.html")
    assert "share: 33 ms" in words(root)
    assert "stripe: of replica 2" in words(root)
    out, _ = here("draw", *TWO, "--width", 200)
    lines = {line.split("|")[0].strip(): line.split("|")[1] for line in out.splitlines()
             if "|" in line}  # fmt: skip
    assert len(lines) == 16
    assert "B4@2" in lines["share 0.0"]
    assert "@2" not in "".join(line for name, line in lines.items() if name.startswith("full"))
    text, _ = here("draw", *TWO, "--format", "plan")
    assert text == "sync 8: 10 9 4 9\n"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--counts 9,9,9,6", "--counts '9,9,9,6': they add up to 33, and the global batch has 32"),
        ("--counts 16,16,0,0", "--counts '16,16,0,0': count of replica 2 is 0: a whole number"),
        ("--counts 8,8,8", "--counts '8,8,8': one per replica, and there are 4"),
        ("--counts 9,9,x", "--counts '9,9,x': it has to be whole numbers with commas between"),
        ("--counts 8,8,8,8 --policy swap", "--counts '8,8,8,8': they go with --policy share"),
        ("--failures 1", "--failures 1: it does not go with --policy share"),
        ("--slow 1.0:dead", "--slow '1.0': a replica with a dead worker runs nothing"),
        ("--activation-budget 1", "--activation-budget 1.0: policy 1f1b needs at least 2 on"),
        ("--slow 4:2x", "--slow '4:2x': no such worker; they are 0.0 to 3.1"),
        ("--slow 1", "--slow '1': it has to be a rule: "),
        ("--slow 2:3x", "--slow '2:3x': it is given twice"),
        ("--slow 2.1:3x", "--slow '2:2x': it is given twice"),
    ],
)
def test_bad_input_is_one_line(here, flags, line):
    stages = ("--stages", 2, "--microbatches", 8, "--forward-ms", 1, "--backward-ms", 2)
    assert here.refused("plan", *stages, *ONE, *flags.split()).startswith(line)


@pytest.mark.parametrize(
    ("words_of", "line"),
    [
        ("plan --policy share", "--policy 'share': microbatches are shared out among replicas"),
        ("plan --counts 1,1", "--counts '1,1': microbatches are shared out among replicas"),
        ("plan --slow 0:2x", "--slow '0:2x': it needs several replicas: give --replicas"),
    ],
)
def test_shares_need_replicas(here, words_of, line):
    shape = ("--stages", 2, "--microbatches", 2, "--forward-ms", 1, "--backward-ms", 2)
    command, *flags = words_of.split()
    assert here.refused(command, *shape, *flags).startswith(line)


def test_a_schedule_from_a_file_is_not_shared_out(here, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(here("plan", *TWO, "--policy", "shift", "--json")[0])
    one = here.json("simulate", "--schedule", path, "--forward-ms", 1, "--backward-ms", 2, *ONE)
    assert one["policy"] == "shift"
    line = here.refused("simulate", "--schedule", path, *TWO, "--counts", "8,8,8,8")
    assert line.startswith("--counts '8,8,8,8': they go with --policy share, and with no")
