"""A rank agrees to a plan that sends its GPU's messages by us once memory is pinned for them.

Where one rank's driver pins none, no rank runs the plan: the vote ends with no, and all ranks stay
with Megatron's own messages, or with the plan in force.
"""

from __future__ import annotations

from megatron_adaptra.agree.agreement import Ballot, Proposal
from megatron_adaptra.agree.bundle import SCHEDULE
from megatron_adaptra.base.errors import DeviceFailed
from megatron_adaptra.device.staging import Staging
from megatron_adaptra.ir.program import Program, lower
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.measure.estimate import SPARE


def messages_at_once(program: Program, worker: int) -> int:
    """Return how many messages `worker` keeps memory for: receives posted, or not yet taken."""
    own = [n for link, n in program.ahead.items() if worker in link]
    return SPARE + sum(max(1, n) for n in own)


def pin_first(
    staging: Staging, name: str, worker: int, ahead: int | None, nbytes: int, proposal: Proposal
) -> None:
    """Pin the memory that the schedule of a `proposal` needs, until its swap.

    Waits for the driver. Raises DeviceFailed where the driver pins less.

    Args:
        staging: of this rank's GPU.
        name: of this rank, for errors.
        worker: its number.
        ahead: as for `lower`.
        nbytes: of a message.
        proposal: to which this rank has not agreed yet.
    """
    schedule = proposal.bundle.values.get(SCHEDULE)
    if not isinstance(schedule, Schedule) or schedule.stock:
        return
    count = messages_at_once(lower(schedule, ahead), worker)
    if why := staging.reserve(nbytes, count, proposal.swap):
        raise DeviceFailed(f"{name} cannot pin memory for its GPU's messages: {why}")


def waits_for_vote(staging: Staging, ballot: Ballot, iteration: int) -> bool:
    """Return whether a proposal may need what `staging` has pinned, as late as this `iteration`."""
    return iteration <= staging.reserved and not ballot.refuses(staging.reserved)
