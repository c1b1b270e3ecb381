"""The shape of the GPT in gpt.py, without its imports: tests list shapes without Megatron."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GPTShape:
    """A shape describes a GPT and how it is trained.

    `layers`: of all `stages` together. `microbatches`: per iteration, of one sequence each.
    `chunks`: of the model, per stage; `overlapped`: their messages overlap. `tied`: the embedding's
    weights are the output layer's, too. `fused`: a kernel adds weight gradients to the main ones.
    `experts`: in every layer, 0 for a dense model; each of `expert_parallel` ranks has a part of
    them. `average`: the collective averages, instead of factors. `instances`: of the distributed
    optimizer, each with all shards. `overlap_reduce`: gradients are reduced in buckets of `bucket`
    numbers during the last backward. `distributed_optimizer`: so they are with that optimizer, and
    all stages start at the same moment; with `after_backward`, all of a stage's gradients go at
    once instead. `overlap_gather`: each bucket's parameters are gathered during the forward before
    the one that needs them.
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
        """True where buckets are reduced during the last backward."""
        return self.overlap_reduce or (self.distributed_optimizer and not self.after_backward)
