"""Run a training script, and write what it asks of its process groups, iteration by iteration.

FOLDER SCRIPT...: rank R writes FOLDER/calls-R.json, by iteration a list of calls: the function, the
ranks of the group, the number of values, and the peer. Groups made after the first iteration has
begun are not Megatron's. Before iteration I rank 0 writes to FOLDER/act what FOLDER/switch.json has
for I.
"""

import json
import os
import runpy
import sys
from pathlib import Path

import torch
import torch.distributed as dist

NAMES = (
    "allreduce", "allgather", "_allgather_base", "broadcast", "barrier", "reduce_scatter",
    "_reduce_scatter_base", "send", "recv",
)  # fmt: skip


def main():
    _, folder, *sys.argv = sys.argv
    folder = Path(folder)
    from megatron.training import training

    switch = json.loads((folder / "switch.json").read_text())
    iterations, groups, rank = [], set(), int(os.environ["RANK"])

    def noting(name, function):
        def call(group, *words, **named):
            if iterations and group.group_name in groups:
                given = words[0] if words and name != "barrier" else []
                tensors = given if isinstance(given, list) else [given]
                count = sum(t.numel() for t in tensors if isinstance(t, torch.Tensor))
                peer = words[1] if name in ("send", "recv") else None
                ranks = dist.get_process_group_ranks(group)
                iterations[-1].append([name, ranks, count, peer])
            return function(group, *words, **named)

        return call

    for name in NAMES:
        setattr(dist.ProcessGroup, name, noting(name, getattr(dist.ProcessGroup, name)))
    step = training.train_step

    def train_step(*words, **named):
        if not iterations:
            groups.update(group.group_name for group in dist.distributed_c10d._world.pg_map)
        number = str(len(iterations))
        if rank == 0 and number in switch:
            (folder / "act").write_text(switch[number])
        iterations.append([])
        return step(*words, **named)

    training.train_step = train_step
    runpy.run_path(sys.argv[0], run_name="__main__")
    (folder / f"calls-{rank}.json").write_text(json.dumps(iterations))


if __name__ == "__main__":
    main()
