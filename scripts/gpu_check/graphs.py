"""Part `graphs`: layers run as CUDA graphs, and messages change their way: the bits of stock.

A graph puts its output where it has put the one before, so a message is copied before it is sent.
Stock and ours, with the same graphs, a pipeline of four stages. Megatron's own graphs of layers
(`--cuda-graph-impl local`) need no Transformer Engine; their outputs are views, which Megatron
refuses to free once they are sent, so what is sent is kept in both trainings.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from gpu_check.ranks import Deadline
from gpu_check.result import Result
from gpu_check.target import GPU, Target
from gpu_check.trainings import same_bits, train, why_not


def run(found: Result, target: Target, work: Path, deadline: Deadline, options: Any) -> None:
    if why := why_not(target):
        found.why_not = why
        return
    plant = "uncopied" if options.plant else ""
    stock = train(target, work, deadline, options, plugin=False, graphs=True)
    ours = train(target, work, deadline, options, plugin=True, plant=plant, graphs=True)
    if not target.nccl(ours.plan.stages):
        found.left_out.append("NCCL, which refuses two ranks on one GPU: Megatron's messages go by "
                              "gloo, through the host")  # fmt: skip
    over = [i for i, engine in enumerate(ours.ours) if engine]
    found.check(bool(over), "no iteration's messages went over the engine")
    if target.kind == GPU:
        same_bits(found, "layers as CUDA graphs", stock, ours)
    else:
        found.left_out.append("bits: the fake's kernels compute nothing")
        copied = all(rank["rows"][i]["clones"] for rank in ours.ranks for i in over)
        found.check(copied, "outputs of graphs are sent from where the next replay writes")
    plan = ours.plan
    slow = median(stock.ms[plan.begin + 1 : plan.end])
    hidden = [ours.ms[i] for i in over if plan.begin <= i < plan.end]
    took = f"{median(hidden[-4:]):.0f} ms" if hidden else "-"
    found.figures.append(
        f"{len(ours.ms)} iterations, {len(over)} over the engine; {options.delay:g} ms on a link: "
        f"stock {slow:.0f} ms, ours {took}"
    )
