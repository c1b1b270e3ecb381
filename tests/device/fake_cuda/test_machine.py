"""The fake machine: what trainings rely on. Streams, hardware queues, copies and NCCL's sends.

Kernels take 1 ms of the fake's own time.
"""

from __future__ import annotations

from typing import Any

import pytest
from fake_runs import first_report, run_script
from patience import in_some_run


def scenario(name: str, ranks: int = 1, **options: Any) -> list[Any]:
    return run_script("machine_script.py", name, ranks=ranks, kernel_us=1000, **options)


@pytest.mark.parametrize(("queues", "behind"), [(1, True), (32, False)])
def test_a_stream_that_waits_holds_up_what_shares_its_queue(queues: int, behind: bool) -> None:
    def run() -> Any:
        (found,) = scenario("queues", queues=queues)
        assert found["waited"] >= 0.2
        assert found["behind"] >= 0.2 or not behind
        return found

    in_some_run(
        run, lambda found: (found["behind"] >= 0.2) is behind and found["asked"] == [600, 0]
    )


def test_bytes_move_when_the_stream_comes_to_it_and_take_their_time() -> None:
    def run() -> Any:
        (found,) = scenario("copies", copy_gbps=0.02)
        assert found["late"]
        assert found["took"] > 0.1  # of 0.105: two copies of 1 MiB
        return found

    in_some_run(run, lambda found: found["early"] == 0)


def test_a_send_waits_for_its_receive_on_the_stream_and_not_on_the_host() -> None:
    def run() -> Any:
        sender, receiver = scenario("sends", ranks=2)
        assert receiver["late"] == [1.0]
        assert sender["sum"] == receiver["sum"] == [2.0]
        return sender, receiver

    # Where the sender has little of the machine it begins late.
    in_some_run(
        run,
        lambda found: (
            found[0]["asked"] == 600 and found[0]["took"] > 0.1 and found[1]["early"] == 2.0
        ),
    )


def test_a_receive_posted_before_its_time_hangs_with_one_queue_alone() -> None:
    """The planted fault. The report names the stream, the call and the peer."""
    assert scenario("early", ranks=2, queues=32) == ["ended", "ended"]
    # Where a rank starts a second after the other the first report is of that.
    report = in_some_run(
        lambda: first_report("machine_script.py", "early", ranks=2, queues=1, stall_s=1),
        lambda found: "cudaDeviceSynchronize" in found,
    )
    assert "rank 0: no progress for 1 s" in report
    assert "ncclRecv of 4000 bytes from rank 1, communicator 0, as rank 0 of 2" in report
    assert "receives from rank 1 (device 1)" in report
    assert "held by stream 0" in report
