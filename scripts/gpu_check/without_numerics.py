"""What Megatron needs where kernels compute nothing, over the fake machine."""

from __future__ import annotations

import functools


def allow() -> None:
    """Whatever is left behind is a gradient there, so a square may be less than zero."""
    from megatron.core.optimizer import optimizer

    norm = optimizer.get_grad_norm_fp32
    optimizer.get_grad_norm_fp32 = functools.wraps(norm)(lambda *a, **k: abs(norm(*a, **k)))
