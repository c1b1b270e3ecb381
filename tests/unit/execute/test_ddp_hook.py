"""Gradients of torch's DistributedDataParallel by plan: the example, its losses, and fallbacks."""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch._subclasses import FakeTensorMode
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from transport.ranks import run
from zygote import Zygote

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ddp import _reduce, _State, all_reduce_hook

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "configs/examples/ddp_hook.py"


# In torch 2.13 a rank without a hook may hang in this call, after all else is done (2
# of 10 runs of the example with --native).
LEAVES = """
import os, runpy, sys
import torch.distributed as dist
dist.destroy_process_group = lambda: os._exit(0)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def losses(zygote, folder, *flags):
    """Train the example, whose ranks leave where it would end the process group; its losses."""
    (script := folder / "leaves.py").write_text(LEAVES)
    words = [str(script), str(EXAMPLE), "--late-ms", "5", *flags]
    done = zygote.run(folder, words, ranks=4)
    assert done.status == 0, done.text
    assert "adaptra: no plan is changed" not in done.text, done.text
    return [float(loss) for loss in re.findall(r"loss ([0-9.]+)", done.text)]


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_example_trains_as_torch_does_up_to_the_order_of_summation(tmp_path):
    """By a plan, and with one that is to be found."""
    with Zygote(megatron=False) as made:
        native, *ours = (losses(made, tmp_path, *flags) for flags in (["--native"], [], ["--auto"]))
    assert len(native) == 10
    for one in ours:
        assert one == pytest.approx(native, rel=1e-5)
        assert one[-1] < one[0]


def gradients(me, cases):
    """What each of the cases has given this rank, in the same processes."""
    return [gradient(me, *case) for case in cases]


def gradient(me, dtype, transport, late, algorithm="direct"):
    """Of a model after one backward, this rank's own and the reduced ones, by parameter."""
    torch.manual_seed(7)
    plain = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 3)).to(dtype)
    model = DistributedDataParallel(plain, bucket_cap_mb=0.002)  # several buckets
    hook = all_reduce_hook(algorithm, late_ranks=late, transport=transport)
    model.register_comm_hook(*hook)
    torch.manual_seed(me.rank)
    batch = torch.randn(8, 40).to(dtype)
    own = torch.autograd.grad(plain(batch).abs().sum(), list(plain.parameters()))
    model(batch).abs().sum().backward()
    me.meet()
    reduced = [parameter.grad for parameter in plain.parameters()]
    return [*([one.tolist() for one in each] for each in (own, reduced)), hook[0].native]


DTYPES = ((torch.float32, "engine"), (torch.float32, "gloo"), (torch.bfloat16, "auto"))
LATE = ([], [0], [1, 2])
CASES = [(dtype, transport, late) for dtype, transport in DTYPES for late in LATE]
COMPLEX = (torch.complex64, "gloo", [], "halving-doubling")


@functools.cache
def found():
    """By rank, what each of CASES and COMPLEX has given it."""
    return run("gloo", gradients, [*CASES, COMPLEX], ranks=3)


def test_gradients_are_averages_in_the_order_of_ranks_under_all_shares():
    by_rank = [mine[:-1] for mine in found()]
    for case, *ranks in zip(CASES, *by_rank, strict=True):
        dtype = case[0]
        own = [[torch.tensor(grad, dtype=dtype).float() for grad in rank[0]] for rank in ranks]
        for number, reduced in enumerate(ranks[0][1]):
            mean = ((own[0][number] + own[1][number] + own[2][number]) / 3).to(dtype)
            assert reduced == mean.tolist(), case
            assert all(rank[1] == ranks[0][1] for rank in ranks), case
        first = CASES.index((*case[:2], LATE[0]))
        assert ranks == [rank[first] for rank in by_rank], case


def beside_native(me, dtypes):
    """By dtype, this rank's gradients without a hook, and with one that finds nothing."""
    return [two_iterations(me, dtype) for dtype in dtypes]


def two_iterations(me, dtype):
    torch.manual_seed(7)
    first = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 3)).to(dtype)
    found = []
    for plain in (first, copy.deepcopy(first)):
        model = DistributedDataParallel(plain, bucket_cap_mb=0.002)
        if found:
            model.register_comm_hook(*all_reduce_hook("auto"))
        found.append([])
        for iteration in range(2):
            torch.manual_seed(10 * iteration + me.rank)
            model(torch.randn(8, 40).to(dtype)).abs().sum().backward()
            found[-1].append([parameter.grad.tolist() for parameter in plain.parameters()])
            model.zero_grad()
    return found


def test_while_nothing_is_found_bits_are_those_without_a_hook():
    """Three ranks: a mean over a power of two is exact, however it is formed."""
    dtypes = [torch.float32, torch.bfloat16, torch.float64]
    for mine in run("gloo", beside_native, dtypes, ranks=3):
        for dtype, (native, auto) in zip(dtypes, mine, strict=True):
            assert auto == native, dtype


def test_complex_gradients_come_as_real_numbers():
    ranks = [mine[-1] for mine in found()]
    for number, reduced in enumerate(ranks[0][1]):
        own = [torch.tensor(rank[0][number]) for rank in ranks]
        assert torch.allclose(torch.tensor(reduced), sum(own) / 3, rtol=1e-5)
    assert not any(rank[2] for rank in ranks)  # by plan


def refused(me):
    for words, message in (
        ({"algorithm": "star"}, "it has to be one of ring, halving-doubling, sorted-chain, direct"),
        ({"algorithm": "stragglar"}, "stragglar needs the one rank that is late"),
        ({"late_ranks": [2]}, "ranks are 0 to 1"),
        ({"late_ranks": [0, 1]}, "at least one rank has to own"),
        ({"pieces": -1}, "pieces"),
    ):
        with pytest.raises(BadInput, match=message):
            all_reduce_hook(**words)
    return True


def test_bad_input():
    with pytest.raises(BadInput, match="init_process_group"):
        all_reduce_hook()
    assert all(run("gloo", refused, ranks=2))


class OfDevices(dist.ProcessGroup):
    """One of two ranks, on devices that are not here: both have the same gradients."""

    def __init__(self) -> None:
        super().__init__(0, 2)
        self.seen: list[str] = []

    def allreduce(self, tensors, options):
        self.seen += [str(one.device) for one in tensors]
        future: Future[list[torch.Tensor]] = Future()
        future.set_result([one.mul_(2) for one in tensors])
        return _create_work_from_future(future)


def test_gradients_of_a_gpu_go_the_way_of_torch_which_is_logged_once(capfd):
    """On a device without memory: no plan touches it, and torch's own reduction gets it."""
    group = OfDevices()
    state = _State(None, None, group)  # nothing is connected: no plan can run
    with FakeTensorMode():
        bucket = SimpleNamespace(buffer=lambda: gradients)
        for _ in range(3):
            gradients = torch.ones(6, device="cuda")
            reduced = _reduce(state, bucket).wait()
            assert (reduced.shape, reduced.device.type) == ((6,), "cuda")
    assert group.seen == ["cuda:0"] * 3
    assert capfd.readouterr().err == (
        "adaptra: gradients are torch.float32 on cuda: torch reduces them; plans are for floats "
        "on the CPU\n"
    )
