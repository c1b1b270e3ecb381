"""The collective plan that the setting `--adaptra-allreduce` names the file of."""

from __future__ import annotations

from pathlib import Path

from megatron_adaptra.base.errors import BadFile, BadInput
from megatron_adaptra.base.user_files import read_text
from megatron_adaptra.config import ALLREDUCES
from megatron_adaptra.ir.collective import CollectivePlan

_FIELD = "--adaptra-allreduce"


def plan_in_file(allreduce: str, ranks: int | None = None) -> CollectivePlan | None:
    """The plan that the setting `allreduce` names the file of, proven; None for a builder's name.

    `ranks`: for how many it has to be; None for any number. Raises BadFile.
    """
    if allreduce in ALLREDUCES:
        return None
    if not Path(allreduce).exists():
        names = ", ".join(ALLREDUCES)
        allowed = f"it has to be one of {names}, or a file with a collective plan"
        raise BadFile(_FIELD, allreduce, allowed)
    try:
        return CollectivePlan.parse(read_text(allreduce, _FIELD), ranks)
    except BadFile:
        raise
    except BadInput as error:
        raise BadFile(_FIELD, allreduce, f"in it, {error}") from None
