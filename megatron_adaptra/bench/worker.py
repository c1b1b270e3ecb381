"""One rank of a measurement. Rank 0 prints what was measured, as the launcher reads it."""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist

from megatron_adaptra.bench import collective, hol, p2p
from megatron_adaptra.bench.options import COLLECTIVE, HOL, P2P, RESULT, Options
from megatron_adaptra.errors import AdaptraError
from megatron_adaptra.log import log_line
from megatron_adaptra.processes import die_with_parent

_ROWS = {P2P: p2p.rows, COLLECTIVE: collective.rows, HOL: hol.rows}


def main(text: str) -> int:
    """Measure; `text`: the options, as `Options.dump` gives them. The exit status."""
    die_with_parent()
    torch.set_num_threads(1)
    options = Options.load(text)
    try:
        dist.init_process_group("gloo")
        rows = _ROWS[options.what](options, dist.get_rank())
    except Exception as error:
        log_line(str(error) if isinstance(error, AdaptraError) else repr(error))
        os._exit(1)  # the others may be stuck in gloo, and so would be our destructors
    if dist.get_rank() == 0:
        print(RESULT + json.dumps(rows), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
