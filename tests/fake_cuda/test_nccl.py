"""NCCL of the fake, between processes without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any

import pytest
from fake_runs import first_report, run_script
from patience import in_some_run

pytestmark = pytest.mark.large

RUNS = 20  # at most, until one is quick


def scenario(name: str, ranks: int, **options: Any) -> list[Any]:
    return run_script("nccl_script.py", name, ranks=ranks, **options)


@pytest.mark.parametrize("eager", [0, 1 << 20])
def test_every_operation_moves_and_adds_the_right_values(eager: int) -> None:
    for rank, found in enumerate(scenario("results", ranks=4, nccl_eager=eager)):
        assert found == {
            "sum": [10.0], "max": [4.0], "min": [1.0], "average": [2.5],
            "one value in place": [10.0, rank + 1.0],
            "gather": [[0.0], [1.0], [2.0], [3.0]],
            "scatter": [4.0 * 10**rank], "broadcast": [6.0],
            "reduce": [26.0] if rank == 1 else [0.0], "ring": [(rank - 1) % 4 + 5.0],
            "bfloat16": [0x4080], "int64": [4 << 40], "split": [rank % 2 + 2.0, rank % 2],
        }, rank  # fmt: skip


def soonest(runs: Iterator[Mapping[Any, float]], limits: Mapping[Any, float]) -> None:
    """Of some `runs`, each has in one of them taken less than its limit.

    Whatever a busy machine does makes it take longer; what really waits is late in all of them.
    """
    least = dict.fromkeys(limits, inf)
    for run in islice(runs, RUNS):
        assert run.keys() == limits.keys()
        least = {key: min(least[key], run[key]) for key in limits}
        late = {key: (s, limits[key]) for key, s in least.items() if s >= limits[key]}
        if not late:
            return
    raise AssertionError(f"seconds, and what they should be below: {late}")


def test_a_send_waits_for_its_receive_on_the_stream_and_not_on_the_host() -> None:
    def runs() -> Iterator[Mapping[Any, float]]:
        while True:
            sender, receiver = scenario("asynchronous", ranks=2, kernel_us=1000)
            assert sender["took"] > 0.3
            assert receiver == {"early": [2.0], "late": [1.0]}
            yield {"launched": sender["launched"]}

    soonest(runs(), {"launched": 0.25})


def test_small_sends_end_before_their_receives_and_are_received_in_order() -> None:
    """As NCCL's, which fit into its buffers. Between and after them nothing else is disturbed."""
    sender, receiver = scenario("eager", ranks=2, nccl_eager=4000)
    assert sender == [[600, [3.0]]] * 3
    for turn, row in enumerate(receiver):
        assert row == [[10.0 * turn + n] for n in (0, 1, 2, 5)] + [[3.0]]


# Seconds, per state of the links: a message to device 1 and to 2, an all-reduce, an all-gather. A
# ring's all-reduce crosses each link twice: values to be added, and the sum. At last a link carries
# one message of 0.2 s after another: two of the all-gather, and four thirds of the all-reduce.
LINKS = [(0, 0, 0, 0), (0.2, 0, 0.4, 0.2), (0, 0, 0, 0), (0.2, 0, 0.2 / 3 * 4, 0.4)]


def test_a_slow_link_slows_what_crosses_it_and_heals(tmp_path: Path) -> None:
    path = tmp_path / "links"
    limits = {}
    for state, (to_1, to_2, reduced, gathered) in enumerate(LINKS):
        messages = {(state, "ring", n): s + 0.15 for n, s in enumerate((0, to_1, to_2))}
        rings = {(state, "all-reduce"): reduced + 0.25, (state, "all-gather"): gathered + 0.25}
        limits |= messages | rings

    def runs() -> Iterator[Mapping[Any, float]]:
        while True:
            path.write_text("")
            yield crossings(scenario("links", ranks=3, links=path))

    soonest(runs(), limits)


def crossings(ranks: list[Any]) -> dict[Any, float]:
    """Seconds of each from when the last rank began; none took less than its links."""
    taken = {}
    for state, (to_1, to_2, reduced, gathered) in enumerate(LINKS):
        found = [rank[state] for rank in ranks]
        begin, end = ([{k: v[i] for k, v in f.items()} for f in found] for i in range(2))
        sent = max(b["ring"] for b in begin)  # sends wait for receives, too
        for receiver, least in enumerate((0, to_1, to_2)):
            previous = (begin[receiver]["ring"], begin[receiver - 1]["ring"])
            assert end[receiver]["ring"] - max(previous) >= least, (state, receiver)
            taken[state, "ring", receiver] = end[receiver]["ring"] - sent
        for name, least in (("all-reduce", reduced), ("all-gather", gathered)):
            # On a busy machine a late rank finds that others' values have crossed the link.
            begun, over = [b[name] for b in begin], max(e[name] for e in end)
            assert over - min(begun) >= least, (state, name)
            taken[state, name] = over - max(begun)
    return taken


def test_the_first_message_blocks_the_host_until_both_are_there() -> None:
    def runs() -> Iterator[Mapping[Any, float]]:
        while True:
            _, (first, second) = scenario("lazily", ranks=2)
            assert first > 0.4
            _, (early, _) = scenario("lazily", ranks=2, nccl_lazy=0)
            yield {"the second": second, "the first, connected before": early}

    soonest(runs(), {"the second": 0.25, "the first, connected before": 0.25})


def test_mistakes_are_refused() -> None:
    for found in scenario("mistakes", ranks=2):
        assert found == {"pageable": 4, "rank": 4, "one device": 5}


def test_abort_ends_what_waits_for_a_peer() -> None:
    assert scenario("aborted", ranks=2) == [600, 600]


def test_a_peer_that_is_gone_is_an_error_and_no_end() -> None:
    assert scenario("lost", ranks=2) == [{"error": 6, "busy": 600}, None]


def test_a_receive_posted_before_its_time_hangs_with_one_queue_alone() -> None:
    """The planted fault. The report names the stream, the call and the peer."""
    assert scenario("early", ranks=2, queues=32) == ["ended", "ended"]
    # As on a GPU whose kernels leave room for others: one that runs lets others start.
    assert scenario("early", ranks=2, queues=1, nccl_holds=0) == ["ended", "ended"]
    # Where a rank starts a second after the other the first report is of that.
    report = in_some_run(
        lambda: first_report("nccl_script.py", "early", ranks=2, queues=1, stall_s=1),
        lambda found: "cudaDeviceSynchronize" in found,
    )
    assert "rank 0: no progress for 1 s" in report
    assert "cudaDeviceSynchronize" in report
    assert "ncclRecv of 4000 bytes from rank 1, communicator 0, as rank 0 of 2" in report
    assert "receives from rank 1 (device 1)" in report
    assert "held by stream 0" in report
