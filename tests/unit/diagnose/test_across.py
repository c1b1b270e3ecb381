"""The same stages of replicas, each planned by itself: slow ones are found from the start."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest
from diagnose.kept import Kept, places
from measure.workers import jittery
from seeding import new_seed

from megatron_adaptra.diagnose.across import KEPT, LAG, ROWS, Across, Shown, StageTimes
from megatron_adaptra.diagnose.finding import HOST, LATE, LINK, REPLICA, WORKER, Finding, Place
from megatron_adaptra.diagnose.watch import LOOKED_AT
from megatron_adaptra.measure.report import BadMessage

FOUND = LOOKED_AT + 1  # iterations, also from the start


class Replicas:
    """So many replicas show what their stages take; rank 0 looks after each iteration."""

    def __init__(self, replicas: int, stages: int = 2, bursts: float = 0.0) -> None:
        self.kept, self.stages = Kept(), stages
        self.texts: dict[str, str] = {}
        self.rng = random.Random(new_seed())
        self._walls = jittery(self.rng, stages, replicas, 0.03, bursts)
        self._shown = [Shown(replica, replicas, self._show) for replica in range(replicas)]
        self.iteration = 2  # before that nothing is measured
        self.most = 0  # texts that rank 0 has read in one iteration
        self.silent: set[int] = set()  # replicas whose rows do not get there
        self.answers = True  # the store, when rank 0 reads
        self.across = Across(places(replicas, stages), self.kept.book(), self._read)

    def train(self, iterations: int, slow: Mapping[int, float] | None = None) -> None:
        for _ in range(iterations):
            walls = next(self._walls)(slow or {})
            for replica, shown in enumerate(self._shown):
                own = range(self.stages)
                each = {stage: walls[replica * self.stages + stage] for stage in own}
                took = 0.1 * max((slow or {}).values(), default=1.0)
                if replica not in self.silent:
                    shown.add(StageTimes(self.iteration, took, each, dict.fromkeys(own, 0.0)))
            self._reads = 0
            self.across.look()
            self.most = max(self.most, self._reads)
            self.iteration += 1

    def _show(self, key: str, text: str) -> bool:
        self.texts[key] = text
        return True

    def _read(self, keys: Iterable[str]) -> dict[str, str] | None:
        keys = list(keys)
        if not self.answers and keys != ["stages/0"]:  # its own it has without the store
            return None
        found = {key: self.texts[key] for key in keys if key in self.texts}
        self._reads += len(found)
        return found


@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_a_worker_that_is_slow_from_the_start_is_found_and_recovers(replicas: int) -> None:
    job = Replicas(replicas)
    slow = 2 * replicas - 1  # the last one's second stage
    job.train(FOUND, {slow: 3.0})
    (opened,) = job.kept.events
    assert (opened["what"], opened["since"]) == (WORKER, 2)
    assert [place["worker"] for place in opened["where"]] == [f"{replicas - 1}.1"]
    assert opened["takes"] == pytest.approx(3.0, rel=0.15)
    assert "times as long as the same stage of other replicas" in job.kept.lines[0]
    well = job.iteration
    job.train(10)
    assert job.kept.brief()[1:] == [("closed", WORKER, [slow], 2, well)]


def test_a_replica_all_of_whose_stages_are_slow_is_one_finding() -> None:
    job = Replicas(4, stages=3)
    job.train(12)
    job.train(8, {3: 1.9, 4: 1.8, 5: 1.9})
    job.train(10)
    replica = [3, 4, 5]
    assert job.kept.brief() == [
        ("opened", REPLICA, replica, 14, None), ("closed", REPLICA, replica, 14, 22),
    ]  # fmt: skip
    assert job.kept.events[0]["found"] <= 14 + 5
    assert "times as long as in the others" in job.kept.lines[0]
    assert "rank 3 on host1, rank 4 on host1, rank 5 on host1 (1.0" in job.kept.lines[0]


def test_one_stage_after_the_other() -> None:
    """What has turned out to be a whole replica goes on under its first name."""
    job = Replicas(2)
    job.train(12)
    job.train(10, {3: 2.5})
    job.train(10, {2: 2.5, 3: 2.5})
    job.train(12)
    assert [(e["state"], e["id"], e["what"]) for e in job.kept.events] == [
        ("opened", "0-0", WORKER), ("changed", "0-0", REPLICA), ("closed", "0-0", REPLICA),
    ]  # fmt: skip


def test_one_noisy_iteration_closes_nothing() -> None:
    job = Replicas(2)
    job.train(12)
    for _ in range(4):
        job.train(6, {3: 3.0})
        job.train(1)
    assert [(e["state"], e["what"]) for e in job.kept.events] == [("opened", WORKER)]
    job.train(12)
    assert [e["state"] for e in job.kept.events] == ["opened", "closed"]


def test_rank_0_compares_nothing_with_replicas_whose_rows_it_lacks() -> None:
    """Alone, all that is slow in its own replica would look like a slow worker."""
    job = Replicas(2)
    job.train(12)
    job.answers = False
    job.train(KEPT - 2, {1: 3.0, 3: 3.0})
    job.answers = True
    job.silent = {1}
    job.train(LAG + 4, {1: 3.0})
    job.silent = set()
    job.train(4)
    assert job.kept.events == []
    job.texts["stages/1"] = "[1]"  # a text that nobody can read is left out
    job.across.look()
    job.train(6, {3: 3.0})
    assert [e["what"] for e in job.kept.events] == [WORKER]


def test_what_its_leader_has_found_is_not_found_again() -> None:
    job = Replicas(2)
    job.train(12)
    leader = job.kept.book(2)
    place = places(2, 2)[1][1]
    found = Finding(WORKER, (place,), 14, 3.0, 1.0)
    job.train(3, {3: 3.0})
    leader.update(16, {1: found})
    job.train(8, {3: 3.0})
    leader.update(28, {1: replace(found, until=25)})
    job.train(10)
    assert [(e["state"], e["id"]) for e in job.kept.events] == [
        ("opened", "2-0"),
        ("closed", "2-0"),
    ]


def test_nothing_is_found_in_healthy_runs() -> None:
    for _ in range(20):
        job = Replicas(2, bursts=0.02)
        job.train(60)
        assert job.kept.events == [], job.rng


def test_of_many_replicas_some_show_what_they_have_by_turns() -> None:
    job = Replicas(2 * ROWS + 1, stages=1)
    job.train(3 * (FOUND), {ROWS: 2.0})
    assert job.most <= ROWS
    assert [(e["what"], [p["worker"] for p in e["where"]]) for e in job.kept.events] == [
        (REPLICA, [f"{ROWS}.0"])
    ]


def test_a_rank_that_looks_rarely_takes_what_is_still_there() -> None:
    job, look = Replicas(2), None
    look, job.across.look = job.across.look, lambda: None
    job.train(1)
    look()
    for _ in range(4):
        job.train(KEPT - 2, {3: 3.0})
        look()
    assert [e["what"] for e in job.kept.events] == [WORKER]


def test_after_the_store_has_not_answered_nothing_is_shown_for_a_while() -> None:
    tried: list[int] = []
    shown = Shown(0, 2, lambda key, text: bool(tried.append(iteration)))
    for iteration in range(20):
        shown.add(StageTimes(iteration, None, {0: {"F": 1.0}}, {0: 0.0}))
    assert tried == [0, 2, 6, 14]


@pytest.mark.parametrize("text", ["[{}]", '[{"version": 1, "iteration": 1}]', "[1]"])
def test_what_is_no_row_is_refused(text: str) -> None:
    with pytest.raises(BadMessage):
        StageTimes.read(text)


def test_a_finding_outlives_what_explains_it() -> None:
    kept, (_, one) = Kept(holds=True), places(2, 2)
    links, late = kept.book(2), kept.book(3)
    links.update(18, {"link": Finding(LINK, one, 16, 0.1, 0.0)})
    late.update(24, {0: Finding(LATE, (one[0],), 20, 0.2, 0.0)})
    assert kept.open.unexplained(100.0) == []
    links.update(30, {})
    assert kept.open.unexplained(101.0) == []
    assert kept.open.unexplained(102.0) == [], "it may end as well"
    ((line, event),) = kept.open.unexplained(120.0)
    assert line.startswith("late rank: rank 2 on host1 (1.0), since iteration 21")
    assert (event["state"], event["id"], event["because"]) == ("changed", "3-0", [])
    assert kept.open.unexplained(999.0) == []
    late.update(40, {})
    assert [(e["state"], e["id"]) for e in kept.events[-2:]] == [
        ("closed", "2-0"),
        ("closed", "3-0"),
    ]


def test_a_late_rank_is_held_until_its_reason_may_be_known() -> None:
    """Three are late: one has a reason by then, one recovers before, and one has none."""
    kept, ((first, second), (third, _)) = Kept(holds=True), places(2, 2)
    late, workers = kept.book(3), kept.book(0)
    ranks = {place.rank: Finding(LATE, (place,), 20, 0.2, 0.0) for place in (first, second, third)}
    late.update(24, ranks)
    assert kept.open.unexplained(100.0) == []
    workers.update(25, {"worker": Finding(WORKER, (third,), 20, 0.2, 0.0)})
    late.update(26, {rank: ranks[rank] for rank in (first.rank, third.rank)})
    assert kept.open.unexplained(101.0) == []
    assert [event["what"] for event in kept.events] == [WORKER]
    alone, explained = kept.open.unexplained(120.0)
    assert alone[0].startswith("late rank: rank 0 on host0 (0.0), since iteration 21")
    assert (alone[1]["state"], alone[1]["because"]) == ("opened", [])
    assert (explained[0], explained[1]["because"]) == ("", ["0-0"])


def test_a_job_that_ends_holds_nothing_back() -> None:
    kept, ((first, _), _) = Kept(holds=True), places(2, 2)
    kept.book(3).update(24, {0: Finding(LATE, (first,), 20, 0.2, 0.0)})
    ((line, _),) = kept.open.unexplained(100.0, last=True)
    assert line.startswith("late rank: rank 0")


def test_a_busy_host_is_one_finding_of_all_leaders() -> None:
    kept = Kept()
    for by in range(2):
        here = tuple(Place(stage, 2 * by + stage, "host0", "", "") for stage in range(2))
        kept.book(by).update(9, {"host": Finding(HOST, here, 5, 2.0, 0.0)})
    assert [e["id"] for e in kept.events] == ["0-0"]


def test_a_finding_whose_end_was_lost_explains_no_later_one() -> None:
    kept, (_, one) = Kept(), places(2, 2)
    book = kept.book(2)
    book.update(9, {0: Finding(WORKER, one[:1], 5, 2.0, 1.0)})
    kept.lost = True
    book.update(20, {})
    kept.lost = False
    book.update(30, {0: Finding(WORKER, one[:1], 28, 2.0, 1.0)})
    assert [e["id"] for e in kept.events] == ["2-0", "2-1"]


def test_a_late_rank_is_explained_by_what_is_slow_in_its_replica() -> None:
    kept = Kept()
    (zero, one), links = places(2, 2), kept.book(2)
    late = [Finding(LATE, (place,), 20, 0.2, 0.0) for place in (one[0], zero[1])]
    links.update(18, {"link": Finding(LINK, one, 16, 0.1, 0.0)})
    for by, finding in enumerate(late):
        kept.book(by).update(24, {0: finding})
    assert [(e["what"], e["where"][-1]["worker"]) for e in kept.events] == [
        (LINK, "1.1"), (LATE, "0.1"),
    ]  # fmt: skip
    assert kept.open.explains(1) == ("2-0",)
    assert kept.open.explains(0) == ()
    host = [Place(0, rank, "host", "", f"{rank}.0") for rank in range(2)]
    kept.book(0).update(30, {"host": Finding("busy host", tuple(host), 25, 2.0, 0.0)})
    assert kept.open.explains(0) == (), "of several replicas"
