"""An interrupted demo: who is asked, who sees it, and when the patience ends."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from megatron_adaptra.demo import stopping
from megatron_adaptra.demo.stopping import LEAST, Stop, asked_by, pass_on


def test_all_ranks_see_it_behind_the_barrier_that_follows(tmp_path: Path) -> None:
    stop = Stop(tmp_path)
    stop.iterations = LEAST
    pass_on(tmp_path)
    assert stop.on_signal(signal.SIGINT), "the ranks end by themselves"
    assert asked_by(tmp_path) == "", "rank 0 has not passed it on"
    pass_on(tmp_path)
    assert asked_by(tmp_path) == "SIGINT"
    assert not stop.on_signal(signal.SIGTERM), "a second signal ends them at once"
    assert stop.signum == signal.SIGINT
    stop.close()


def test_before_there_is_anything_to_report_a_signal_ends_all(tmp_path: Path) -> None:
    stop = Stop(tmp_path)
    stop.iterations = LEAST - 1
    assert not stop.on_signal(signal.SIGTERM)
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_do_not_end_in_time_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "HAND_OVER", 0.01)
    stop, again = Stop(tmp_path), threading.Event()
    stop.iterations = LEAST
    before = signal.signal(
        signal.SIGTERM, lambda number, _: None if stop.on_signal(number) else again.set()
    )
    try:
        signal.raise_signal(signal.SIGTERM)
        assert again.wait(60)
    finally:
        stop.close()
        signal.signal(signal.SIGTERM, before)
