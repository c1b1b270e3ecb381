"""Run a training script in which one rank's gradients are ready late in some iterations.

RANK SECONDS EPISODES SCRIPT...: EPISODES are iterations from zero, such as 6..18,30..42, the last
one of each left out.
"""

import runpy
import sys
import time

import torch.distributed as dist
import wrapt

import megatron_adaptra


def main():
    _, rank, seconds, episodes, *sys.argv = sys.argv
    late = [range(*map(int, one.split(".."))) for one in episodes.split(",")]
    megatron_adaptra.register()
    from megatron.training import get_args

    @wrapt.patch_function_wrapper("megatron.training.training", "finalize_model_grads")
    def finalize(wrapped, _, args, kwargs):
        now = getattr(get_args(), "curr_iteration", 0)
        if dist.get_rank() == int(rank) and any(now in one for one in late):
            time.sleep(float(seconds))
        return wrapped(*args, **kwargs)

    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
