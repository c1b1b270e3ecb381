"""The law, where replicas have one plan: what measures, plans and opens routes ends no training.

As in test_law.py; the sites are those that a job without routes does not have. Two replicas
exchange partners, which keeps every bit.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from law import KINDS
from patience import in_time
from test_law import JOBS, Case, faults, in_turn, run

TRIES = 5
RANKS, WHO = 4, ((0, 1, 2, 3), (0,), (3,))
# Of modules that work for several replicas.
OURS = re.compile(r"replica|cross_links|slow_workers|chains|swaps|route|home_data|bundle")


def swapped(rows: list[list[dict[str, Any]]]) -> bool:
    return any("swapped" in one["plan"] for row in rows for one in row)


@functools.cache
def found() -> list[list[dict[str, Any]]]:
    """By engine, what each rank has found, with partners exchanged under one of them if possible.

    On a busy machine trainings may end before that: their sites are not all that there are.
    """
    for _ in range(TRIES):
        lines = run(None, 1, 2)
        by_rank = [[json.loads(one[6:]) for one in text if one[:6] == "FOUND "] for text in lines]
        assert all(len(rows) == 2 for rows in by_rank), lines
        if swapped(by_rank):
            break
    return [list(rows) for rows in zip(*by_rank, strict=True)]


def cases(everything: bool) -> Iterator[Case]:
    """Every site in each way; else each function once, from one of its callers, in one way."""
    known, called = set[str](), set[str]()
    for rows in reversed(found()):
        counts = [row["calls"] for row in rows]
        new = {site for row in counts for site in row if OURS.search(json.loads(site)[1])} - known
        for number, site in enumerate(sorted(new)):
            known.add(site)
            if not everything and json.loads(site)[1] in called:
                continue
            called.add(json.loads(site)[1])
            each = [row.get(site, 0) for row in counts]
            kinds = KINDS if not json.loads(site)[0] else KINDS[:2]
            one = kinds[number % len(kinds)], number // 2 % 2, WHO[number % 3]
            whole = [(kind, middle, who) for kind in kinds for middle in (0, 1) for who in WHO]
            for kind, middle, who in whole if everything else [one]:
                calling = [rank for rank in range(RANKS) if each[rank]]
                failing = [rank for rank in who if rank in calling] or calling
                first = [middle * (count // 2) for count in each]
                yield {
                    "engine": rows[0]["engine"], "site": json.loads(site), "kind": kind,
                    "ranks": failing, "first": first,
                }  # fmt: skip


@pytest.mark.timing
@pytest.mark.timeout(3600)
def test_the_sites_are_those_of_a_training_whose_partners_are_exchanged() -> None:
    in_time("trainings without a plan for the slow path", 0 if swapped(found()) else TRIES, TRIES)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_training_of_two_replicas_ends_with_stocks_bits_whatever_fails(
    pytestconfig: pytest.Config,
) -> None:
    assert [row["waits"] for rows in found() for row in rows] == [[]] * 2 * RANKS
    assert all(row["same"] for rows in found() for row in rows)
    chosen = list(cases(pytestconfig.getoption("--full")))
    chosen.sort(key=in_turn)
    lines = run(chosen, JOBS, 2)
    wrong = [text for j in range(JOBS) for text in faults(lines[RANKS * j : RANKS * (j + 1)])]
    ended = [json.loads(one[4:]) for text in lines for one in text if one[:4] == "END "]
    hits = sum(row["hits"] > 0 for row in ended)
    print(f"{len(chosen)} trainings with a fault, {hits} ranks met it")
    assert not wrong, "\n".join([f"{len(wrong)} wrong", *wrong])
    assert hits >= len(chosen) // 4
