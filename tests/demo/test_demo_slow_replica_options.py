"""The demo's slow replicas: which can be, what gets slow with them, and what is done about it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from demo.refused import refused_in_a_line

from megatron_adaptra.demo.options import DemoOptions

FOUR: dict[str, Any] = {"stages": 2, "data_parallel": 4}
SPAN = {"iterations": 30, "from_iteration": 9, "to_iteration": 20}
SLOW = ("--data-parallel", "4", "--slow-replica", "2:2x")


@pytest.mark.parametrize(
    ("words", "flag", "value", "allowed"),
    [
        (("--slow-replica", "0:2x"), "--slow-replica", "0:2x", "--data-parallel 4"),
        ((*SLOW, "--slow-replica", "4:2x"), "--slow-replica", "4:2x", "replicas are 0 to 3"),
        ((*SLOW, "--slow-replica", "2:3x"), "--slow-replica", "2:2x,2:3x", "replica only once"),
        ((*SLOW, "--slow-replica", "1"), "--slow-replica", "'1'", "such as 2:2x"),
        ((*SLOW, "--slow-replica=-1:2x"), "--slow-replica", "-1:2x", "such as 2:2x"),
        ((*SLOW, "--slow-replica", "1.0:2x"), "--slow-replica", "1.0:2x", "such as 2:2x"),
        ((*SLOW, "--slow-replica", "1:20ms"), "--slow-replica", "1:20ms", "such as 2:2x"),
        ((*SLOW, "--slow-replica", "1:0.5x"), "--slow-replica", "0.5x", "from 1x to 1000x"),
        ((*SLOW, "--slow-replica", "1:2x@4.."), "--slow-replica", "1:2x@4..", "--from-iteration"),
        ((*SLOW, "--slow-replica", "1:2" * 99), "--slow-replica", "1:2", "such as 2:2x"),
        (
            ("--data-parallel", "2", "--slow-replica", "0:2x,1:3x"),
            "--slow-replica", "0:2x,1:3x", "at least one replica has to stay",
        ),
        ((*SLOW, "--reroute", "swap"), "--slow-replica", "2:2x", "beside --reroute swap"),
        ((*SLOW, "--reroute", "auto"), "--slow-replica", "2:2x", "beside --reroute auto"),
        ((*SLOW, "--chunks", "2"), "--slow-replica", "2:2x", "several --chunks"),
        ((*SLOW, "--policy", "interleaved"), "--slow-replica", "2:2x", "several --chunks"),
        ((*SLOW, "--slow-worker", "2.0:3x"), "--slow-worker", "2.0:3x", "each worker only once"),
        (("--emulate-worker", "1.1:2x", *SLOW), "--slow-replica", "2:2x", "beside --emulate-work"),
        (("--no-emulation", *SLOW), "--slow-replica", "2:2x", "beside --no-emulation"),
        ((*SLOW, "--delay", "9ms"), "--delay", "9ms", "name one with --slow-link"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_a_line(
    words: tuple[str, ...], flag: str, value: str, allowed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused_in_a_line(words, flag, value, allowed, capsys)


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes this a machine of so many cores."""
    return lambda count: monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)))


def test_all_workers_of_a_replica_are_slow_in_the_slow_phase_and_nothing_else_is(
    cores: Callable[[int], None],
) -> None:
    cores(8)
    options = DemoOptions(**FOUR, **SPAN, slow_replicas=["2:2x", "0:1.5x"])
    assert options.worker_rules == [
        "2.0:2x@9..20", "2.1:2x@9..20", "0.0:1.5x@9..20", "0.1:1.5x@9..20",
    ]  # fmt: skip
    assert options.rules == []
    assert (options.engine, options.reroute, options.dropout) == ("native", "off", 0.0)
    assert DemoOptions.load(options.dump()) == options
    assert DemoOptions(**FOUR, slow_replicas=["2:2x"], dropout=0.2).dropout == 0.2
    both = DemoOptions(**FOUR, **SPAN, slow_replicas=["2:2x"], slow_workers=["1.1:3x"])
    assert both.worker_rules == ["1.1:3x@9..20", "2.0:2x@9..20", "2.1:2x@9..20"]
    assert both.reroute == "off", "one remedy or the other"


def test_where_ranks_share_cores_all_ops_wait(cores: Callable[[int], None]) -> None:
    """A rule of a slow worker comes first, and its factor is on top of what all take."""
    cores(4)
    slow = {"slow_replicas": ["2:2x"], "slow_workers": ["1.1:1.5x"]}
    options = DemoOptions(**FOUR, **SPAN, **slow)
    every = [f"{replica}.{stage}:4x" for replica in range(4) for stage in range(2)]
    assert options.worker_rules == ["1.1:6x@9..20", "2.0:8x@9..20", "2.1:8x@9..20", *every]
    cores(1)
    assert DemoOptions.load(options.dump()) == options, "ranks run what the launcher has found"
    assert DemoOptions(**FOUR, slow_workers=["1.1:2x"]).op_times == 1
    assert DemoOptions(**FOUR, **slow, emulate=False).op_times == 1


def test_slow_replicas_make_counts_found_unless_the_file_has_them(tmp_path: Path) -> None:
    (tmp_path / "full.yaml").write_text("sync: full\n")
    (tmp_path / "named.yaml").write_text("sync: share\nsync_counts: 13,13,9,13\n")
    slow = {**FOUR, "slow_replicas": ["2:2x"]}
    assert DemoOptions(**FOUR).sync == "full"
    assert DemoOptions(**slow, emulate=False).sync == "full"
    assert (DemoOptions(**slow).sync, DemoOptions(**slow).sync_counts) == ("share", "")
    assert DemoOptions(**slow, config=str(tmp_path / "full.yaml")).sync == "full"
    named = DemoOptions(**slow, config=str(tmp_path / "named.yaml"))
    assert (named.sync, named.sync_counts) == ("share", "13,13,9,13")
