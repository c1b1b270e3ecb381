"""Counts that are found, by 2 replicas of one stage: batch sizes that ramp up, and faults.

At each place that measures, chooses or reports, at the leader or at another rank, a function
raises, returns nonsense, or, off the training thread, never returns. The training goes on, with
equal counts or with those in force.
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from running import zygote

pytestmark = [pytest.mark.large, pytest.mark.long, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).with_name("faulty_counts_script.py")
FULL, SHARED = [4, 4], [6, 2]
MORE_FULL, MORE_SHARED = [6, 6], [9, 3]
ITERATIONS, RANKS = 14, (0, 1)  # see the script


@functools.cache
def trained() -> list[tuple[str, Any]]:
    """What ranks found: words, and JSON."""
    with tempfile.TemporaryDirectory() as name:
        done = zygote(False).run(Path(name), [str(SCRIPT), name], ranks=2, timeout=800)
    assert done.status == 0, done.text[-4000:]
    rows = [line.partition(" ") for line in done.text.splitlines()]
    words = ("STOCK", "SOUND", "RAMPED", "EMULATED", "FAULT")
    return [(word, json.loads(text)) for word, _, text in rows if word in words]


@pytest.fixture
def found() -> dict[str, Any]:
    """By word, and for FAULT all of them."""
    rows = trained()
    faults = [what for word, what in rows if word == "FAULT"]
    return {**dict(rows), "FAULT": faults}


@pytest.mark.parametrize("where", RANKS)
def test_a_training_ends_with_its_losses_whatever_fails(where: int, found: dict[str, Any]) -> None:
    faults = [fault for fault in found["FAULT"] if fault["rank"] == where]
    for fault in faults:
        case = f"{fault['site']}: {fault['what']} at rank {where}"
        first, second = fault["ranks"]
        for ours in fault["ranks"]:
            assert ours["losses"] == pytest.approx(found["STOCK"], rel=1e-5), case
            assert set(map(tuple, ours["counts"])) <= {tuple(FULL), tuple(SHARED)}, case
        assert first["counts"] == second["counts"], case
    met = [fault for fault in faults if fault["ranks"][where]["met"]]
    assert len(met) > len(faults) / 2, "some come too late, on a busy machine"


@pytest.mark.parametrize("where", RANKS)
def test_all_that_a_rank_calls_fails_there(where: int, found: dict[str, Any]) -> None:
    sound = found["SOUND"][where]
    assert SHARED in sound["counts"]
    assert set(sound["called"]) == {
        fault["site"] for fault in found["FAULT"] if fault["rank"] == where
    }


def test_a_batch_size_that_ramps_up_begins_with_equal_counts(found: dict[str, Any]) -> None:
    first, second = found["RAMPED"]
    assert first == second
    counts = first["counts"]
    before, after = counts[: ITERATIONS - 1], counts[ITERATIONS - 1 :]
    assert before[-1] == SHARED
    assert after[0] == MORE_FULL
    assert after[-1] == MORE_SHARED
    assert all(one in (MORE_FULL, MORE_SHARED) for one in after)


def test_ops_of_one_stage_can_be_slow_by_emulation(found: dict[str, Any]) -> None:
    first, second = found["EMULATED"]
    assert first == []
    ops = 2 * FULL[1]  # forwards and backwards
    wanted = [[i, 2.0 if i >= 2 else 0.0] for i in range(ITERATIONS) for _ in range(ops)]
    assert second == wanted
