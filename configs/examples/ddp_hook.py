"""PyTorch's DistributedDataParallel, without Megatron, with gradients reduced by a plan.

Rank 3 is late in each step: it owns no part of the gradients, so the others have added what they
own when it comes. With --auto nobody names it: it is found, and a plan comes where one saves enough
of a step, which between processes of one machine none does.

    torchrun --nproc-per-node 4 configs/examples/ddp_hook.py
    torchrun --nproc-per-node 4 configs/examples/ddp_hook.py --auto
    torchrun --nproc-per-node 4 configs/examples/ddp_hook.py --native
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from megatron_adaptra.ddp import all_reduce_hook

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--native", action="store_true", help="torch's own all-reduce")
parser.add_argument("--auto", action="store_true", help="find out which rank is late")
parser.add_argument("--late-ms", type=float, default=50, help="what rank 3 is late in each step")
parser.add_argument("--steps", type=int, default=10, help="of training")
args = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
late = [3] if dist.get_world_size() > 3 else []

torch.manual_seed(1)
layers = [torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8)]
model = DistributedDataParallel(torch.nn.Sequential(*layers))
if args.auto:
    model.register_comm_hook(*all_reduce_hook("auto"))
elif not args.native:
    model.register_comm_hook(*all_reduce_hook("direct", late_ranks=late))

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.Generator().manual_seed(rank)
for step in range(args.steps):
    samples = torch.randn(16, 512, generator=data)
    if rank in late:
        time.sleep(args.late_ms / 1e3)
    loss = model(samples).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step}: loss {loss.item():.9f}", flush=True)
dist.destroy_process_group()
