"""A replica that is slow for a while, in a training of 4 ranks: found, relieved, and back.

With `--adaptra-sync auto` only where nothing cheaper is enough.
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from run_records import read_log
from running import zygote

from megatron_adaptra.plan.ladder import ROUTES

pytestmark = pytest.mark.timeout(600)

SCRIPT = Path(__file__).parent / "ranks" / "found_counts_script.py"
DOCS = Path(__file__).parents[2] / "docs"
FULL, SHARED = [4, 4], [6, 2]
FROM, TO, ITERATIONS, SLOW = 4, 14, 24, 1  # see the script
SOON = 10  # iterations
MOST = 0.72  # of an iteration with a slow replica, by calculation
Rows = list[dict[str, Any]]


@functools.cache
def trained() -> tuple[dict[str, Any], str, dict[str, Rows], Rows]:
    """What ranks found, all that was printed, decisions by training, the first one's record."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        done = zygote(False).run(folder, [str(SCRIPT), name], ranks=4)
        assert done.status == 0, done.text[-4000:]
        line = next(one for one in done.text.splitlines() if one.startswith("FOUND "))
        logs = {path.name.partition(".")[0]: path for path in folder.glob("*.sync.jsonl")}
        schema = json.loads((DOCS / "decision-log.schema.json").read_text())
        for row in logs["shared"].read_text().splitlines():
            jsonschema.validate(json.loads(row), schema)
        decisions = {word: read_log(path) for word, path in logs.items()}
        record = (folder / "shared" / "sync.jsonl").read_text().splitlines()
        found = (folder / "shared.findings.jsonl").read_text().splitlines()
        events = [json.loads(row) for row in found]
        line_of = json.loads(line[6:])
        line_of["findings"] = [one for one in events if one["what"] == "slow replica"]
        return line_of, done.text, decisions, [json.loads(row) for row in record]


@pytest.mark.parametrize("name", ["shared", "routes leave all"])
def test_all_replicas_run_fewer_on_the_slow_one_and_as_many_when_it_is_fast_again(
    name: str,
) -> None:
    found, text, _, _ = trained()
    one, stock = found[name], found["stock"]
    counts = one["counts"]
    assert one["same"], "on all ranks"
    first, last = counts.index(SHARED), len(counts) - counts[::-1].index(SHARED)
    assert FROM < first <= FROM + SOON
    assert TO < last <= TO + SOON
    assert counts == [FULL] * first + [SHARED] * (last - first) + [FULL] * (len(counts) - last)
    if name == "shared":
        assert one["losses"][:first] == stock["losses"][:first], "bit for bit"
    assert one["losses"] == pytest.approx(stock["losses"], rel=1e-4)
    assert one["digest"] != stock["digest"], "the order of sums is another one"
    assert "replica 1 runs 2 microbatches, replica 0 runs 6 microbatches" in text
    assert "on, replicas run" not in text, "a change is one line"


def test_the_vote_goes_round_while_gradients_are_reduced() -> None:
    """But in the first iteration, which is watched to its end.

    An iteration starts when the vote on it is over, and what it takes is from start to start.
    """
    later = ["start", "vote", "reduce"] * (ITERATIONS - 1)
    assert trained()[0]["shared"]["order"] == ["start", "reduce", "vote", *later]


def test_an_iteration_takes_so_much_less_by_calculation() -> None:
    _, _, decisions, record = trained()
    there, back = decisions["shared"]
    assert (there["after"], there["slow"]) == (SHARED, [1])
    assert there["predicted_ms"] <= MOST * there["full_ms"]
    assert there["measured_ms"] == pytest.approx(there["predicted_ms"])
    assert back["after"] == there["before"] == FULL
    took = {row["iteration"]: row["took"] for row in record if row["kind"] == "iteration"}
    assert took[there["iteration"] + 1] <= MOST * took[there["iteration"] - 1]


def test_only_one_remedy_moves_work_in_an_iteration() -> None:
    """Replicas have one plan, with or without routes, but while they share an iteration out."""
    found = trained()[0]
    one = found["routes leave all"]
    assert one["planned"] == 2
    together = one["together"][1:]  # the first iteration is stock Megatron's
    assert together == [counts == FULL for counts in one["counts"][1:]]
    assert [words == "stock" for words in one["shown"][1:]] == [not both for both in together]
    apart = found["shared"]
    assert apart["planned"] == 1
    assert all(apart["together"][1:]), "each replica has a plan of its own all the time"


def test_where_routes_are_enough_bits_are_stocks() -> None:
    found, text, _, _ = trained()
    one, stock = found["routes are enough"], found["stock"]
    assert one["counts"] == [FULL] * ITERATIONS
    assert one["losses"] == stock["losses"], "bit for bit"
    assert one["digest"] == stock["digest"]
    assert text.count("routes: an iteration is expected to take") == 1
    assert "work for other replicas is not possible" not in text


def test_the_slow_replica_is_a_finding_that_the_decision_answers() -> None:
    found, _, decisions, _ = trained()
    opened, closed = found["findings"]
    assert [place["worker"] for place in opened["where"]] == [f"{SLOW}.0", f"{SLOW}.1"]
    assert opened["since"] == FROM <= opened["found"] < FROM + 5
    assert (closed["state"], closed["id"], closed["until"]) == ("closed", opened["id"], TO)
    assert decisions["shared"][0]["answers"] == [opened["id"]]


def test_a_decision_names_what_cheaper_remedies_would_leave() -> None:
    decisions = trained()[2]
    for name, leaves in (("shared", None), ("left", decisions["left"][0]["full_ms"])):
        there, _ = decisions[name]
        routes = next(rung for rung in there["cheaper"] if rung["remedy"] == ROUTES)
        assert routes["leaves_ms"] == pytest.approx(leaves)


def test_a_rank_that_does_not_switch_is_found_before_anything_is_summed() -> None:
    found, text, decisions, _ = trained()
    stock = found["stock"]["losses"]
    for one in found["behind"]:
        assert one["counts"] == [FULL] * TO
        assert one["losses"] == stock[:TO]
    assert decisions["behind"][-1]["committed"]
    number = decisions["behind"][-1]["iteration"] + 1
    assert (
        f"replicas run as many microbatches each: from iteration {number} on, as not all ranks "
        "have the same plan for it" in text
    )
