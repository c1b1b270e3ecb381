"""The distributed optimizer's shards by plan: trained as by Megatron, up to summation's order."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from running import zygote

RANKS = 4
SCATTER, GATHER = "reduce-scatter", "all-gather"


@functools.cache
def trained() -> tuple[dict[str, list[dict[str, Any]]], str]:
    """By case, what each rank has found; and all that was printed."""
    with tempfile.TemporaryDirectory() as folder:
        words = [str(Path(__file__).with_name("shards_script.py")), folder]
        done = zygote(False).run(Path(folder), words, ranks=RANKS, timeout=400)
    assert done.status == 0, done.text[-4000:]
    found = [json.loads(line[5:]) for line in done.texts[0].splitlines() if line[:5] == "CASE "]
    return {rows[0]["case"]: rows for rows in found}, done.text


@pytest.mark.timeout(500)
@pytest.mark.parametrize("case", ["overlap", "gather", "in turn", "bf16", "pipelines"])
def test_losses_are_those_of_megatron(case: str) -> None:
    rows = trained()[0][case]
    for row in rows:
        native, ours = row["native"], row["direct"]
        assert ours["calls"][SCATTER] > 0
        assert ours["calls"][GATHER] > 0
        close = 1e-2 if case == "bf16" else 1e-5
        assert ours["losses"] == pytest.approx(native["losses"], rel=close)
        assert ours["norms"] == pytest.approx(native["norms"], rel=close)
        for way in {"again", "gloo"}.intersection(row):  # the same bits, whatever carries them
            assert row[way] == ours
        if case == "pipelines":  # of two replicas: one order
            assert {**ours, "calls": 0} == {**native, "calls": 0}
    replicas = [{0, 1, 2, 3}] if case != "pipelines" else [{0, 1}, {2, 3}]
    for some in replicas:
        assert len({rows[rank]["direct"]["parameters"] for rank in some}) == 1


def bits(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "calls"}


@pytest.mark.timeout(500)
def test_a_plan_in_a_file_does_what_its_goal_is() -> None:
    found, text = trained()
    for row in found["overlap"]:
        assert bits(row["scatter.txt"]) == bits(row["direct"])
        assert set(row["scatter.txt"]["calls"]) == {SCATTER}
        assert row["sums.txt"] == {**row["native"], "calls": {}}
    for row in found["gather"]:
        assert bits(row["gather.txt"]) == bits(row["native"])
        assert set(row["gather.txt"]["calls"]) == {GATHER}
    assert "parameters are gathered by Megatron: the plan of" in text
    assert "scatter.txt is of another goal: reduce-scatter" in text
    assert "sums.txt is of another goal: all-reduce" in text
    assert "scatter.txt is for 4 ranks, here is 2" in text


@pytest.mark.timeout(500)
def test_what_a_plan_does_not_do_is_left_to_megatron() -> None:
    found, text = trained()
    for row in found["native"]:
        assert row["stragglar"] == {**row["native"], "calls": {}}
    for row in found["forced"]:  # an all-reduce, of which each rank has all sums
        assert set(row["direct"]["calls"]) == {GATHER}
        assert bits(row["direct"]) == bits(row["native"])
    for line in (
        "gradients are reduced by Megatron: stragglar has no reduce-scatter",
        "parameters are gathered by Megatron: stragglar has no all-gather",
    ):
        assert text.count(line) == 1  # at rank 0
