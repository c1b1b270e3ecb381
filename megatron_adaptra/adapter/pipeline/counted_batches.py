"""How many batches each forward of an iteration reads, and how long a rank waits for them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import wrapt

from megatron_adaptra.adapter.compat.schedule_args import ScheduleArgs, only
from megatron_adaptra.execute.guarded_probe import GuardedProbe


class CountedBatches:
    """Megatron's `iterator`, and how many batches each forward of an iteration reads: `reads`.

    It has what the iterator has, `counted`, by which batches of other replicas may be read.
    """

    def __init__(self, iterator: Any) -> None:
        self.counted, self.reads = iterator, list[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.counted, name)

    def forward_begins(self) -> None:
        """Before each forward."""
        self.reads.append(0)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.reads:
            self.reads[-1] += 1
        return next(self.counted)

    def why_not(self) -> str:
        """Why batches are no microbatches, or an empty string."""
        if set(self.reads) in ({0}, {1}):
            return ""
        return f"a forward reads {' or '.join(map(str, sorted(set(self.reads))))} batches, not one"


def counted(arguments: ScheduleArgs) -> tuple[ScheduleArgs, CountedBatches | None]:
    """The same `arguments` of Megatron's schedule, of one chunk, with the batches counted.

    None where this rank reads nothing.
    """
    given, forward_step = arguments["data_iterator"], arguments["forward_step_func"]
    if (iterator := only(given)) is None:
        return arguments, None
    batches = CountedBatches(iterator)

    @functools.wraps(forward_step)
    def counting(*args: Any, **kwargs: Any) -> Any:
        batches.forward_begins()
        return forward_step(*args, **kwargs)

    data = {"data_iterator": like(given, batches), "forward_step_func": counting}
    return {**arguments, **data}, batches


def like(given: Any, iterator: Any) -> Any:
    """An `iterator` in a list where the one that was `given` is in one."""
    return [iterator] if isinstance(given, list) else iterator


class TimedBatches(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """A timed iterator looks like Megatron's `iterator`; its `probe` notes waits for batches."""

    def __init__(self, iterator: Any, probe: GuardedProbe) -> None:
        super().__init__(iterator)
        self._self_probe = probe

    def __iter__(self) -> TimedBatches:
        return self

    def __next__(self) -> Any:
        self._self_probe.loads()
        try:
            return next(self.__wrapped__)
        finally:
            self._self_probe.loaded()


def timed(arguments: ScheduleArgs, probe: GuardedProbe) -> ScheduleArgs:
    """Return the `arguments` of Megatron's schedule with its iterators timed, by the `probe`.

    There is one, or a list of one per chunk. Whatever else a script hands over stays as it is.
    """
    given = arguments.get("data_iterator")
    each = given if isinstance(given, list) else [given]
    made = [TimedBatches(one, probe) if hasattr(type(one), "__next__") else one for one in each]
    return {**arguments, "data_iterator": made if isinstance(given, list) else made[0]}
