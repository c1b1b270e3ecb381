"""Counts that are named, data and times of shares; one process."""

from __future__ import annotations

import types
from collections import deque
from typing import Any

import pytest
import torch
from test_home_data import EACH, REPLICAS, batch, loader

from megatron_adaptra.adapter.entry import flags
from megatron_adaptra.adapter.entry.plugin import Plugin
from megatron_adaptra.base.errors import BadInput, ScheduleError
from megatron_adaptra.config import AdaptraConfig
from megatron_adaptra.ir.sync import SyncPlan


@pytest.fixture(scope="module", autouse=True)
def megatron() -> None:
    """Imported where these tests run: all processes of pytest-xdist collect them."""
    global CountedBatches, ShareBatches, ShareData, NamedCounts, ScheduleTimes
    global first_iteration, mpu, unreadable
    from megatron_adaptra.adapter.pipeline.counted_batches import CountedBatches
    from megatron_adaptra.adapter.pipeline.home_data import unreadable
    from megatron_adaptra.adapter.shares import first_iteration
    from megatron_adaptra.adapter.shares.share_data import ShareBatches, ShareData
    from megatron_adaptra.adapter.shares.share_times import ScheduleTimes
    from megatron_adaptra.adapter.shares.sources import NamedCounts, mpu


def checked(counts: str, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> str:
    """What the plugin refuses at the start of a training of two replicas of 6 microbatches."""
    monkeypatch.setattr(flags, "refuse", lambda args: None)
    plugin = Plugin()
    plugin.config = AdaptraConfig(sync="share", sync_counts=counts)
    values = {
        "data_parallel_size": 2, "pipeline_model_parallel_size": 1, "global_batch_size": 24,
        "micro_batch_size": 2, **settings,
    }  # fmt: skip
    with pytest.raises((BadInput, AttributeError)) as caught:
        plugin._check(types.SimpleNamespace(**values))
    return str(caught.value)


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        (
            "8,5",
            "they have to add up to the global batch, 12 microbatches (2 x 6), not to 13",
        ),
        ("4,4,4", "there are 2 replicas: name a count for each"),
        ("12", "there are 2 replicas: name a count for each"),
    ],
)
def test_counts_that_do_not_fit(counts: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checked(counts, monkeypatch) == f"--adaptra-sync-counts '{counts}': {words}"


def test_counts_that_fit_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    after = "has no attribute 'virtual_pipeline_model_parallel_size'"  # what is looked at next
    assert after in checked("8,4", monkeypatch)
    assert after in checked(
        "2,10", monkeypatch, step_batch_size_schedule="0:4", global_batch_size=4
    )
    line = checked("2,11", monkeypatch, step_batch_size_schedule="0:4", global_batch_size=4)
    assert line.endswith("12 microbatches (2 x 6), not to 13")


def test_named_counts_hold_for_their_number_of_microbatches_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mpu, "get_data_parallel_world_size", lambda: 2)
    lines: list[str] = []
    counts = NamedCounts((5, 3), lines.append)
    assert counts.begin(7, None, 4) == SyncPlan(4, (5, 3))
    assert lines == []
    assert counts.begin(8, None, 3) == counts.begin(9, None, 3) == SyncPlan(3, (3, 3))
    (line,) = lines
    assert line.startswith("replicas run 3 microbatches each: --adaptra-sync-counts '5,3': they")


@pytest.mark.parametrize("workers", [0, 1])
def test_shares_are_read_from_every_loader_once(workers: int) -> None:
    """Of three replicas, whose loaders are as Megatron's; plans change from one to the next.

    Before an iteration some others are skipped, as is known only after it was read ahead.
    """
    loaders = [loader(replica, workers) for replica in range(REPLICAS)]
    readers = [ShareData(replica) for replica in range(REPLICAS)]
    counts = [(4, 4, 4), (1, 9, 2), (1, 1, 10), (4, 4, 4), (8, 3, 1), (5, 2, 5)]
    plans, iteration = [SyncPlan(EACH, one) for one in counts], 0
    following = [*plans[1:], plans[0]]
    for plan, after, skipped in zip(plans, following, [0, 1, 0, 2, 0, 3], strict=True):
        read: list[int] = []
        iteration += skipped
        for replica, iterator in enumerate(loaders):
            for _ in range(skipped * EACH):
                next(iterator)
            count = plan.counts[replica]
            others = readers[replica].others(iterator, plan)
            share = ShareBatches(iterator, min(count, EACH), EACH, others)
            found = [next(share).tolist() for _ in range(count)]
            share.end()
            assert found == [
                batch(home, iteration * EACH + number) for home, number in plan.share(replica)
            ]
            read += [number for one in found for number in one]
            iterator.advance()
        first = 12 + iteration * EACH * REPLICAS * 2
        assert sorted(read) == list(range(first, first + EACH * REPLICAS * 2))
        iteration += 1
        for reader, iterator in zip(readers, loaders, strict=True):
            reader.read_ahead(iterator, after)


def test_a_share_that_is_run_again_reads_the_same() -> None:
    """What a forward does to a batch that it was given is not seen again."""
    given = [{"tokens": [1]}, {"tokens": [2]}]
    iterator = loader(0)

    def read() -> list[Any]:
        share = ShareBatches(iterator, EACH, EACH, given)
        own = [next(share).tolist() for _ in range(EACH)]
        others = [next(share) for _ in given]
        seen = [dict(one) for one in others]
        for one in others:
            one.clear()
        share.end()
        return [own, seen]

    first = read()
    iterator.rewind()
    assert read() == first == [[batch(0, n) for n in range(EACH)], given]


def test_a_stage_that_reads_nothing_takes_nothing() -> None:
    iterator = loader(0)
    ShareBatches(iterator, 2, EACH, []).end()
    assert iterator.saved == []


def test_data_that_nobody_can_read_for_another_are_refused() -> None:
    data, plan = ShareData(0), SyncPlan(2, (3, 1))
    generator = (x for x in range(9))
    assert "come from a generator, not from Megatron's loader" in unreadable(generator)
    with pytest.raises(ScheduleError, match="come from a generator"):
        data.read_ahead(generator, plan)
    data.read_ahead(generator, home := SyncPlan(2, (2, 2)))
    assert data.others(generator, home) == []


def test_the_end_of_the_data_is_no_failure() -> None:
    data, iterator = ShareData(1), loader(1, consumed=400 - 2 * 2 * REPLICAS * EACH)
    for _ in range(EACH):
        next(iterator)
    plan = SyncPlan(EACH, (1, 7, 4))
    data.read_ahead(iterator, plan)
    assert [one.tolist()[0] for one in data.others(iterator, plan)] == [382, 388, 394]
    for _ in range(EACH):
        next(iterator)
    with pytest.raises(StopIteration):
        data.read_ahead(iterator, plan)


@pytest.mark.parametrize(("reads", "words"), [([1, 1], ""), ([0, 0], ""), ([1, 2], "1 or 2")])
def test_forwards_read_one_batch_or_none(reads: list[int], words: str) -> None:
    batches = CountedBatches(iter(range(9)))
    for many in reads:
        batches.forward_begins()
        for _ in range(many):
            next(batches)
    assert (words in batches.why_not()) if words else batches.why_not() == ""


PAIR, ONE = torch.tensor([3.0, 2.0]), torch.tensor(1.5)


@pytest.mark.parametrize(
    ("outputs", "per_token", "words"),
    [
        ((ONE, {"lm loss": PAIR}), False, ""),
        ((ONE, ONE, {"lm loss": PAIR, "other": PAIR}), True, ""),
        ((ONE, {"lm loss": PAIR}), True, "no number of tokens, with --calculate-per-token-loss"),
        ((ONE, {"lm loss": PAIR, "mean": ONE}), False, "reports 'mean' as it is in one microbatch"),
        ((ONE, PAIR), False, "reports a Tensor, not losses by name"),
        (ONE, False, "returns no loss beside what it reports"),
    ],
)
def test_losses_that_do_not_add_up_are_named(outputs: Any, per_token: bool, words: str) -> None:
    found = first_iteration._unlike(outputs, per_token)
    assert (words in found) if words else found == ""


class LateMark:
    """Of a GPU: passed later than it was asked for, or never."""

    fault = ""

    def __init__(self) -> None:
        self.when: float | None = None

    def at(self) -> float | None:
        return self.when


def test_times_of_a_gpu_are_known_later_and_what_has_no_moment_is_left_out() -> None:
    marks = [LateMark() for _ in range(6)]
    given = deque(marks)
    device = types.SimpleNamespace(mark=given.popleft, behind=True)
    times = ScheduleTimes(device)  # type: ignore[arg-type]
    over = list[int]()  # when it is, the last mark is taken
    for iteration in range(3):
        arguments = times.begin({"forward_step_func": lambda: "output"}, lambda: None)
        assert [arguments["forward_step_func"]() for _ in range(2)] == ["output"] * 2
        final = times.finalizing(lambda: "final", lambda: over.append(len(given)))
        assert final() == "final"
        times.end(iteration, (4 + iteration, 4))
        assert times.known(iteration) is None
        if iteration == 1:  # the GPU has passed what was launched before, now or not at all
            marks[0].when, marks[1].when = 1.0, 3.5
            assert times.known(1) == (0, (4, 4), 2.5)
            marks[2].fault = "the driver is gone"
    marks[4].when, marks[5].when = 5.0, 6.0
    assert over == [4, 2, 0]
    assert times.known(2) is None, "another iteration than on other ranks would be asked for"
    assert times.known(3) == (2, (6, 4), 1.0)
