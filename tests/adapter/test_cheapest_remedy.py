"""`--adaptra-sync auto` in trainings of 4 ranks: as shares where nothing cheaper is enough."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from running import zygote

from megatron_adaptra.plan.ladder import ROUTES
from megatron_adaptra.runtime.decision_reader import read_log

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).with_name("cheapest_remedy_script.py")
FULL, SHARED = [4, 4], [6, 2]
FROM, TO, ITERATIONS = 4, 14, 24  # see the script
SOON = 10  # iterations
CHANGED = ("nothing cheaper", "routes leave all")
KEPT = ("routes are enough", "nobody slow")


@functools.cache
def trained() -> tuple[dict[str, Any], str, list[dict[str, Any]]]:
    """What ranks found, the log of the training, and all decisions."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        done = zygote(False).run(folder, [str(SCRIPT), name], ranks=4)
        assert done.status == 0, done.text[-4000:]
        line = next(one for one in done.text.splitlines() if one.startswith("FOUND "))
        return json.loads(line[6:]), done.text, read_log(folder / "decisions.sync.jsonl")


@pytest.mark.parametrize("name", CHANGED)
def test_counts_change_where_nothing_cheaper_is_enough_and_back(name: str) -> None:
    found, text, _ = trained()
    one, stock = found[name], found["stock"]
    counts = one["counts"]
    assert one["same"], "on all ranks"
    first, last = counts.index(SHARED), len(counts) - counts[::-1].index(SHARED)
    assert FROM < first <= FROM + SOON
    assert TO < last <= TO + SOON
    assert counts == [FULL] * first + [SHARED] * (last - first) + [FULL] * (ITERATIONS - last)
    assert one["losses"][:first] == pytest.approx(stock["losses"][:first], rel=1e-6)
    assert one["losses"] == pytest.approx(stock["losses"], rel=1e-4)
    assert "replica 1 runs 2 microbatches, replica 0 runs 6 microbatches" in text
    assert "on, replicas run" not in text, "a change is one line"


def test_only_one_remedy_moves_work_in_an_iteration() -> None:
    """Replicas have one plan, with or without routes, but while they share an iteration out."""
    found, _, _ = trained()
    one = found["routes leave all"]
    assert one["planned"] == 2
    together = one["together"][1:]  # the first iteration is stock Megatron's
    assert together == [counts == FULL for counts in one["counts"][1:]]
    assert [words == "stock" for words in one["shown"][1:]] == [not both for both in together]
    apart = found["nothing cheaper"]
    assert apart["planned"] == 1
    assert all(apart["together"][1:]), "each replica has a plan of its own all the time"


@pytest.mark.parametrize("name", KEPT)
def test_where_a_cheaper_remedy_is_enough_and_where_nobody_is_slow_bits_are_stocks(
    name: str,
) -> None:
    found, text, _ = trained()
    one, stock = found[name], found["stock"]
    assert one["counts"] == [FULL] * ITERATIONS
    assert one["losses"] == stock["losses"], "bit for bit"
    assert one["digest"] == stock["digest"]
    assert text.count("routes: an iteration is expected to take") == 1
    assert "work for other replicas is not possible" not in text


def test_decisions_name_what_cheaper_remedies_would_leave() -> None:
    _, _, decisions = trained()
    there = [one for one in decisions if one["after"] == SHARED]
    assert len(there) == len(CHANGED)
    assert len(decisions) == 2 * len(CHANGED)
    for one, leaves in zip(there, (None, one_full(there[1])), strict=True):
        routes = next(rung for rung in one["cheaper"] if rung["remedy"] == ROUTES)
        assert routes["leaves_ms"] == leaves


def one_full(decision: dict[str, Any]) -> Any:
    return pytest.approx(decision["full_ms"])
