"""The shape of the GPT in gpt.py, without its imports: tests list shapes without Megatron."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GPTShape:
    """What is trained: `layers` over `stages`, `microbatches` of one sequence per iteration.

    `chunks`: model chunks per stage; `overlapped`: their messages overlap. `tied`: the embedding's
    weights are the output layer's, too; `fused`: weight gradients are added to the main ones by a
    kernel; `experts`: of a mixture in every layer, 0 for a dense model, of which `expert_parallel`
    ranks have a part each. `average`: the collective averages, instead of factors. `instances` of
    the distributed optimizer, each with all shards. `overlap_reduce`: gradients are reduced bucket
    by bucket, each of so many numbers as `bucket`, during the last backward;
    `distributed_optimizer`: with that, all stages starting at the same moment, or `after_backward`,
    all of a stage's gradients at once; `overlap_gather`: each bucket's parameters are gathered
    during the forward before the one that needs them.
    """

    stages: int = 4
    chunks: int = 1
    overlapped: bool = False
    tensor_parallel: int = 1
    microbatches: int = 12
    layers: int = 4
    hidden: int = 64
    heads: int = 4
    seq_length: int = 64
    dropout: float = 0.1
    precision: str = "fp32"
    tied: bool = True
    fused: bool = False
    experts: int = 0
    expert_parallel: int = 1
    average: bool = False
    instances: int = 1
    overlap_reduce: bool = False
    distributed_optimizer: bool = False
    after_backward: bool = False
    overlap_gather: bool = False
    bucket: int = 10_000
    seed: int = 1234

    @property
    def overlaps_reductions(self) -> bool:
        """Whether buckets are reduced during the last backward."""
        return self.overlap_reduce or (self.distributed_optimizer and not self.after_backward)
