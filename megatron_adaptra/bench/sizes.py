"""Sizes of messages, and bus bandwidths, as people write them, and as nccl-tests has them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.base.units import parse_bytes, whole

LARGEST = 1 << 30  # bytes of a message
_ALLOWED = "it has to be a whole number of bytes such as 8, 1K, 256M or 4KiB"
SEND, ALL_REDUCE, ALL_GATHER = "send", "all_reduce", "all_gather"
_SHORT = re.compile(r"([0-9]{1,18})([kmg]?)", re.ASCII | re.IGNORECASE)
_POWERS = {"": 0, "k": 10, "m": 20, "g": 30}  # of two


def size_of(text: str, flag: str) -> int:
    """Return the bytes in `text`: 1K is 1024, as for nccl-tests; also 4KiB or 1MB.

    Raises BadInput, which names the `flag`.
    """
    if match := _SHORT.fullmatch(text.strip()):
        return int(match[1]) << _POWERS[match[2].lower()]
    nbytes = parse_bytes(text, flag, _ALLOWED)
    if nbytes % 1:
        raise BadInput(flag, text, _ALLOWED)
    return int(nbytes)


def sizes_of(text: str, flag: str) -> tuple[int, ...]:
    """Return the sizes that `text` lists between commas, each once; BadInput names the `flag`."""
    return tuple(dict.fromkeys(size_of(word, flag) for word in text.split(",")))


def sizes_between(
    begin: str | None, end: str | None, factor: str | None, usual: Sequence[int], least: int
) -> tuple[int, ...]:
    """Return `begin` and each size that is `factor` times the one before, up to `end`.

    None is the first or last of the `usual` sizes, and a `factor` of 2. `least`: bytes of the
    first. Raises BadInput with -b, -e or -f.
    """
    first = usual[0] if begin is None else size_of(begin, "-b")
    if not least <= first <= LARGEST:
        raise BadInput("-b", begin, f"it has to be {least} to {LARGEST} bytes")
    last = max(usual[-1], first) if end is None else size_of(end, "-e")
    if not first <= last <= LARGEST:
        raise BadInput("-e", end, f"it has to be from -b ({first}) to {LARGEST} bytes")
    times = 2
    if factor is not None:
        try:
            times = whole(factor)
        except ValueError:
            times = 0
        if times < 2:
            raise BadInput("-f", factor, "it has to be a whole number of at least 2")
    sizes = []
    while first <= last:
        sizes.append(first)
        first *= times
    return tuple(sizes)


def busbw(operation: str, nbytes: int, seconds: float, ranks: int = 2) -> float:
    """GB/s of an `operation` over `ranks` that takes `seconds`; `nbytes`: what one rank gives.

    This is the bus bandwidth of nccl-tests (its doc/PERFORMANCE.md). Unlike bytes by time it
    does not depend on the number of ranks, so that it can be compared with what the hardware can
    do. S is the size of the larger of input and output, t the time, n the ranks:

        send and receive   S / t
        all-reduce         S / t * 2 (n - 1) / n
        all-gather         S / t * (n - 1) / n, where S is what all n ranks have given
    """
    share = {SEND: 1.0, ALL_REDUCE: 2 * (ranks - 1) / ranks, ALL_GATHER: float(ranks - 1)}
    return share[operation] * nbytes / seconds / 1e9
