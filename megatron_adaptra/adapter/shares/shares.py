"""Replicas that run different numbers of microbatches, with the same mean over the global batch.

`Shares` wraps an iteration's schedule, run by Megatron's own function with one stage, or by our
session. For an iteration it gives the schedule this replica's number of microbatches, their
batches in the order of its share, and losses weighed by that number. The first iteration runs as
stock, and is watched; each later one runs by the plan of a `Source`, if all ranks have voted in the
one before that they can: they have read the batches they run for others, and have the same plan.
Where one of them cannot, all run as stock from the next iteration on, together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import rerun_state_machine

from megatron_adaptra.adapt.loop import Loop
from megatron_adaptra.adapt.shares.remedy import ShareRemedy
from megatron_adaptra.adapter.compat.patches import patch
from megatron_adaptra.adapter.compat.schedule_args import ScheduleArgs, config_of, only
from megatron_adaptra.adapter.limits import COUNTS, SHARES, Case, why_not
from megatron_adaptra.adapter.pipeline.counted_batches import like
from megatron_adaptra.adapter.pipeline.job_gather import from_all_ranks, reason_anywhere
from megatron_adaptra.adapter.pipeline.session import Session
from megatron_adaptra.adapter.shares.first_iteration import FirstIteration
from megatron_adaptra.adapter.shares.share_data import ShareBatches, ShareData
from megatron_adaptra.adapter.shares.share_times import ScheduleTimes, Timed
from megatron_adaptra.adapter.shares.sources import Source, new_source
from megatron_adaptra.adapter.step.planned_groups import own_place
from megatron_adaptra.agree.share_vote import (
    DIFFERENT,
    ENDED,
    FAILED,
    READY,
    Given,
    ShareVote,
)
from megatron_adaptra.base import waits
from megatron_adaptra.base.errors import reason_of
from megatron_adaptra.base.log import GOES_ON, log_line
from megatron_adaptra.execute.shares.adaptive import AdaptiveShares
from megatron_adaptra.ir.sync import SyncPlan
from megatron_adaptra.measure.replica_speed import ReplicaRow

Schedule = Callable[[ScheduleArgs], Any]  # runs one with these arguments of Megatron's
# Why there are no shares any more, by the result of the vote.
_OVER = {FAILED: "a rank cannot go on", DIFFERENT: "not all ranks have the same plan for it"}


class Shares:
    """A Shares object runs one rank's shares of iterations, from the first to the last.

    Args:
        session: this rank's, which runs the schedules.
        reductions: the job's PlannedCollectives, when training has begun.
    """

    def __init__(
        self,
        session: Session,
        reductions: Callable[[], Sequence[Any]] = list,
    ) -> None:
        self._session, self._config, self._guard = session, session.config, session.guard
        self._replica = mpu.get_data_parallel_rank()
        self._replicas = mpu.get_data_parallel_world_size()
        self._reductions = reductions
        self._source: Source | None = None  # of plans, from the first iteration on
        self._data = ShareData(self._replica)
        self._times = ScheduleTimes(session.context.device)
        self._vote: ShareVote | None = None  # from the end of the first iteration on
        self._off = False  # for good
        self._reads = False  # forwards of this rank read batches
        self._iteration = 0  # the one that is under way, or over
        self._plan = SyncPlan.full_of(self._replicas, 1)  # in force
        self._others: list[Any] = []  # batches of other replicas that it has this one run
        self._next_plan: SyncPlan | None = None  # on which ranks vote
        self._counted = 0  # the session's iterations, when this one was over
        self._timed: Timed | None = None  # whose seconds are in this rank's vote
        self._ended: ReplicaRow | None = None  # which the source does not have yet
        self._voted: tuple[int, ...] | None = None  # counts for the next iteration, if any

    @property
    def plan(self) -> SyncPlan:
        """The plan of the iteration under way, or else of the last one."""
        return self._plan

    @property
    def loop(self) -> Loop[ShareRemedy] | None:
        """The loop that finds counts, at the job's first rank; None elsewhere and without one."""
        return self._source.loop if isinstance(self._source, AdaptiveShares) else None

    def forward_backward(self, run: Schedule, arguments: ScheduleArgs) -> Any:
        """Run one call of Megatron's forward_backward with these `arguments`, by `run`.

        Returns what `run` returns. Raises what `run` raises, and PeerLost if a rank has not voted.
        """
        if self._off or arguments.get("forward_only"):
            return run(arguments)
        if self._vote is None:
            return self._first(run, arguments)
        if _again():
            return self._run(run, arguments)
        iterator = only(arguments["data_iterator"])
        self._begin(arguments, iterator)

        def over() -> None:
            if not self._off:
                self._end(iterator)

        return self._run(run, arguments, over)

    def close(self) -> None:
        """Close the source and the vote, as no iteration follows."""
        if (source := self._source) is not None:
            self._guard.attempt(waits.END, source.close)
        if self._vote is not None:
            self._vote.close()

    def _first(self, run: Schedule, arguments: ScheduleArgs) -> Any:
        """Run the first iteration as stock, and watch whether later ones can be shared out."""
        if reason := self._why_not(arguments):
            self._refuse(reason)
            return run(arguments)
        self._iteration = self._session.iteration
        if self._source is None:
            places = from_all_ranks(own_place())
            self._source = self._guard.call(
                new_source, self._session, arguments["num_microbatches"], self._iteration,
                self._reductions, places,
            )  # fmt: skip
        self._start(arguments["num_microbatches"])
        self._starts()
        config = config_of(arguments)
        watch = FirstIteration(bool(config.calculate_per_token_loss))
        with watch.ops(config):
            result = self._run(run, watch.around(arguments))
        if reason := reason_anywhere(watch.reason) or self._connect():
            self._refuse(reason)
            return result
        self._reads = watch.reads
        self._end(only(arguments["data_iterator"]))
        return result

    def _why_not(self, arguments: ScheduleArgs, feature: str = SHARES) -> str:
        return why_not(feature, Case(self._config, arguments, patches=self._session.patches))

    def _connect(self) -> str:
        """Connect all ranks to vote; return why they cannot, or an empty string. A collective."""
        reason = ""
        try:
            self._vote = ShareVote(self._replicas, self._config.timeout)
        except RuntimeError as error:
            reason = f"ranks cannot vote on them: {reason_of(error)}"
        return reason_anywhere(reason)

    def _refuse(self, reason: str) -> None:
        """Run all as stock from now on, on all ranks, for the same `reason`."""
        self._session.context.say(f"replicas run as many microbatches each: {reason}")
        self._off = True
        self._others = []

    # The two ends of an iteration.

    def _begin(self, arguments: ScheduleArgs, iterator: Any) -> None:
        """Begin an iteration of a schedule with these `arguments` in stock.

        `iterator`: Megatron's. Raises what reading from it raises, see ShareData.
        """
        assert self._vote is not None
        microbatches = arguments["num_microbatches"]
        voted, before = self._vote.result(), self._plan
        word, self._voted = voted.word, voted.counts
        # The session counts what Megatron has skipped since.
        self._iteration += 1 + self._session.iteration - self._counted
        timed, self._timed = self._timed, None
        if timed is not None and voted.seconds is not None:
            self._ended = ReplicaRow(timed.iteration, timed.counts, voted.seconds, voted.uses)
        if word in _OVER:
            self._plan = SyncPlan.full_of(self._replicas, microbatches)
            self._refuse(f"from iteration {self._iteration + 1} on, as {_OVER[word]}")
        elif microbatches != before.microbatches:
            if reason := self._why_not(arguments, COUNTS):
                self._plan = SyncPlan.full_of(self._replicas, 1)
                self._refuse(reason)
            else:
                self._start(microbatches)  # a batch size ramps up
        elif word == READY and self._next_plan is not None:
            self._plan = self._next_plan
            self._others = self._data.others(iterator, self._plan) if self._reads else []
        else:
            self._plan = SyncPlan.full_of(self._replicas, microbatches)
        self._starts()
        if self._plan != before:
            self._session.begin_anew(apart=not self._plan.full)
            found = isinstance(self._source, AdaptiveShares)  # whose decisions are logged
            if self._plan.microbatches == before.microbatches and not (self._off or found):
                counts = ",".join(map(str, self._plan.counts))
                self._session.context.say(
                    f"from iteration {self._iteration + 1} on, replicas run {counts} microbatches"
                )

    def _end(self, iterator: Any) -> None:
        """Prepare the next iteration when backwards are over, and vote on it.

        `iterator`: Megatron's, which stands after all batches of this replica.
        """
        assert self._vote is not None
        word = READY
        self._next_plan = plan = self._ask(self._iteration + 1)
        if plan is None:
            word = FAILED
        elif self._reads:
            try:
                self._data.read_ahead(iterator, plan)
            except StopIteration:
                word = ENDED
            except Exception as error:
                word = FAILED
                log_line(
                    f"rank {dist.get_rank()} cannot read batches of other replicas, {GOES_ON} "
                    f"with its own: {reason_of(error)}"
                )
        self._timed = None
        given = self._guard.call(self._given) or Given()
        self._vote.start(word, "" if plan is None else plan.text(), self._replica, given)

    def _given(self) -> Given:
        """Return what this rank adds to its vote: its seconds, its host's use, and counts."""
        use, counts = (None, None) if self._source is None else self._source.gives(self._iteration)
        if (timed := self._times.known(self._iteration)) is None:
            return Given(None, use, counts)
        given = Given(timed.seconds, use, counts)
        self._timed = timed
        return given

    def _run(
        self, run: Schedule, arguments: ScheduleArgs, over: Callable[[], None] | None = None
    ) -> Any:
        """Run the schedule by the plan in force. `over`: is called when its backwards are over.

        That is before gradients are finalised: while replicas reduce them, the vote goes round.
        """
        plan, config = self._plan, config_of(arguments)
        count = plan.counts[self._replica]
        again, end = _again(), _End()
        values = {}
        if not plan.full:
            given = arguments["data_iterator"]
            if (iterator := only(given)) is not None:
                own = min(count, plan.microbatches)
                batches = ShareBatches(iterator, own, plan.microbatches, self._others)
                arguments = {**arguments, "data_iterator": like(given, batches)}
                end.then(batches.end)
            arguments = {**arguments, "num_microbatches": count}
            if not config.calculate_per_token_loss:
                weight = float(plan.weight(self._replica))
                values["grad_scale_func"] = _weighed(config.grad_scale_func, weight)
        if not again:
            arguments = self._times.begin(arguments, lambda: self._guard.call(self._report))
            end.then(lambda: self._times.end(self._iteration, plan.counts))
            if (finalize := config.finalize_model_grads_func) is not None:
                values["finalize_model_grads_func"] = self._times.finalizing(finalize, end)
        if over is not None:
            end.then(over)
        with patch("shares", config, **values) if values else contextlib.nullcontext():
            result = run(arguments)
        end()  # where nothing is finalised
        self._counted = self._session.iteration
        return result

    # Decisions.

    def _start(self, microbatches: int) -> None:
        """Begin with another number of `microbatches`, as stock."""
        self._plan = SyncPlan.full_of(self._replicas, microbatches)
        self._ask(self._iteration)

    def _starts(self) -> None:
        """Report to the source that the iteration starts: all ranks are here."""
        if (source := self._source) is not None:
            self._guard.call(lambda: source.starts(self._iteration))  # it may have no such thing

    def _ask(self, iteration: int) -> SyncPlan | None:
        """Return what the source wants in `iteration`; None without one, or where it has failed."""
        source, each = self._source, self._plan.microbatches
        if source is None:
            return None
        try:
            voted, self._voted = self._voted, None
            plan = source.begin(iteration, voted, each)
            shape = self._replicas, each
            if isinstance(plan, SyncPlan) and (plan.replicas, plan.microbatches) == shape:
                return plan
            self._guard.fail(self._ask, f"it says {plan!r}")
        except Exception as error:
            self._guard.fail(self._ask, error)
        return None

    def _report(self) -> None:
        """Report to the source how long an iteration has taken, if ranks have exchanged that."""
        ended, self._ended = self._ended, None
        if self._source is not None and ended is not None:
            self._source.ended(ended)


class _End:
    """An _End makes the calls that follow an iteration's backwards: each once, in order."""

    def __init__(self) -> None:
        self._next: list[Callable[[], None]] = []

    def then(self, call: Callable[[], None]) -> None:
        self._next.append(call)

    def __call__(self) -> None:
        calls, self._next = self._next, []
        for call in calls:
            call()


def _weighed(native: Callable[[Any], Any] | None, weight: float) -> Callable[[Any], Any]:
    """Wrap Megatron's function that scales losses, `native`: multiply by `weight`, too."""

    def grad_scale_func(loss: Any) -> Any:
        return (loss if native is None else native(loss)) * weight

    return grad_scale_func


def _again() -> bool:
    """Return whether Megatron reruns the last iteration, to see if its results are the same."""
    machine = rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE  # asking for it would make one
    again = rerun_state_machine.RerunState.RERUNNING_IN_PLACE
    return machine is not None and machine.state is again
