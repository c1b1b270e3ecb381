"""What an optimizer step returns, agreed across stages in one exchange instead of one each.

After the step Megatron all-reduces, one after the other over the model-parallel group: whether it
was successful, the gradient norm, and, if that is logged, the number of zeros. All are known when
the step returns, so the exchange for the first carries the others along.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

_NONE = -1.0  # Megatron's word for a rank without such a value


def announce(optimizer: Any, session: Any) -> Callable[[], None]:
    """Make `optimizer.step` announce what Megatron is going to reduce; returns the undoing."""
    from megatron.training import get_args

    if optimizer is None:  # nothing is trained
        return lambda: None
    before = vars(optimizer).get("step")
    step, zeros = optimizer.step, bool(get_args().log_num_zeros_in_grad)

    @functools.wraps(step)
    def stepped(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        if session.post is not None and session.post.combined:
            return result  # it has told the others already
        if session.tail is not None and isinstance(result, tuple) and len(result) == 3:
            values = [_NONE if value is None else float(value) for value in result[1 : 2 + zeros]]
            tensors = [torch.tensor([value], dtype=torch.float32) for value in values]
            group = mpu.get_model_parallel_group()
            session.tail.announce([(tensor, dist.ReduceOp.MAX) for tensor in tensors], group)
        return result

    def undo() -> None:
        if vars(optimizer).get("step") is stepped:
            del optimizer.step
            if before is not None:
                optimizer.step = before

    optimizer.step = stepped
    return undo
