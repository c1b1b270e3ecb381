"""Run a training script in which one rank is late, once at each of some places.

RANK SECONDS TIMEOUT PLACES SCRIPT...: PLACES are names with iterations, such as norm:3,save:8;
TIMEOUT is that of all process groups, in seconds, where Megatron's flag takes minutes.
"""

import runpy
import sys
import time

import torch.distributed as dist
import wrapt

import megatron_adaptra

# What the rank is late for, as Megatron calls it.
PLACES = {
    "forward": ("megatron.core.models.gpt", "GPTModel.forward"),
    "norm": ("megatron.core.optimizer.optimizer", "get_grad_norm_fp32"),
    "log": ("megatron.training.training", "training_log"),
    "save": ("megatron.training.training", "save_checkpoint"),
    "evaluation": ("megatron.training.training", "evaluate"),
    "skip": ("megatron.training.training", "dummy_train_step"),
}


def main():
    _, rank, seconds, timeout, places, *sys.argv = sys.argv
    megatron_adaptra.register()
    from megatron.training import get_args

    @wrapt.patch_function_wrapper("megatron.training.initialize", "_initialize_distributed")
    def connect(wrapped, _, args, kwargs):
        get_args().distributed_timeout_minutes = float(timeout) / 60
        return wrapped(*args, **kwargs)

    left = set(places.split(","))
    for name, (module, target) in PLACES.items():

        def late(wrapped, _, args, kwargs, name=name):
            # An iteration that is skipped has no number of its own there.
            now = f"{name}:{getattr(get_args(), 'curr_iteration', -1) + 1}"
            if dist.get_rank() == int(rank) and now in left:
                left.discard(now)
                print("late for", now, flush=True)
                time.sleep(float(seconds))
            return wrapped(*args, **kwargs)

        wrapt.wrap_function_wrapper(module, target, late)
    runpy.run_path(sys.argv[0], run_name="__main__")
    assert dist.get_rank() != int(rank) or not left, left


if __name__ == "__main__":
    main()
