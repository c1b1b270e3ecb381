"""Where a training's sync plans come from: counts that are named, or what finds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from megatron_adaptra.adapter.sync.found_counts import FoundCounts
from megatron_adaptra.config import AdaptraConfig
from megatron_adaptra.errors import BadInput
from megatron_adaptra.ir.sync import SyncPlan, check_counts
from megatron_adaptra.runtime.offer import Offers
from megatron_adaptra.telemetry.host_use import HostUse
from megatron_adaptra.telemetry.replica_row import ReplicaRow


class Source(Protocol):
    """Decides, together with those of all other ranks, what each replica runs.

    A plan that `begin` returns on one rank it returns on all, for the same iteration: their votes
    compare it, and where it differs all replicas run as stock from then on.
    """

    def begin(self, iteration: int, voted: tuple[int, ...] | None) -> SyncPlan:
        """What to run in `iteration`, which is about to begin; each in turn is asked for once.

        `voted`: counts that some rank has given, which all have learned of by their last vote.
        Called when the backwards of the iteration before are over. What it raises ends the shares,
        on all ranks together.
        """
        ...

    def gives(self, iteration: int) -> tuple[HostUse | None, tuple[int, ...] | None]:
        """What this rank puts into the vote at the end of `iteration`, for all others to know.

        How its host is used while it waits for a core, and, at one rank alone, counts that are
        proposed. Goes through the guard.
        """
        ...

    def starts(self, iteration: int) -> None:
        """All ranks have voted on `iteration`, which starts. Goes through the guard."""
        ...

    def ended(self, row: ReplicaRow) -> None:
        """All replicas have run the iteration of a `row`, the same on all ranks.

        It comes in the next iteration, on a GPU one later, without what that took from start to
        start. An iteration may be missing, on all ranks. Goes through the guard.
        """
        ...

    def close(self) -> None:
        """No iteration follows, or those that do have another number of microbatches."""
        ...


# Makes one for so many microbatches per replica, from an iteration on. What has a `close`, too, is
# closed at the end.
NewSource = Callable[[int, int], Source]


class NamedCounts:
    """As Source: the same `plan` all the time."""

    def __init__(self, plan: SyncPlan) -> None:
        self._plan = plan

    def begin(self, iteration: int, voted: tuple[int, ...] | None) -> SyncPlan:
        """The plan, whatever the `iteration`, and whatever was `voted` on."""
        return self._plan

    def gives(self, iteration: int) -> tuple[HostUse | None, tuple[int, ...] | None]:
        """Nothing, in any `iteration`."""
        return None, None

    def starts(self, iteration: int) -> None:
        """Nothing, in any `iteration`."""

    def ended(self, row: ReplicaRow) -> None:
        """Nothing: no `row` changes what is named."""

    def close(self) -> None:
        """Nothing."""


def new_source(
    config: AdaptraConfig,
    replicas: int,
    say: Callable[[str], None],
    offers: Offers | None = None,
) -> NewSource:
    """What makes the source that a job's settings, `config`, ask for.

    `replicas`: how many there are. `say`: logs a sentence, at rank 0. `offers`: of cheaper
    remedies, where counts are found by the ladder; see ShareRemedy.
    """
    counts = config.counts
    if not counts:
        return FoundCounts(config, offers)

    def named(microbatches: int, iteration: int) -> Source:
        try:
            fit(counts, replicas, microbatches)
        except BadInput as error:  # while a batch size ramps up, or where nobody has checked them
            say(f"replicas run {microbatches} microbatches each: {error}")
            return NamedCounts(SyncPlan.full_of(replicas, microbatches))
        return NamedCounts(SyncPlan(microbatches, counts))

    return named


def fit(counts: tuple[int, ...], replicas: int, microbatches: int) -> None:
    """Raise BadInput unless `counts` share out the microbatches of so many `replicas`.

    `microbatches`: of each replica in stock.
    """
    field, given = "--adaptra-sync-counts", ",".join(map(str, counts))
    if len(counts) != replicas:
        words = f"there are {replicas} replicas" if replicas > 1 else "there is 1 replica"
        raise BadInput(field, given, f"{words}: name a count for each")
    total = replicas * microbatches
    if sum(counts) != total:
        allowed = (
            f"they have to add up to the global batch, {total} microbatches "
            f"({replicas} x {microbatches}), not to {sum(counts)}"
        )
        raise BadInput(field, given, allowed)
    check_counts(microbatches, counts)
