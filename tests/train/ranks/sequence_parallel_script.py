"""Two tensor-parallel ranks: linear layers give the same gradients when backwards run in halves.

With sequence parallelism, too: whole models of Megatron's need a LayerNorm for it that no CPU has.
"""

from __future__ import annotations

import torch

from megatron_adaptra.adapter.baseline import cpu

cpu.install()

import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state as mpu  # noqa: E402
from megatron.core.model_parallel_config import ModelParallelConfig  # noqa: E402
from megatron.core.tensor_parallel import layers  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402

from megatron_adaptra.adapter.pipeline.split import SplitBackward, filling_order  # noqa: E402


class TwoLayers(torch.nn.Module):
    def __init__(self, config: ModelParallelConfig, bias: bool) -> None:
        super().__init__()
        init = torch.nn.init.xavier_normal_
        more = {"config": config, "init_method": init, "skip_bias_add": False, "bias": bias}
        # In another order than forwards use them, as in Megatron's attention.
        self.down = layers.RowParallelLinear(32, 16, input_is_parallel=True, **more)
        self.up = layers.ColumnParallelLinear(16, 32, gather_output=False, **more)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x)[0]))[0]


def main() -> None:
    dist.init_process_group("gloo")
    mpu.initialize_model_parallel(tensor_model_parallel_size=2)
    model_parallel_cuda_manual_seed(1)
    for sequence in (True, False):
        for bias in (True, False):
            config = ModelParallelConfig(
                tensor_model_parallel_size=2, sequence_parallel=sequence, params_dtype=torch.float32
            )
            model = TwoLayers(config, bias)
            # Two microbatches at once: what is put aside must not be overwritten by the second.
            inputs = [torch.randn(8, 2, 16, requires_grad=True) for _ in range(2)]
            gradients = [torch.randn(8, 2, 16) for _ in range(2)]
            whole = []
            with filling_order([model]) as order:
                for x, gradient in zip(inputs, gradients, strict=True):
                    model(x).backward(gradient)
                    whole.append(x.grad)
                    x.grad = None
            split = SplitBackward(model, order)
            expected = [p.grad.clone() for p in model.parameters()]
            model.zero_grad()
            asides = []
            for x, gradient, want in zip(inputs, gradients, whole, strict=True):
                got, aside = split.backward_input(x, model(x), gradient, ())
                assert torch.equal(got, want), (sequence, bias)
                assert all(p.grad is None for p in model.parameters())
                asides.append(aside)
            with filling_order([model]) as halves:
                for aside in asides:
                    split.backward_weight(aside, together=not sequence)
            if sequence:  # one after the other, as where data-parallel buckets are reduced
                assert list(halves) == list(order), bias
            for p, want in zip(model.parameters(), expected, strict=True):
                assert torch.equal(p.grad, want), (sequence, bias)
    print("good", flush=True)
    dist.destroy_process_group()


main()
