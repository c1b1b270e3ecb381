"""Run a script with a Megatron whose schedule has lost a parameter that the plugin binds."""

import runpy
import sys

import wrapt

import megatron_adaptra


@wrapt.when_imported("megatron.core.pipeline_parallel.schedules")
def change(module):
    original = module.forward_step

    def forward_step(*args, **kwargs):
        return original(*args, **kwargs)

    module.forward_step = forward_step


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    megatron_adaptra.register()
    runpy.run_path(sys.argv[0], run_name="__main__")
