"""How the ranks of a data-parallel group vote on their all-reduce."""

from __future__ import annotations

from collections.abc import Callable

from megatron_adaptra.adapt.leader import Leader
from megatron_adaptra.adapt.loop import Loop
from megatron_adaptra.adapt.reductions.remedy import ReductionRemedy
from megatron_adaptra.agree.agreement import Ballot, DecisionStore
from megatron_adaptra.agree.bundle import Bundle
from megatron_adaptra.agree.channel import Channel
from megatron_adaptra.agree.controller import Controller, Member
from megatron_adaptra.agree.reductions import ALL_REDUCE, GroupReduction
from megatron_adaptra.agree.store import KeyValueStore
from megatron_adaptra.transport.base import Transport


def controller_of(
    control: Transport,
    me: int,
    ranks: tuple[int, ...],
    value: GroupReduction,
    timeout: float,
    remedy: Callable[[], ReductionRemedy],
) -> Controller:
    """Make the controller of one rank: a Leader at the first rank, a Member at others.

    Args:
        control: between the group's ranks, for nothing else.
        me: this rank's number in the group.
        ranks: global ranks of the group.
        value: what runs at first.
        timeout: seconds that a decision is waited for.
        remedy: makes the remedy, which chooses all-reduces; called at the leader.
    """
    ballot = Ballot(Bundle({ALL_REDUCE: value}))
    store = DecisionStore(KeyValueStore(f"adaptra/all-reduce/{'-'.join(map(str, ranks))}/"))
    if me:
        return Member(ballot, {0: Channel(control, 0)}, store, timeout)
    channels = {peer: Channel(control, peer) for peer in range(1, len(ranks))}
    return Leader(ballot, channels, store, Loop(remedy()))


def loop_of(controller: Controller) -> Loop[ReductionRemedy] | None:
    """Return the loop that plans all-reduces, at the group's first rank; None at others."""
    return controller.loop if isinstance(controller, Leader) else None
