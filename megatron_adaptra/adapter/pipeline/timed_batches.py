"""How long a rank waits for batches."""

from __future__ import annotations

from typing import Any

import wrapt

from megatron_adaptra.adapter.compat.schedule_args import ScheduleArgs
from megatron_adaptra.execute.guarded_probe import GuardedProbe


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
