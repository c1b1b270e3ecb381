"""Graphs of the fake: captured, refused, replayed, with NCCL in them."""

from __future__ import annotations

import pytest
from fake_runs import run_script

pytestmark = pytest.mark.large


def test_a_graph_runs_when_it_is_launched_and_not_before() -> None:
    (found,) = run_script("graphs_script.py", "replayed", kernel_us=1000)
    assert found["capture"] < 0.05
    assert found["before"] == 0
    assert 0.2 <= found["replays"] < 0.3
    assert found["after"] == 9


def test_what_a_capture_does_not_stand_is_refused() -> None:
    assert run_script("graphs_script.py", "refused") == [
        {"default stream": 900, "stream": [900, 901], "device": [900, 901], "event": [907, 901],
         "from outside": [905, 901], "nothing": [0, 0], "not joined": 904, "no capture": 903,
         "afterwards": 0},
    ]  # fmt: skip


def test_a_call_beside_a_capture_ends_it_unless_a_mode_lets_it_be() -> None:
    (found,) = run_script("graphs_script.py", "modes")
    assert found.pop("end") == 908, "by the thread that began it"
    ended = {key for key, errors in found.items() if errors == [900, 900, 901]}
    assert {tuple(found[key]) for key in found.keys() - ended} == {(0, 0, 0)}
    # Of the capture, of the thread: 0 global, 1 thread-local, 2 relaxed.
    assert ended == {"00 another", "00 own", "01 own", "10 own", "11 own"}


def test_each_replay_sends_anew() -> None:
    assert run_script("graphs_script.py", "messages", ranks=2) == [[1.0, 12.0], [2.0, 12.0]]
