"""Paths between two workers in the rules of slow links: which messages they are about."""

from __future__ import annotations

import random

import pytest
from seeding import new_seed

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.emulate.links import LinkEmulator
from megatron_adaptra.emulate.rules import LinkRule, in_replica, parse_rules
from megatron_adaptra.emulate.scenario import check_rules, hosts_in, load_rules

STAGES, REPLICAS = 3, 2  # workers 0, 1, 2 and 3, 4, 5


@pytest.mark.parametrize(
    ("text", "ways"),
    [
        ("0.1-0.2", [(1, 2), (2, 1)]),
        ("1.1-1.0", [(4, 3), (3, 4)]),
        ("0.1>1.2", [(1, 5)]),
        ("1.2>0.1", [(5, 1)]),
        ("1-2", [(1, 2), (2, 1), (4, 5), (5, 4)]),
        ("1>0", [(1, 0), (4, 3)]),
    ],
)
def test_rules_are_between_workers(text: str, ways: list[tuple[int, int]]) -> None:
    rules = load_rules([f"{text}:40ms,jitter=4ms@3..5"], STAGES, replicas=REPLICAS)
    assert rules == [LinkRule(a, b, 0.04, 3, 5, jitter=0.004) for a, b in ways]


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("0.1-2.2:40ms", "no such path; the workers are 0.0 to 1.2"),
        ("0.2-0.3:40ms", "no such path; the workers are 0.0 to 1.2"),
        ("0.1-1.1:40ms", "no such path; workers have paths to those of the stages beside"),
        ("0.0-1.2:40ms", "no such path; workers have paths to those of the stages beside"),
        ("0.1-2:40ms", "it has to be a link such as"),
        ("0.1.1-0.2:40ms", "it has to be a link such as"),
        ("0.1-0.2:40ms,loss=1%", "loss and seconds need a network"),
    ],
)
def test_a_bad_path_is_refused(text: str, allowed: str) -> None:
    with pytest.raises(BadInput) as bad:
        load_rules([text], STAGES, replicas=REPLICAS)
    assert allowed in str(bad.value)


def test_a_laboratory_has_hosts_and_no_workers() -> None:
    with pytest.raises(BadInput, match="it has to be a link such as"):
        parse_rules("0.1-0.2:40ms", 3, anywhere=True)


def test_of_one_replica_workers_are_its_stages() -> None:
    assert load_rules(["0.1-0.2:40ms"], STAGES) == load_rules(["1-2:40ms"], STAGES)


def test_messages_by_workers_and_by_stages_of_one_replica() -> None:
    """Where replicas are planned together rules name workers, in a single pipeline its stages."""
    rng = random.Random(new_seed())
    for _ in range(50):
        stages, replicas = rng.randint(2, 5), rng.randint(1, 4)
        workers = range(stages * replicas)
        ways = [(a, b) for a in workers for b in workers if abs(a % stages - b % stages) == 1]
        slow = set(rng.sample(ways, rng.randint(1, len(ways))))
        texts = [
            f"{a // stages}.{a % stages}>{b // stages}.{b % stages}:60s" for a, b in sorted(slow)
        ]
        rules = load_rules(texts, stages, replicas=replicas)
        for a, b in ways:
            assert LinkEmulator(a, rules).holds(b) == ((a, b) in slow)
            if a // stages != b // stages:
                continue
            own = LinkEmulator(a % stages, in_replica(rules, a // stages, stages))
            assert own.holds(b % stages) == ((a, b) in slow)


def test_a_path_to_another_replica_is_none_of_a_pipelines_own() -> None:
    rules = load_rules(["0.1-1.2:40ms"], STAGES, replicas=REPLICAS)
    assert in_replica(rules, 0, STAGES) == in_replica(rules, 1, STAGES) == []


def test_rules_are_checked_before_the_job_is_known() -> None:
    check_rules(["2-3:40ms", "999999999.2-0.1:40ms@3..", "0-1:1ms"])  # and at once
    for bad in ("0.1-0.3:40ms", "2-4:40ms", "0.1:40ms"):
        with pytest.raises(BadInput):
            check_rules([bad])
    assert hosts_in(["0-2:1ms"]) == 3
