"""What all ranks of a job vote on: how many microbatches each data-parallel replica runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_adaptra.errors import BadBundle, BadInput
from megatron_adaptra.ir.sync import SyncPlan, parse_sync
from megatron_adaptra.runtime.bundle import ValueKind


@dataclass(frozen=True)
class JobSync:
    """`plan`: what runs, where iterations have its number of microbatches; else all run as many."""

    plan: SyncPlan

    def to_json(self) -> Any:
        """As for Value."""
        return self.plan.text()

    @classmethod
    def from_json(cls, data: object) -> JobSync:
        """What `to_json` has made of a value: `data`, read from JSON. Raises BadInput."""
        if not isinstance(data, str):
            raise BadInput("shares of microbatches", data, "a text")
        return cls(parse_sync(data))


def _check_sync(value: JobSync, now: JobSync) -> None:
    """Of as many replicas; that each sample counts once is proven where a plan is made."""
    if value.plan.replicas != now.plan.replicas:
        raise BadBundle(f"it is for {value.plan.replicas} replicas; here are {now.plan.replicas}")


SYNC = ValueKind("sync", JobSync.from_json, _check_sync)
