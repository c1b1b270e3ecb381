"""The fake machine: streams that share a hardware queue wait for each other, as on a GPU."""

from __future__ import annotations

from fake_runs import first_report, run_script
from patience import in_some_run


def test_a_receive_posted_before_its_time_hangs_with_one_queue_alone() -> None:
    """The planted fault. The report names the stream, the call and the peer."""
    ended = run_script("machine_script.py", ranks=2, queues=32, kernel_us=1000)
    assert ended == ["ended", "ended"]
    # Where a rank starts a second after the other the first report is of that.
    report = in_some_run(
        lambda: first_report("machine_script.py", ranks=2, queues=1, stall_s=1),
        lambda found: "cudaDeviceSynchronize" in found,
    )
    assert "rank 0: no progress for 1 s" in report
    assert "ncclRecv of 4000 bytes from rank 1, communicator 0, as rank 0 of 2" in report
    assert "receives from rank 1 (device 1)" in report
    assert "held by stream 0" in report
