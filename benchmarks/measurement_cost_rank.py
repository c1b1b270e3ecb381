"""One rank of measurement_cost.py: the tests' training, measured in every second block.

With MEASUREMENT_OF=probes all blocks are measured, but links are probed in every second one only.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.training import training

from megatron_adaptra.adapter.pipeline.session import Session
from megatron_adaptra.measure.link_probe import LinkProbes

PROGRAM = (
    Path(__file__).resolve().parents[1] / "tests" / "train" / "ranks" / "pretrain_gpt_small.py"
)
BLOCK = int(os.environ["MEASUREMENT_BLOCK"])
PROBES = os.environ["MEASUREMENT_OF"] == "probes"
measured, step, exchange = Session.forward_backward, training.train_step, LinkProbes.exchange
sessions: list[Session] = []
count = calls = 0


def now_and_then(session: Session, function: Any, arguments: Any) -> Any:
    """Without the plugin in every first block: Megatron's function, torch's collectives."""
    if not sessions:
        sessions.append(session)
    collectives = session.small_collectives
    if PROBES or is_measured() or collectives is None:
        return measured(session, function, arguments)
    return function(**arguments)


def is_measured() -> bool:
    return count // BLOCK % 2 == 1


def probed(probes: LinkProbes, messages: float = 0.0) -> None:
    """By calls, of which all ranks have equally many, and not by `count`: on another thread."""
    global calls
    if not PROBES or calls // (2 * BLOCK) % 2 == 1:  # two per iteration
        exchange(probes, messages)
    calls += 1


@functools.wraps(step)
def timed(*args: Any, **kwargs: Any) -> Any:
    global count
    collectives = sessions[0].small_collectives if sessions else None
    ours = {name: getattr(dist, name) for name in ("all_reduce", "broadcast", "barrier")}
    if collectives is not None and not (PROBES or is_measured()):
        for name, function in collectives._native.items():
            setattr(dist, name, function)
    began, spent = time.monotonic(), time.process_time()
    result = step(*args, **kwargs)
    seconds, cpu = time.monotonic() - began, time.process_time() - spent
    for name, function in ours.items():
        setattr(dist, name, function)
    if os.environ["RANK"] == "0":
        os.write(1, f"MEASURED {count} {int(is_measured())} {seconds} {cpu}\n".encode())
    count += 1
    return result


Session.forward_backward = now_and_then
LinkProbes.exchange = probed
training.train_step = timed
sys.path.insert(0, str(PROGRAM.parent))
runpy.run_path(str(PROGRAM), run_name="__main__")
