"""How many batches each forward of an iteration reads."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from megatron_adaptra.adapter.compat.schedule_args import ScheduleArgs, only


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
