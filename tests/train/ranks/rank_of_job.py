"""How scripts of this folder begin as a rank of a job, and show what all ranks have found.

Import it after `cpu.install()`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_adaptra.adapter.baseline import gpt


def begin(folder: Path) -> Path:
    """Join the job over gloo; a dataset's prefix in `folder`, which rank 0 writes."""
    dist.init_process_group("gloo")
    prefix = folder / "data" / "text"
    if dist.get_rank() == 0:
        gpt.write_dataset(None, prefix.parent, limit=200_000)
    dist.barrier()
    return prefix


def states(arm: gpt.Arm) -> str:
    """The SHA-256 of the random states after the last iteration of `arm`."""
    cpu, device, tracked = arm.random
    sha = hashlib.sha256()
    for state in (cpu, device, *(tracked[name] for name in sorted(tracked))):
        sha.update(state.cpu().numpy().tobytes())
    return sha.hexdigest()


def of_all_ranks(found: Any) -> list[Any]:
    """What each rank has found; all ranks ask."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    return gathered


def mean_losses(losses: list[list[float]]) -> list[float]:
    """By iteration, the mean over all ranks of the `losses` that each has for it; all ranks ask."""
    by_iteration = zip(*of_all_ranks(losses), strict=True)
    every = [[one for of_rank in ranks for one in of_rank] for ranks in by_iteration]
    return [sum(each) / len(each) for each in every]


def show(word: str, found: Any) -> None:
    """Rank 0 prints it as JSON, in a line that begins with `word`."""
    if dist.get_rank() == 0:
        print(f"{word} {json.dumps(found)}", flush=True)
