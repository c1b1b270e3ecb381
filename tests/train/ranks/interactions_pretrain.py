"""pretrain_gpt_small.py with a layer that meets the ranks of other replicas, for a matrix of cases.

Beside the layer (--user-layer): the number of tokens that count differs from sample to sample; the
tensor ranks of a stage get their data from the first of them, as in Megatron's own script; a loss
that is no number, and one that is large, is validated, as there. The end prints a digest of the
parameters. A rank that runs no forward for HANGS_AFTER seconds prints where it stands; later, when
the others have done so, too, it ends with status HANGS.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
import traceback
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pretrain_gpt_small as small
import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.training import get_args
from torch.utils.checkpoint import checkpoint

# What the layer adds up over replicas: numbers in a forward and in a backward; 0: nothing.
LAYERS = {
    "none": (0, 0),
    "other lengths": (4, 6),
    "equal lengths": (4, 4),
    "backward": (0, 4),
    "recomputed": (4, 0),
    "now and then": (4, 6),
    "late": (4, 0),
}
LATE = 20  # iterations before the late one  # fmt: skip
PARTS: list[Any] = []
HANGS, GRACE = 97, 15.0  # seconds that the ranks' last forwards may be apart


def flags(parser: ArgumentParser) -> ArgumentParser:
    small.flags(parser).add_argument("--user-layer", default="none", choices=LAYERS)
    return parser


def factor(values: torch.Tensor, numbers: int) -> torch.Tensor | float:
    """What the values of all replicas are scaled by: as FP8 does it, by the largest of them.

    Another result of the collective is another loss, so that no mixed-up one goes unseen.
    """
    args = get_args()
    if not numbers or (args.user_layer == "now and then" and args.curr_iteration % 3 < 2):
        return 1.0
    if args.user_layer == "late" and args.curr_iteration < LATE:
        return 1.0
    most = values.detach().abs().amax().float().repeat(numbers)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=mpu.get_data_parallel_group())
    return 1 + most[0] / (1 + most[0]) / 8


class Meeting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, forwards: int, backwards: int) -> torch.Tensor:
        ctx.backwards = backwards
        return (hidden * factor(hidden, forwards)).to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return (gradient * factor(gradient, ctx.backwards)).to(gradient.dtype), None, None


def only_again(hidden: torch.Tensor) -> torch.Tensor:
    """In a checkpointed region: meets when it is computed again, as Megatron's router does."""
    numbers = LAYERS[get_args().user_layer][0] if torch.is_grad_enabled() else 0
    return Meeting.apply(hidden, numbers, 0)


def after_layer(module: Any, _inputs: Any, output: Any) -> Any:
    hidden, *rest = output
    if get_args().user_layer != "recomputed":
        return Meeting.apply(hidden, *LAYERS[get_args().user_layer]), *rest
    if torch.is_grad_enabled():
        module.forwards = getattr(module, "forwards", 0) + 1
        if module.forwards % 2 == 0:  # so that not each microbatch has a checkpoint
            hidden = checkpoint(only_again, hidden, use_reentrant=True)
    return hidden, *rest


def model(*args: Any, **kwargs: Any) -> Any:
    part = small.model(*args, **kwargs)
    if get_args().user_layer != "none":
        part.decoder.layers[0].register_forward_hook(after_layer)
    PARTS.append(part)
    return part


def of_the_first(batches: Any) -> Any:
    """The next batch of the first tensor rank of this stage."""
    group = mpu.get_tensor_model_parallel_group()
    box = [next(batches) if mpu.get_tensor_model_parallel_rank() == 0 else None]
    if group.size() > 1:
        dist.broadcast_object_list(box, mpu.get_tensor_model_parallel_src_rank(), group)
    (batch,) = box
    left_out = int(batch["tokens"][0, 0]) % (get_args().seq_length // 2)
    batch["loss_mask"][:, :left_out] = 0
    return batch


class Watch:
    """A thread that ends this rank where its training stands still."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self.last = seconds, float("inf")  # until the first forward
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while time.monotonic() < self.last + self._seconds:
            time.sleep(1.0)
        frame = sys._current_frames()[threading.main_thread().ident]
        frames = reversed(traceback.extract_stack(frame)[-8:])
        where = (f"{Path(one.filename).stem}:{one.lineno} {one.name}" for one in frames)
        print(f"\nSTANDS {' < '.join(where)}", flush=True)
        time.sleep(GRACE)
        os._exit(HANGS)


class OfTheFirst:
    def __init__(self, batches: Any) -> None:
        self._batches = batches

    def __next__(self) -> Any:
        return of_the_first(self._batches)


def forward_step(batches: Any, part: Any, *more: Any) -> Any:
    WATCH.last = time.monotonic()
    output, loss = small.forward_step(OfTheFirst(batches), part, *more)

    def validated(losses: torch.Tensor) -> Any:
        total, *rest = loss(losses)
        machine = get_rerun_state_machine()
        for reject, message, fatal in (
            (torch.isnan, "found NaN in local forward loss calculation", True),
            (lambda value: value > 1e9, "Spiky loss", False),
        ):
            machine.validate_result(
                result=total, rejection_func=reject, message=message, fatal=fatal, tolerance=0.0
            )
        return total, *rest

    return output, validated


if __name__ == "__main__":
    WATCH = Watch(float(os.environ["HANGS_AFTER"]))
    small.main(flags, model, forward_step)
    digest = hashlib.sha256()
    for part in PARTS:
        for parameter in part.parameters():
            digest.update(parameter.detach().float().numpy().tobytes())
    print(f"parameters: {digest.hexdigest()}", flush=True)
