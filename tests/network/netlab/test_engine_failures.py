"""Two hosts exchange messages over the engine's tcp, and in the middle of them something fails.

Distinguished: a link that comes back in time from one that does not, this side from the other.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT
from patience import decided
from seeding import new_seed

from megatron_adaptra.emulate.rules import LinkRule
from megatron_adaptra.netlab.lab import Lab
from megatron_adaptra.netlab.network import QUEUE
from megatron_adaptra.transport.engine import endpoint
from megatron_adaptra.transport.engine.endpoint import CONNECTIONS

RANK = Path(__file__).parent / "engine_rank.py"
SILENCE = 2.0  # seconds until a path is given up, where that is what is waited for
SIZE = 1 << 20  # bytes of a message
LIMIT = 250.0  # seconds
FAULTY, OTHER = 1, 0


class Exchange:
    """What both ranks printed. `status`: of their processes; `log`: lines that are no results."""

    def __init__(
        self,
        folder: Path,
        shaper: str,
        timeouts: tuple[float, float],
        loss: float = 0.0,
        bandwidth: float = math.inf,
        count: int = 200,
        silence: float = SILENCE,
        window: int = 0,
        **fault: Any,
    ) -> None:
        self.results: dict[int, Any] = {}
        self.log: list[str] = []
        rules = [LinkRule(a, 1 - a, 0.0, 2, 3, loss=loss) for a in (0, 1)] if loss else []
        if bandwidth < math.inf:
            rules += [LinkRule(a, 1 - a, 0.0, bandwidth=bandwidth) for a in (0, 1)]
        fault |= {"timeouts": timeouts, "count": count, "silence": silence}
        job = json.dumps({"folder": str(folder), "window": window, **fault})
        with Lab(2, rules, new_seed(), shaper) as lab:
            command = [sys.executable, str(RANK), job]
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            self.status = lab.run(command, environment, self._on_line, LIMIT)
            self.lost = lab.traffic.lost
        log = folder / "connections.jsonl"
        self.written = list(map(json.loads, log.read_text().splitlines())) if log.exists() else []

    def _on_line(self, host: int, line: bytes) -> None:
        print(host, line.decode()[:1000])
        if line.startswith(b"{"):
            self.results[host] = json.loads(line)
        else:
            self.log.append(line.decode())

    def all_arrived(self) -> bool:
        """Exactly once, in order, with the right contents, both ways."""
        assert self.status == [0, 0]
        for result in self.results.values():
            assert (result["error"], result["wrong"], result["more"]) == ("", [], 0)
        return len(self.results) == 2

    def records(self, rank: int) -> list[tuple[str, str]]:
        return [(what, side) for what, side, _ in self.results[rank]["records"]]


@pytest.mark.parametrize(
    ("what", "seconds", "loss"),
    [
        ("down", 0.75, 0.0),
        pytest.param("loss", 2.0, 0.01, marks=pytest.mark.long),
        pytest.param("stop", 1.0, 0.0, marks=pytest.mark.long),
    ],
)
def test_what_is_soon_over_is_no_event(
    what: str, seconds: float, loss: float, shaper: str, tmp_path: Path
) -> None:
    exchange = Exchange(
        tmp_path, shaper, (60, 60), loss, rank=FAULTY, what=what, seconds=seconds,
        silence=endpoint.SILENCE,
    )  # fmt: skip
    assert exchange.all_arrived()
    assert exchange.records(0) == exchange.records(1) == []
    assert exchange.lost or not loss


@pytest.mark.timing
@pytest.mark.parametrize("what", ["down", "loss", "stop"])
def test_a_path_that_is_lost_comes_back(what: str, shaper: str, tmp_path: Path) -> None:
    seconds = SILENCE + 2
    exchange = Exchange(
        tmp_path, shaper, timeouts=(120, 120), loss=1.0, rank=FAULTY, what=what, seconds=seconds
    )
    assert exchange.all_arrived()
    for rank in (FAULTY, OTHER):
        side = "here" if what == "down" and rank == FAULTY else "there"
        records = exchange.records(rank)
        lost = records.count(("lost", side))
        decided("each connection is lost, and none that has come back", lost == CONNECTIONS)
        if (what, rank) != ("stop", FAULTY):  # which may learn of a new path before all old ones
            decided("then one is back", records[CONNECTIONS:] == [("back", "there")])
        written = [(row["what"], row["side"]) for row in exchange.written if row["of"] == rank]
        assert written[: len(records)] == records  # what was printed was noted before the end
        lines = [
            line for line in exchange.log if f"a connection to rank {1 - rank} is lost" in line
        ]
        assert len(lines) == 1
    assert sum(result["again"] for result in exchange.results.values()) > 0


@pytest.mark.timing
@pytest.mark.parametrize("what", ["hole", "flap"])
def test_a_way_that_is_none_for_a_while(what: str, shaper: str, tmp_path: Path) -> None:
    """It passes what is small alone, or fails again before its trial ends."""
    exchange = Exchange(
        tmp_path, shaper, timeouts=(120, 120), rank=OTHER, what=what, seconds=SILENCE + 2
    )
    assert exchange.all_arrived()
    for rank in (FAULTY, OTHER):
        whats = [what for what, _ in exchange.records(rank)]
        lost = whats[:CONNECTIONS] == ["lost"] * CONNECTIONS
        decided("all connections are lost, and one is back", lost and "back" in whats)
    assert sum(result["again"] for result in exchange.results.values()) > 0


@pytest.mark.timing
def test_a_link_that_passes_small_packets_alone_is_no_way(shaper: str, tmp_path: Path) -> None:
    """Connections are made over it for ever, and carry nothing."""
    exchange = Exchange(tmp_path, shaper, timeouts=(2, 2), rank=OTHER, what="hole", seconds=LIMIT)
    assert exchange.status == [0, 0]
    assert "rank 1 is lost, no way to it for 2 s" in exchange.results[OTHER]["error"]
    error = exchange.results[FAULTY]["error"]
    assert "rank 0 is lost, no way to it for 2 s" in error or "rank 0 has closed" in error
    assert ("back", "there") not in exchange.records(OTHER)


@pytest.mark.timing
def test_no_way_to_a_rank_for_too_long(shaper: str, tmp_path: Path) -> None:
    exchange = Exchange(tmp_path, shaper, timeouts=(2, 2), rank=FAULTY, what="down", seconds=LIMIT)
    assert exchange.status == [0, 0]
    for rank, side in ((FAULTY, "here"), (OTHER, "there")):
        error = exchange.results[rank]["error"]
        assert f"rank {1 - rank} is lost, no way to it for 2 s" in error
        assert ("interface eth0 is down" in error) == (side == "here")
        assert exchange.records(rank) == [("lost", side)] * CONNECTIONS + [("gone", side)]


@pytest.mark.long
@pytest.mark.parametrize("victim", [FAULTY])
def test_a_process_that_is_killed(victim: int, shaper: str, tmp_path: Path) -> None:
    """Known at once: its machine says that nobody is there."""
    exchange = Exchange(
        tmp_path, shaper, timeouts=(LIMIT, LIMIT), rank=victim, what="kill", seconds=0
    )
    (survivor,) = exchange.results.values()
    assert survivor["error"] == f"rank {victim} is gone: its connection closed"
    assert exchange.records(survivor["rank"])[-1] == ("gone", "there")


@pytest.mark.timing
def test_a_rank_that_was_given_up_gets_that_error(shaper: str, tmp_path: Path) -> None:
    """It has more patience, finds the way again, and would wait for messages that never come."""
    exchange = Exchange(tmp_path, shaper, (1, LIMIT), rank=FAULTY, what="down", seconds=SILENCE + 4)
    assert exchange.status == [0, 0]
    assert "rank 1 is lost, no way to it for 1 s" in exchange.results[0]["error"]
    assert exchange.results[1]["error"] == "rank 0 has closed its engine"


@pytest.mark.timing
def test_a_slow_link_is_not_a_silent_one(shaper: str, tmp_path: Path) -> None:
    """A message takes longer than its connection may be silent.

    The connection has less under way than the link queues: where packets are dropped, TCP itself
    may be silent for seconds.
    """
    silence, bandwidth, window = 2 * SILENCE, 125e3, 64 << 10
    assert SIZE / bandwidth > 2 * silence
    assert window < QUEUE * bandwidth
    exchange = Exchange(
        tmp_path, shaper, (60, 60), bandwidth=bandwidth, count=1, silence=silence, window=window,
        rank=None, what="",
    )  # fmt: skip
    assert exchange.all_arrived()
    assert exchange.records(0) == exchange.records(1) == []
