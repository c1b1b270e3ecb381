"""A replica that is slow for a while, in a training of 4 ranks: found, relieved, and back."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from running import zygote

from megatron_adaptra.runtime.decision_reader import read_log

pytestmark = pytest.mark.timeout(600)

SCRIPT = Path(__file__).with_name("found_counts_script.py")
DOCS = Path(__file__).parents[2] / "docs"
SHARED = {1: [5, 5, 4, 2], 2: [6, 2]}  # by stages: of one, 4 replicas, of two, 2
FROM, TO = 4, 14  # see the script
SOON = 10  # iterations

every_layout = pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.long), 2])


@functools.cache
def trained(
    stages: int,
) -> tuple[dict[str, Any], str, list[dict[str, Any]], list[dict[str, Any]]]:
    """What ranks found, the log of the training, decisions, and lines of the record."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        done = zygote(False).run(folder, [str(SCRIPT), name, str(stages), "calculated"], ranks=4)
        assert done.status == 0, done.text[-4000:]
        line = next(one for one in done.text.splitlines() if one.startswith("FOUND "))
        log = folder / "decisions.sync.jsonl"  # of two trainings
        schema = json.loads((DOCS / "decision-log.schema.json").read_text())
        for row in log.read_text().splitlines():
            jsonschema.validate(json.loads(row), schema)
        record = (folder / "record" / "sync.jsonl").read_text().splitlines()
        return json.loads(line[6:]), done.text, read_log(log), [json.loads(row) for row in record]


@every_layout
def test_all_replicas_run_fewer_on_the_slow_one_and_as_many_when_it_is_fast_again(
    stages: int,
) -> None:
    found, text, _, _ = trained(stages)
    counts, shared = found["shared"]["counts"], SHARED[stages]
    full = [4] * len(shared)
    assert found["same"], "on all ranks"
    first, last = counts.index(shared), len(counts) - counts[::-1].index(shared)
    assert FROM < first <= FROM + SOON
    assert TO < last <= TO + SOON
    assert counts == [full] * first + [shared] * (last - first) + [full] * (len(counts) - last)
    assert f"replica {len(shared) - 1} runs 2 microbatches, replica" in text
    assert "on, replicas run" not in text, "a change is one line"


@every_layout
def test_losses_are_those_of_stock_up_to_the_order_of_sums(stages: int) -> None:
    found, _, _, _ = trained(stages)
    stock, shared = found["stock"]["losses"], found["shared"]["losses"]
    first = found["shared"]["counts"].index(SHARED[stages])
    assert shared[:first] == stock[:first], "bit for bit"
    assert shared == pytest.approx(stock, rel=1e-4)
    assert found["shared"]["digest"] != found["stock"]["digest"], "the order of sums is another one"


@every_layout
def test_the_vote_goes_round_while_gradients_are_reduced(stages: int) -> None:
    """But in the first iteration, which is watched to its end.

    An iteration starts when the vote on it is over, and what it takes is from start to start.
    """
    order = trained(stages)[0]["shared"]["order"]
    later = len(trained(stages)[0]["shared"]["counts"]) - 1
    assert order == ["start", "reduce", "vote", *["start", "vote", "reduce"] * later]


@every_layout
def test_an_iteration_takes_so_much_less_by_calculation(stages: int) -> None:
    _, _, decisions, record = trained(stages)
    there, back = decisions[:2]
    shared = SHARED[stages]
    assert (there["after"], there["slow"]) == (shared, [len(shared) - 1])
    most = {1: 0.66, 2: 0.72}[stages]
    assert there["predicted_ms"] <= most * there["full_ms"]
    assert there["measured_ms"] == pytest.approx(there["predicted_ms"])
    assert back["after"] == there["before"] == [4] * len(shared)
    began = [number for number, row in enumerate(record) if row["kind"] == "run"]
    rows = [row for row in record[: began[1]] if row["kind"] == "iteration"]
    took = {row["iteration"]: row["took"] for row in rows}
    assert took[there["iteration"] + 1] <= most * took[there["iteration"] - 1]


@every_layout
def test_a_rank_that_does_not_switch_is_found_before_anything_is_summed(stages: int) -> None:
    found, text, decisions, _ = trained(stages)
    stock = found["stock"]["losses"]
    for one in found["behind"]:
        assert one["counts"] == [[4] * len(SHARED[stages])] * TO
        assert one["losses"] == stock[:TO]
    number = decisions[-1]["iteration"] + 1
    assert decisions[-1]["committed"]
    assert (
        f"replicas run as many microbatches each: from iteration {number} on, as not all ranks "
        "have the same plan for it" in text
    )
