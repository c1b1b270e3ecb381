"""Loops that do not act: what they log, and how they go back and come again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from adapt.golden_runs import SCRIPTS, Output, Shares, caught
from run_records import FIRST

from megatron_adaptra.agree.bundle import LINKS

NAMES = ("pipeline-proposed", "reductions-proposed", "shares-proposed")
WOULD = "would be done, but acting is off: "


@contextmanager
def job(name: str, folder: Path, acts: Callable[[], bool]) -> Iterator[tuple[Any, Output]]:
    folder.mkdir()
    with caught() as out:
        made = SCRIPTS[name][0](out, folder)
        made.loop._acts = acts
        try:
            yield made, out
        finally:
            made.close()


def found(out: Output, what: str) -> list[Any]:
    return [row[what] for row in map(json.loads, out.lines) if what in row]


def decisions(out: Output) -> list[Any]:
    return [row for row in found(out, "logs") if row["kind"] in FIRST]


def in_force(made: Any) -> Any:
    """Return the values that ranks run, but for links, which they keep."""
    if isinstance(made, Shares):
        return made._next
    values = made.leader.in_force.values
    return {kind.name: one.to_json() for kind, one in values.items() if kind is not LINKS}


@pytest.mark.parametrize("name", NAMES)
def test_what_would_be_done_is_the_first_decision_of_a_job_that_acts(
    name: str, tmp_path: Path
) -> None:
    healthy, slow = SCRIPTS[name][1][:2]
    outs = []
    for acts in (True, False):
        with job(name, tmp_path / str(acts), lambda acts=acts: acts) as (made, out):
            made.train(healthy[0], **healthy[1])
            made.train(3 * slow[0], **slow[1])
        outs.append(out)
    acting, observing = outs
    (held,) = decisions(observing)  # once, however long it lasts
    assert held.pop("acting") is False
    assert held == decisions(acting)[0]
    assert found(observing, "says") == [WOULD + found(acting, "says")[0]]
    assert found(observing, "proposes") == []
    assert len(set(found(observing, "runs"))) == 1


@pytest.mark.parametrize("name", [*NAMES, "routes-proposed"])
def test_off_goes_back_to_the_start_and_on_comes_again(name: str, tmp_path: Path) -> None:
    healthy, slow = SCRIPTS[name][1][:2]
    on = [True]
    with job(name, tmp_path / "job", lambda: on[-1]) as (made, out):

        def runs(iterations: int, given: dict[str, Any]) -> Any:
            made.train(iterations, **given)
            return in_force(made)

        start = runs(*healthy)
        assert runs(*slow) != start
        on.append(False)
        votes = len(found(out, "proposes"))
        assert runs(*slow) == start
        assert any("acting is off" in one for one in found(out, "says"))
        assert runs(*slow) == start
        assert len(found(out, "proposes")) == votes + 1
        on.append(True)
        assert runs(*slow) != start
