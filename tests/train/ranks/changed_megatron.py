"""Run a script with a changed Megatron, as a fork has it: `CHANGE SCRIPT ARGUMENT...`.

CHANGE forward_step: that function has lost the parameters that the plugin binds. CHANGE fork: the
schedule is the fork's own, wherever get_forward_backward_func is bound.
"""

import functools
import runpy
import sys

import wrapt

import megatron_adaptra

CHANGE = sys.argv[1]


def forward_step_of(original):
    def forward_step(*args, **kwargs):
        return original(*args, **kwargs)

    return forward_step


def getter_of(original):
    def get(*args, **kwargs):
        megatrons = original(*args, **kwargs)

        @functools.wraps(megatrons)
        def fork_schedule(*args, **kwargs):
            return megatrons(*args, **kwargs)

        return fork_schedule

    return get


@wrapt.when_imported("megatron.core.pipeline_parallel.schedules")
def change(module):
    if CHANGE == "forward_step":
        module.forward_step = forward_step_of(module.forward_step)
        return
    fork = getter_of(module.get_forward_backward_func)
    for name in (module.__name__, "megatron.core.pipeline_parallel", "megatron.training.training"):
        if hasattr(sys.modules.get(name), "get_forward_backward_func"):
            sys.modules[name].get_forward_backward_func = fork


if __name__ == "__main__":
    sys.argv = sys.argv[2:]
    megatron_adaptra.register()
    runpy.run_path(sys.argv[0], run_name="__main__")
