"""Loops that do not act: what they log, and how they go back and come again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from adapt.golden_runs import RULE, SCRIPTS, Output, Shares, caught
from run_records import FIRST

from megatron_adaptra.adapt.schedules.advice import Advice
from megatron_adaptra.adapt.schedules.decisions import WARMUP
from megatron_adaptra.agree.bundle import LINKS
from megatron_adaptra.measure.iteration_record import CollectiveSpan

NAMES = ("pipeline-proposed", "routes-proposed", "reductions-proposed", "shares-proposed")
WOULD = "would be done, but acting is off: "
EXECUTORS = "would be done with --adaptra-engine executor: "


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


def compared(
    name: str, folder: Path, tune: Callable[[Any, bool], object] = lambda remedy, acts: None
) -> tuple[Output, Output]:
    """Return what comes of a job that acts, and of one that does not; `tune`: each one's remedy."""
    healthy, slow = SCRIPTS[name][1][:2]
    outs = []
    for acts in (True, False):
        with job(name, folder / str(acts), lambda acts=acts: acts) as (made, out):
            tune(made.loop.remedy, acts)
            made.train(healthy[0], **healthy[1])
            start = in_force(made)
            made.train(3 * slow[0], **slow[1])
            assert (in_force(made) != start) == acts
        outs.append(out)
    return outs[0], outs[1]


@pytest.mark.parametrize("name", NAMES)
def test_what_would_be_done_is_the_first_decision_of_a_job_that_acts(
    name: str, tmp_path: Path
) -> None:
    acting, observing = compared(name, tmp_path)
    (held,) = decisions(observing)  # once, however long it lasts
    assert held.pop("acting") is False
    assert held == decisions(acting)[0]
    assert found(observing, "says") == [WOULD + found(acting, "says")[0]]
    # Connections are opened, whose probes show what the paths of a plan take.
    assert {kind for one in found(observing, "proposes") for kind in one["kinds"]} <= {LINKS.name}


def test_what_the_executor_would_gain_is_its_own_first_decision(tmp_path: Path) -> None:
    def tune(remedy: Any, acts: bool) -> None:
        remedy.rule = replace(remedy.rule, min_gain=0.05)
        if acts:
            remedy.rule = replace(remedy.rule, policy="adaptive")
            remedy.estimator.split = remedy.estimator._splits = True
        else:
            remedy.advice = Advice(remedy.rule, executes=True, split=True)

    acting, observing = compared("pipeline-proposed", tmp_path, tune)
    (note,) = (one for one in found(observing, "notes") if one.startswith(EXECUTORS))
    assert f"take {decisions(acting)[0]['predicted_ms']:.4g} ms, without" in note
    assert decisions(observing)[0]["predicted_ms"] > 1.05 * decisions(acting)[0]["predicted_ms"]


def test_collectives_that_wait_for_a_slow_link_are_named_once(tmp_path: Path) -> None:
    with job("pipeline-proposed", tmp_path / "job", lambda: False) as (made, out):
        measured, made.loop.remedy.advice = made.measured, Advice(RULE, executes=False)

        def with_step(iteration: int, bundle: Any) -> Any:
            records = measured(iteration, bundle)
            takes = 0.24 if made.world.truth.slow else 0.004  # seconds
            for one in records:
                one.collectives = [
                    CollectiveSpan(f"all_reduce {n}", one.end, one.end + takes, takes, -1.0)
                    for n in range(4)
                ]
                one.end += 4 * takes
            return records

        made.measured = with_step
        for iterations, given in 2 * SCRIPTS["pipeline-proposed"][1]:
            made.train(iterations, **given)
    (note,) = (one for one in found(out, "notes") if "--adaptra-small-collectives" in one)
    assert note.startswith("would be done with --adaptra-small-collectives auto: 4 collectives")
    assert note.endswith(" ms, without 960")


def test_what_has_healed_while_acting_was_off_is_not_planned_for(tmp_path: Path) -> None:
    healthy, slow = SCRIPTS["pipeline-proposed"][1][:2]
    on, nearly = [True], dict.fromkeys(slow[1]["slow"], 9e-4)  # seconds
    with job("pipeline-proposed", tmp_path / "job", lambda: on[-1]) as (made, out):
        made.train(healthy[0], **healthy[1])
        on.append(False)
        made.train(slow[0], **slow[1])
        made.train(20, slow=nearly)
        on.append(True)
        made.train(20)
    assert len(decisions(out)) == 1
    assert found(out, "proposes") == []
    assert found(out, "notes") == [WARMUP]


@pytest.mark.parametrize("name", NAMES)
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
