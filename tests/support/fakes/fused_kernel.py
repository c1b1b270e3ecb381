"""The kernel that adds weight gradients to the main ones, for machines without a GPU.

Megatron imports `fused_weight_gradient_mlp_cuda` where apex has built it. This one does the same.
"""

from __future__ import annotations

import sys
import types

import torch


def install() -> None:
    """Before anything imports Megatron; nothing where the real one is."""
    module = types.ModuleType("fused_weight_gradient_mlp_cuda")
    vars(module)["wgrad_gemm_accum_fp32"] = _accumulate
    vars(module)["wgrad_gemm_accum_fp16"] = _accumulate
    sys.modules.setdefault(module.__name__, module)


def _accumulate(received: torch.Tensor, gradient: torch.Tensor, main: torch.Tensor) -> None:
    main.add_(gradient.t().matmul(received).to(main.dtype))
