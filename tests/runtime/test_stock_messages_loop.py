"""The replan loop of a job whose messages are Megatron's own while its links are healthy."""

import pytest
from runtime.leading import drive
from runtime.test_controller import committed

SLOW = {(1, 2): 0.04, (2, 1): 0.04}
STOCK = (3, 2, 1)


def modes(ran):
    """In force one after the other: whether messages are Megatron's, and the warmup."""
    out = []
    for one in ran:
        if not out or (one.stock, one.warmup) != out[-1]:
            out.append((one.stock, one.warmup))
    return out


def test_a_healthy_job_keeps_megatrons_messages(tmp_path):
    run = drive(tmp_path / "log", lambda i: {}, 30, theirs=lambda i: {}, paced=True)
    assert modes(run.ran[0]) == [(True, STOCK)]
    assert not committed(tmp_path / "log")


def test_slow_links_and_healed_ones_three_times(tmp_path):
    """Every change is seen within five iterations, by all stages in the same one."""
    path, starts = tmp_path / "log", (10, 40, 70)

    def delays(i):
        return SLOW if any(start <= i < start + 15 for start in starts) else {}

    run = drive(path, delays, 100, theirs=delays, paced=True)
    for ran in run.ran:
        assert ran == run.ran[0]
    found = modes(run.ran[0])
    assert [stock for stock, _ in found] == [True, False] * 3 + [True]
    assert all(warmup == STOCK for stock, warmup in found if stock)
    assert all(warmup[0] > STOCK[0] for stock, warmup in found if not stock)
    rows = committed(path)
    assert len(rows) == 6
    for row, change in zip(rows, (10, 25, 40, 55, 70, 85), strict=True):
        assert change < row["iteration"] <= change + 5
    into, out = rows[:2]
    assert "its messages leave the GPU's queue" in into["why"]
    assert "back to Megatron's own messages" in out["why"]
    assert into["predicted_without_ms"] > 1.5 * into["predicted_ms"]


def test_what_has_made_iterations_slower_is_taken_back_by_all_stages(tmp_path):
    path, delays = tmp_path / "log", lambda i: SLOW if i >= 10 else {}
    run = drive(path, delays, 40, theirs=delays, longer=2.5, paced=True)
    for ran in run.ran:
        assert ran == run.ran[0]
    assert [stock for stock, _ in modes(run.ran[0])] == [True, False, True]
    into, out = committed(path)
    assert out["iteration"] - into["iteration"] <= 8
    assert out["links"] == []
    assert out["why"].startswith("iterations take ")
    assert out["predicted_ms"] < out["predicted_without_ms"] == pytest.approx(into["measured_ms"])
    assert out["measured_ms"] == pytest.approx(out["predicted_ms"], rel=0.01)


def test_a_link_that_is_slow_for_our_messages_alone_changes_nothing(tmp_path):
    run = drive(tmp_path / "log", lambda i: SLOW, 40, theirs=lambda i: {}, paced=True)
    assert modes(run.ran[0]) == [(True, STOCK)]


def test_a_link_that_is_slow_for_megatrons_messages_alone_is_left_to_ours(tmp_path):
    """And not tried again at once: nobody can see how it does meanwhile."""
    run = drive(tmp_path / "log", lambda i: {}, 60, theirs=lambda i: SLOW, paced=True)
    assert [stock for stock, _ in modes(run.ran[0])] == [True, False]
    (into,) = committed(tmp_path / "log")
    assert "takes 40 ms for Megatron's messages, for ours " in into["why"]


@pytest.mark.parametrize("seconds", [0.002, 0.004])
def test_a_delay_that_does_not_matter_changes_nothing(tmp_path, seconds):
    little = dict.fromkeys(SLOW, seconds)
    run = drive(tmp_path / "log", lambda i: little, 60, theirs=lambda i: little, paced=True)
    assert modes(run.ran[0]) == [(True, STOCK)]
