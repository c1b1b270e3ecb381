"""The collective plan that the setting `--adaptra-allreduce` names the file of."""

from __future__ import annotations

from megatron_adaptra.config import ALLREDUCES
from megatron_adaptra.ir.collective import CollectivePlan
from megatron_adaptra.plan.reductions.read import read_plan


def plan_in_file(allreduce: str, ranks: int | None = None) -> CollectivePlan | None:
    """The plan that the setting `allreduce` names the file of; None where it names a builder.

    `ranks`: for how many it has to be; None for any number. Raises BadFile.
    """
    if allreduce in ALLREDUCES:
        return None
    return read_plan(allreduce, "--adaptra-allreduce", ", ".join(ALLREDUCES), ranks)
