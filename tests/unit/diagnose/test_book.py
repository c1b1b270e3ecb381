"""The book says each finding once, and merges those that turn out to be one."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import pytest

from megatron_adaptra.diagnose.beside import Search
from megatron_adaptra.diagnose.book import FindingBook
from megatron_adaptra.diagnose.finding import KINDS, LINK, PORT, THIN_LINK, WORKER, Finding, Place


def place(rank: int) -> Place:
    return Place(rank, rank, f"host{rank}", "eth0", f"0.{rank}")


def slow(kind: str, *ranks: int, **more: Any) -> Finding:
    given = {"since": 10, "takes": 0.04, "normal": 0.0001, **more}
    return Finding(kind, tuple(map(place, ranks)), **given)


class Written:
    """A list keeps what a book of rank 4 writes."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.events: list[Mapping[str, Any]] = []
        self.book = FindingBook(4, self.say)

    def say(self, line: str, event: Mapping[str, Any]) -> None:
        self.lines.append(line)
        self.events.append(event)

    def states(self) -> list[tuple[str, str, str]]:
        return [(event["state"], event["id"], event["what"]) for event in self.events]


def test_one_line_when_it_opens_and_one_when_it_closes() -> None:
    written, link = Written(), frozenset((1, 2))
    for iteration in range(20):
        written.book.took(iteration, 0.2 if iteration < 10 else 0.6)
        now: dict[Hashable, Finding] = {link: slow(LINK, 1, 2)} if iteration >= 12 else {}
        written.book.update(iteration, now)
    written.book.update(20, {link: slow(LINK, 1, 2, takes=0.0002, until=20)})
    assert written.lines == [
        "slow link: rank 1 on host1 (eth0) to rank 2 on host2 (eth0) (0.1 -> 0.2), since iteration "
        "11: a message takes 40 ms, normally 0.1 ms; an iteration takes 600 ms, before 200 "
        "(+200%); 1 of 1 samples agree; to check: " + KINDS[LINK].advice,
        "recovered: rank 1 on host1 (eth0) to rank 2 on host2 (eth0) (0.1 -> 0.2), from iteration "
        "21 on: a message takes 0.2 ms; the slow link was there for 10 iterations, which took 4 s "
        "longer",
    ]
    opened, closed = written.events
    assert (opened["id"], closed["id"]) == ("4-0", "4-0")
    assert (opened["iteration_ms"], opened["before_ms"]) == pytest.approx((600, 200))
    assert closed["lost_ms"] == pytest.approx(4000)


def test_links_of_a_thin_port_become_one_finding() -> None:
    written = Written()
    one, two = frozenset((0, 1)), frozenset((1, 2))
    written.book.update(12, {one: slow(LINK, 0, 1), two: slow(LINK, 1, 2)})
    written.book.update(13, {one: slow(THIN_LINK, 0, 1), two: slow(LINK, 1, 2)})
    port = {("port", 1): slow(PORT, 1, since=12, covers=frozenset((one, two)))}
    written.book.update(16, port)
    written.book.update(17, port)
    written.book.update(30, {("port", 1): slow(PORT, 1, until=29, covers=frozenset((one, two)))})
    assert written.states() == [
        ("opened", "4-0", LINK), ("opened", "4-1", LINK), ("changed", "4-0", THIN_LINK),
        ("changed", "4-0", PORT), ("closed", "4-1", LINK), ("closed", "4-0", PORT),
    ]  # fmt: skip
    assert (written.events[-2]["because"], written.lines[-2]) == (["4-0"], "")
    assert written.events[-1]["since"] == 10


def test_a_decision_names_what_it_answers() -> None:
    written = Written()
    written.book.update(12, {7: slow(WORKER, 7, takes=3.0, normal=1.0)})
    assert written.book.ids([5, 7]) == ["4-0"]
    assert "a microbatch takes 3.0 times as long as normally" in written.lines[0]
    written.book.update(13, {})
    assert written.book.ids([7]) == []


def test_a_book_that_begins_later_counts_the_iterations_of_the_job() -> None:
    written = Written()
    book = FindingBook(4, written.say, first=100)
    book.update(12, {7: slow(WORKER, 7)})
    book.update(20, {7: slow(WORKER, 7, until=19)})
    assert [(e["since"], e["found"], e["until"]) for e in written.events] == [
        (110, 112, None), (110, 112, 119),
    ]  # fmt: skip
    assert "since iteration 111" in written.lines[0]


def test_a_search_that_fails_leaves_nothing_open() -> None:
    written = Written()
    search = Search("who is slow", written.book)
    search.run(written.book.update, 12, {7: slow(WORKER, 7)})
    search.run(lambda: [][0])
    assert written.states()[1:] == [("closed", "4-0", WORKER)]
    assert written.lines[1:] == [""], "nobody knows whether it has recovered"
