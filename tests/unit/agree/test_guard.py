"""What adapts a training fails, hangs, or returns garbage: the training goes on."""

from __future__ import annotations

import threading

import pytest
from patience import PATIENCE
from transport.ranks import until

from megatron_adaptra.agree import guard as module
from megatron_adaptra.agree.guard import Guard
from megatron_adaptra.base import waits


class Probe:
    """Counts, and fails at the third call."""

    def __init__(self) -> None:
        self.calls = 0

    def count(self, step: int = 1) -> int:
        self.calls += step
        return self.calls if self.calls < 3 else 1 // 0


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(module, "log_line", lines.append)
    return lines


def test_a_failure_is_logged_once_and_ends_everything_else(printed: list[str]) -> None:
    guard, ran = Guard("stage 1 (rank 3)"), list[int]()
    count = guard.method(guard.call(Probe), Probe.count)
    assert [count(), count(step=1), count(), count()] == [1, 2, None, None]
    guard.later(ran.append, 1)
    assert guard.call(int, "1") is None
    guard.fail(int, "another one")
    until(lambda: printed, "it is logged")
    guard.close(PATIENCE)
    assert guard.off
    assert ran == []
    assert len(printed) == 1
    assert printed[0].startswith(
        "stage 1 (rank 3) adapts no more, training goes on as planned: Probe.count: Zero"
    )


def test_what_cannot_be_made_does_nothing(printed: list[str]) -> None:
    guard = Guard()
    count = guard.method(guard.call(Probe, 1), Probe.count)  # type: ignore[call-arg]
    assert guard.off
    assert count() is None


def test_work_is_done_in_its_order_beside_the_caller(printed: list[str]) -> None:
    guard, threads = Guard(), list[tuple[int, str]]()
    for i in range(20):
        guard.later(lambda i=i: threads.append((i, threading.current_thread().name)))
    guard.flush(PATIENCE)
    assert threads == [(i, "adaptra-guard") for i in range(20)]
    guard.close(PATIENCE)
    assert "adaptra-guard" not in {thread.name for thread in threading.enumerate()}
    assert printed == []


def test_a_hang_is_noticed_and_named(printed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "WORK", 0.0)
    guard, end, began = Guard(), threading.Event(), threading.Event()

    def hangs() -> None:
        began.set()
        end.wait(PATIENCE)

    guard.later(hangs)
    assert began.wait(PATIENCE)
    guard.later(int)
    until(lambda: printed, "it is logged")
    assert "hangs: it does not come back" in printed[0]
    with pytest.raises(TimeoutError):
        guard.result(0.01, int)
    with pytest.raises(TimeoutError):  # at once, as it is known
        guard.result(PATIENCE, int)
    guard.close(PATIENCE)
    end.set()
    assert len(printed) == 1


def test_too_much_work_ends_it(printed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 3)
    guard, end = Guard(), threading.Event()
    for _ in range(6):
        guard.later(end.wait, PATIENCE)
    assert guard.off
    end.set()
    guard.close(PATIENCE)


def test_a_result_is_had_also_after_a_failure(printed: list[str]) -> None:
    guard = Guard()
    guard.fail(int, "whatever")
    assert guard.result(PATIENCE, int, "3") == 3
    with pytest.raises(ValueError):
        guard.result(PATIENCE, int, "x")
    guard.attempt(PATIENCE, int, "x")
    guard.close(PATIENCE)


def test_a_full_standard_error_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    end, began = threading.Event(), threading.Event()

    def full(_: str) -> None:
        began.set()
        end.wait(PATIENCE)

    monkeypatch.setattr(module, "log_line", full)
    guard = Guard()
    guard.fail(int, "whatever")
    assert began.wait(PATIENCE)
    guard.close(PATIENCE)
    end.set()
