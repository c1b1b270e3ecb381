"""One rank of a measurement. Rank 0 prints what was measured, as the launcher reads it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_adaptra.base.errors import AdaptraError
from megatron_adaptra.base.log import log_line
from megatron_adaptra.base.processes import die_with_parent
from megatron_adaptra.bench import collective, hol, p2p
from megatron_adaptra.bench.options import COLLECTIVE, HOL, P2P, RESULT, Options

_ROWS: dict[str, Callable[[Options, int], list[dict[str, Any]]]] = {
    P2P: p2p.rows,
    COLLECTIVE: collective.rows,
    HOL: hol.rows,
}


def main(text: str) -> int:
    """Measure; `text`: the options, as `Options.dump` gives them. The exit status."""
    rows = measure_as_rank(Options.load(text))
    if rows is not None:
        print(RESULT + json.dumps(rows), flush=True)
    return 0


def measure_as_rank(options: Options) -> list[dict[str, Any]] | None:
    """The rows on rank 0, None on the others; RANK and the rest are those of torchrun.

    Collective: ends when all ranks have measured. A failure ends the process with one line.
    """
    die_with_parent()
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        rows = _ROWS[options.what](options, rank)
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:
        log_line(str(error) if isinstance(error, AdaptraError) else repr(error))
        os._exit(1)  # the others may be stuck in gloo, and so would be our destructors
    return None if rank else rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
