"""Whether a program runs: a cycle search in a graph of its ops, built without `ir.deps`."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

from megatron_adaptra.ir.program import Program

Node = tuple[int, int]  # worker, index
Mine = tuple[int, int, int | None]  # position, microbatch, home


def runs(program: Program, sends: str) -> bool:
    """Whether the graph of `program` has no cycle, under `sends` of one kind."""
    workers, stages = len(program.order), len(program.order) // program.replicas
    last = stages * program.chunks - 1
    # By kind, position, microbatch and home, wherever in the replicas that is.
    at: dict[tuple[str, Mine], Node] = {}
    for worker in range(workers):
        for i, op in enumerate(program.order[worker]):
            x = op.chunk * stages + worker % stages
            at[op.kind.value, (x, op.microbatch, op.home)] = worker, i

    def backward(mine: Mine) -> Node:
        return at.get(("B", mine)) or at["I", mine]

    graph: dict[Node, set[Node]] = {}
    for worker in range(workers):
        for i, op in enumerate(program.order[worker]):
            x = op.chunk * stages + worker % stages
            mine, above, below = ((y, op.microbatch, op.home) for y in (x, x - 1, x + 1))
            after = {(worker, i - 1)} if i else set()
            kind = op.kind.value
            if kind == "W":
                after.add(at["I", mine])
            if kind in "BIR":
                own = "R" if kind != "R" and ("R", mine) in at else "F"
                after.add(at[own, mine])
            if kind == "F" and x > 0:
                made = at["F", above]
                after |= {made} if made[0] == worker else {at["SF", above], at["PF", mine]}
            if kind in "BI" and x < last:
                made = backward(below)
                after |= {made} if made[0] == worker else {at["SB", below], at["PB", mine]}
            if kind == "SF":
                after.add(at["F", mine])
            if kind == "SB":
                after.add(backward(mine))
            if sends == "rendezvous" and kind in ("SF", "SB"):
                after.add(at["PF", below] if kind == "SF" else at["PB", above])
            graph[worker, i] = after
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError:
        return False
    return True
