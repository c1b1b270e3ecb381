"""Slow workers as text: the grammar of rules, and scenario files that have them."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from seeding import new_seed

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.emulate.scenario import load_rules
from megatron_adaptra.emulate.worker_rules import (
    WorkerRule,
    check_slowness,
    load_slowness,
    parse_slowness,
)

STAGES, REPLICAS = 4, 2


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("1.2:2x", [WorkerRule(6, 2.0)]),
        ("0.3:1.5x@10..", [WorkerRule(3, 1.5, 10)]),
        (" 1.0:3x@3..5 ", [WorkerRule(4, 3.0, 3, 5)]),
        ("0.0:2x@3..5, 0.0:4x@5..", [WorkerRule(0, 2.0, 3, 5), WorkerRule(0, 4.0, 5)]),
        ("0.0:1x", [WorkerRule(0, 1.0)]),
    ],
)
def test_rules_parse(text: str, rules: list[WorkerRule]) -> None:
    assert parse_slowness(text, STAGES, REPLICAS) == rules


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("", "a rule such as 1.2:2x@10.."),
        ("1.2", "a rule such as"),
        ("1.2:x", "a rule such as"),
        ("1.2:twice", "a rule such as"),
        ("1.2-1.3:2x", "a rule such as"),
        ("1.2:2x@4", "a rule such as"),
        ("١.٢:2x", "a rule such as"),
        ("1.2:2x@" + "." * 9000, "a rule such as"),
        ("2.0:2x", "no such worker; they are 0.0 to 1.3"),
        ("1.2:0.5x", "from 1x to 1000x"),
        ("1.2:1001x", "from 1x to 1000x"),
        ("1.2:2x@9..9", "it ends before it begins"),
        ("1.2:2x@1.5..3", "an iteration is a whole number"),
        ("1.2:2x@1s..3s", "its period has to be iterations"),
    ],
)
def test_a_bad_rule_is_refused(text: str, allowed: str) -> None:
    with pytest.raises(BadInput) as bad:
        parse_slowness(text, STAGES, REPLICAS, "--a-flag")
    assert str(bad.value).startswith("--a-flag")
    assert allowed in str(bad.value)
    assert len(str(bad.value).splitlines()) == 1


def test_what_is_written_is_read() -> None:
    rng = random.Random(new_seed())
    for _ in range(200):
        stages, replicas = rng.randint(1, 9), rng.randint(1, 9)
        replica, stage = rng.randrange(replicas), rng.randrange(stages)
        times, first = rng.randint(4, 4000) / 4, rng.randrange(100)
        end = first + rng.randint(1, 50) if rng.random() < 0.5 else math.inf
        until = "" if end == math.inf else f"{end:.0f}"
        (rule,) = parse_slowness(f"{replica}.{stage}:{times}x@{first}..{until}", stages, replicas)
        assert rule == WorkerRule(replica * stages + stage, times, first, end)
        assert [rule.active(i) for i in (first - 1, first, end - 1, end)] == [
            False, True, True, False,
        ] or end == math.inf  # fmt: skip


def scenario(tmp_path: Path, text: str) -> list[WorkerRule]:
    path = tmp_path / "scenario.yaml"
    path.write_text(text)
    return load_slowness([str(path)], STAGES, REPLICAS)


def test_rules_and_scenarios_mix(tmp_path: Path) -> None:
    path = tmp_path / "one.yml"
    path.write_text(
        "workers: [{worker: '1.2', times: 2x, from: 10, to: 20}, {worker: '0.1', times: 3x}]\n"
        "links: [{link: 1-2, delay: 1ms}]\n"
    )
    got = load_slowness(["1.3:2x@4..", str(path)], STAGES, REPLICAS)
    assert got == [WorkerRule(7, 2.0, 4), WorkerRule(6, 2.0, 10, 20), WorkerRule(1, 3.0)]
    # The same file serves the flag of links.
    assert len(load_rules([str(path)], STAGES)) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("worker: 3", "did you mean 'workers'?"),
        ("workers: []", "a list of at least one, each with a worker and a times"),
        ("workers: [{worker: '1.2', time: 2x}]", "did you mean 'times'?"),
        ("workers: [{worker: '1.2'}]", "each has to have a worker and a times"),
        ("workers: [{worker: '1.9', times: 2x}]", "no such worker"),
        ("workers: [{worker: '1.2', times: 2x, from: later}]", "a rule such as"),
    ],
)
def test_a_bad_scenario_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(BadInput) as bad:
        scenario(tmp_path, text)
    assert words in str(bad.value)
    assert "scenario.yaml" in str(bad.value)


def test_without_a_job_any_worker_may_exist() -> None:
    check_slowness(["999999.999999:2x", "0.0:2x@3..5"])
    with pytest.raises(BadInput, match="a rule such as"):
        check_slowness(["1.2:twice"])
