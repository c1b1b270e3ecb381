"""Numbers in NCCL's variables, read as NCCL reads them: 0x60 and 0140 are 96, too."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from megatron_adaptra.base.errors import BadInput


def value(text: str) -> int | None:
    """Return the whole number that `text` stands for, or None."""
    octal = text.startswith("0") and text.isdecimal()
    with contextlib.suppress(ValueError):
        return int(text, 8 if octal else 0)
    return None


def number(environ: Mapping[str, str], name: str, least: int, most: int, usual: int) -> int:
    """Return the number that `environ` has under `name`; `usual` where it is unset.

    Raises BadInput for any text but a whole number from `least` to `most`.
    """
    text = environ.get(name, "").strip()
    if not text:
        return usual
    found = value(text)
    if found is not None and least <= found <= most:
        return found
    raise BadInput(name, text, f"it has to be a whole number from {least} to {most}")
