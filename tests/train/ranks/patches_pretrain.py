"""Run a training script to its end; then every target of the registry is Megatron's own again."""

import gc
import json
import runpy
import sys

import megatron.training  # noqa: F401  # the launcher's wrappers are in place now
import wrapt
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.rerun_state_machine import RerunStateMachine

from megatron_adaptra.adapter.compat import patches
from megatron_adaptra.adapter.compat.patch_attr import find
from megatron_adaptra.adapter.compat.patches import PATCHES, is_there

METHODS = {"step", "should_run_forward_backward", "validate_result"}  # patched on an object


def current():
    found = {t for entry in PATCHES.values() for t in entry.present() if is_there(t)}
    return {target: vars(find(target)[0]).get(find(target)[1], "absent") for target in found}


if __name__ == "__main__":
    found = current()
    wrapped = sorted(t for t, value in found.items() if isinstance(value, wrapt.FunctionWrapper))
    originals = {**found, **{target: found[target].__wrapped__ for target in wrapped}}
    made, patch = set(), patches.patch_attr

    def record(owner, name, value):
        made.add(name)
        return patch(owner, name, value)

    patches.patch_attr = record
    del sys.argv[0]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        now = current()
        left = [target for target, value in originals.items() if now[target] is not value]
        kinds = MegatronOptimizer, RerunStateMachine, ModelParallelConfig
        for one in gc.get_objects():
            if isinstance(one, kinds):
                left += METHODS & vars(one).keys()
        print("FOUND " + json.dumps({"wrapped": wrapped, "made": sorted(made), "left": left}))
