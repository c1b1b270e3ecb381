"""A collective plan from a file that a user names."""

from __future__ import annotations

from pathlib import Path

from megatron_adaptra.base.errors import BadFile, BadInput
from megatron_adaptra.base.user_files import read_text
from megatron_adaptra.ir.collective import CollectivePlan


def read_plan(path: str, field: str, names: str, ranks: int | None = None) -> CollectivePlan:
    """The plan in the file at `path`, proven.

    Args:
        path: what the user gave.
        field: the flag or key with which it was given.
        names: what may be given instead of a file, with commas between.
        ranks: for how many it has to be; None for any number.

    Raises:
        BadFile: no such file, or none with a plan for so many ranks.
    """
    if not Path(path).exists():
        raise BadFile(field, path, f"it has to be one of {names}, or a file with a collective plan")
    try:
        return CollectivePlan.parse(read_text(path, field), ranks)
    except BadFile:
        raise
    except BadInput as error:
        raise BadFile(field, path, f"in it, {error}") from None
