"""Run a training script in which loaders are slow, or ranks collect garbage or come late, at times.

RULES SCRIPT...: rules such as loader:1:30ms@6..18,garbage:turns:40ms@30..42,late:3:160ms@50..60,
from the first iteration up to, not including, the second one, from 0. A loader takes so much longer
for each sample. Garbage is collected for so long in an iteration, by one rank, by `all`, or by one
after another (`turns`). Late are a rank's gradients. A forward takes at least so long: beside it
the clock of a core, which rises and falls, is small.
"""

import gc
import re
import runpy
import sys
import time

RULE = re.compile(r"(loader|garbage|late|forward):(\d+|all|turns):(\d+)ms@(\d+)\.\.(\d+)")


def main():
    import torch.distributed as dist
    import wrapt

    import megatron_adaptra

    _, rules, *sys.argv = sys.argv
    found = [RULE.fullmatch(rule).groups() for rule in rules.split(",") if rule]
    megatron_adaptra.register()
    from megatron.training import get_args

    def seconds(kind):
        """Return by how many seconds it is slow now, here."""
        now, rank = getattr(get_args(), "curr_iteration", -1), dist.get_rank()
        turn = now % dist.get_world_size()
        return sum(
            int(ms) / 1e3
            for one, who, ms, first, end in found
            if one == kind and int(first) <= now < int(end)
            and {"all": True, "turns": turn == rank}.get(who, who == str(rank))
        )  # fmt: skip

    @wrapt.patch_function_wrapper(
        "megatron.core.datasets.gpt_dataset", "MockGPTDataset.__getitem__"
    )
    def read_sample(wrapped, _, args, kwargs):
        time.sleep(seconds("loader"))
        return wrapped(*args, **kwargs)

    collected = -1

    @wrapt.patch_function_wrapper("megatron.core.models.gpt", "GPTModel.forward")
    def forward(wrapped, _, args, kwargs):
        nonlocal collected
        if collected < get_args().curr_iteration:
            collected = get_args().curr_iteration
            end = time.thread_time() + seconds("garbage")
            while time.thread_time() < end:
                gc.collect()
        end = time.monotonic() + seconds("forward")
        result = wrapped(*args, **kwargs)
        time.sleep(max(0.0, end - time.monotonic()))
        return result

    @wrapt.patch_function_wrapper("megatron.training.training", "finalize_model_grads")
    def finalize(wrapped, _, args, kwargs):
        time.sleep(seconds("late"))
        return wrapped(*args, **kwargs)

    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
