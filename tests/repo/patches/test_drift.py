"""scripts/drift.py: what it says of checkouts in which one thing after another has changed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_adaptra.adapter.compat.patches import PATCHES
from megatron_adaptra.adapter.compat.profiles import NEEDED, NEEDED_BY_EXECUTOR

ROOT = Path(__file__).resolve().parents[3]
REAL = [p for p in os.environ.get("ADAPTRA_MEGATRON_LM", "").split(":") if p]
STEP = (
    "forward_step_func, data_iterator, model, num_microbatches, input_tensor, forward_data_store, "
    "config, cp_group_size, collect_non_loss_data, checkpoint_activations_microbatch, "
    "is_first_microbatch, current_microbatch, vp_stage, is_last_stage"
)
# Stubs with the names that are bound; the bodies count only for the warmup depth.
SCHEDULES = f"""
import torch_that_is_not_installed
from megatron.core.utils import get_model_config
def get_forward_backward_func(): pass
def forward_step({STEP}): pass
def backward_step(input_tensor, output_tensor, output_tensor_grad, config, model_type): pass
def forward_backward_pipelining_without_interleaving(
    *, num_microbatches, p2p_communicator=None, grad_finalize_pgs=None
):
    num_warmup_microbatches = DEPTH
    num_warmup_microbatches = min(num_warmup_microbatches, num_microbatches)
def forward_backward_pipelining_with_interleaving(*, num_microbatches, p2p_communicator=None): pass
def get_tensor_shapes(
    *, seq_length, micro_batch_size, decoder_seq_length, config, tp_group=None, cp_group=None
): pass
def check_first_val_step(a, b, c): pass
def clear_embedding_activation_buffer(a, b, c): pass
def deallocate_output_tensor(a, b): pass
def finish_embedding_wgrad_compute(a, b, c, d): pass
"""
GROUP = "p2p_communicator.pp_group.size() - p2p_communicator.pp_group.rank() - 1"
STAGES = "p2p_communicator.total_stages - p2p_communicator.current_stage - 1"
P2P = """
class P2PCommunicator:
    def __init__(self, pp_group, config): pass
    def recv_forward(self, tensor_shapes, is_first_stage): pass
    def recv_backward(self, tensor_shapes, is_last_stage): pass
    def send_forward(self, output_tensors, is_last_stage): pass
    def send_backward(self, input_tensor_grads, is_first_stage): pass
    def send_forward_recv_backward(self, output_tensors, tensor_shapes, is_last_stage): pass
    def send_backward_recv_forward(self, input_tensor_grads, tensor_shapes, is_first_stage): pass
    def send_forward_recv_forward(self, a, recv_prev, tensor_shape, overlap_p2p_comm=False): pass
    def send_backward_recv_backward(self, a, recv_next, tensor_shape, overlap_p2p_comm=False): pass
    def send_forward_backward_recv_forward_backward(self, a, b, c, d, tensor_shape): pass
    def _communicate(self, *, tensor_send_next, **others): pass
"""
TRAINING = """
try:
    from megatron.core.pipeline_parallel import get_forward_backward_func
except ImportError:
    raise
from megatron.training.utils import (
    logical_and_across_model_parallel_group, print_rank_last,
    reduce_max_stat_across_model_parallel_group,
)
def pretrain(train_valid_test_dataset_provider, model_provider, /, model_type, *more): pass
def setup_model_and_optimizer(model_provider_func, model_type): pass
def train_step(forward_step_func): pass
def training_log(loss_dict): pass
"""
RERUNS = """
class RerunStateMachine:
    def should_run_forward_backward(self, data_iterator): pass
    def validate_result(self, result): pass
"""
CONFIG = """
class ModelParallelConfig:
    overlap_p2p_comm: bool = False
    batch_p2p_comm: bool = field(default=True)
    overlap_p2p_comm_warmup_flush: bool = False
    deallocate_pipeline_outputs: bool = False
    grad_scale_func: Callable = None
    finalize_model_grads_func: Callable = None
"""
BUCKETS = """
from torch.distributed import reduce_scatter_tensor as dist_reduce_scatter_func
from torch.distributed import all_gather_into_tensor as dist_all_gather_func
class _ParamAndGradBucketGroup:
    def start_grad_sync(self): pass
    def start_param_sync(self): pass
"""
LINEAR = """
class LinearWithGradAccumulationAndAsyncCommunication:
    @staticmethod
    def backward(ctx, grad_output): pass
"""
RANDOM = """
def _get_all_rng_states(): pass
def _set_all_rng_states(cpu, cuda, tracker): pass
def _fork_rng(): pass
"""
FILES = {
    "core/pipeline_parallel/schedules": SCHEDULES,
    "core/pipeline_parallel/p2p_communication": P2P,
    "training/arguments": "def parse_args(extra): pass\ndef validate_args(args): pass\n",
    "training/training": TRAINING,
    "training/checkpointing": "def save_checkpoint(model): 0\n",
    "core/pipeline_parallel/__init__": "from .schedules import get_forward_backward_func\n",
    "core/optimizer/optimizer": "class MegatronOptimizer:\n    def step(self): pass\n",
    "core/rerun_state_machine": RERUNS,
    "core/model_parallel_config": CONFIG,
    "core/distributed/param_and_grad_buffer": BUCKETS,
    "core/tensor_parallel/layers": LINEAR,
    "core/tensor_parallel/random": RANDOM,
}


@pytest.fixture
def checkout(tmp_path):
    """Writes a checkout of a version, in which some words stand for others."""

    def write(version, depth=STAGES, **changes):
        folder = tmp_path / f"m{len(list(tmp_path.iterdir()))}"
        numbers = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
        info = "".join(f"{name} = {value}\n" for name, value in numbers) + "PRE_RELEASE = 'rc1'\n"
        for name, text in {**FILES, "core/package_info": info}.items():
            path = folder / "megatron" / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            for old, new in {"DEPTH": depth, **changes}.items():
                text = text.replace(old, new)
            path.write_text(text)
        return folder

    return write


def drift(*words, expect=0):
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/drift.py", *words],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == expect, done.stderr
    return done.stderr if expect else done.stdout


def results(*folders):
    return [one["verdict"] for one in json.loads(drift("--json", *folders))]


def test_results(checkout):
    folders = [
        checkout("0.13.0", GROUP), checkout("0.14.1", GROUP), checkout("0.19.3"),
        checkout("0.99.0"), checkout("1.0.0"),
    ]  # fmt: skip
    newer = "newer than known, seams match: native"
    assert results(*folders) == ["older than known: refused", *["known line"] * 2, newer, newer]
    lines = drift(*folders).splitlines()[-5:]
    assert lines[1] == f"0.14.1rc1  {folders[1]}: known line"


def test_seams_that_differ(checkout):
    cases = {
        "schedules.forward_step lacks cp_group_size": {"cp_group_size": "cp_size"},
        "schedules.backward_step lacks output_tensor_grad": {"output_tensor_grad": "grad"},
        "schedules.forward_backward_pipelining_without_interleaving lacks p2p_communicator": {
            "p2p_communicator=None, grad": "communicator=None, grad"
        },
        "P2PCommunicator.recv_backward lacks tensor_shapes": {
            "recv_backward(self, tensor_shapes": "recv_backward(self, shapes"
        },
        "P2PCommunicator._communicate is gone": {"_communicate": "_exchange"},
        "training.get_forward_backward_func is gone": {
            "parallel import get_forward_backward_func": "parallel import schedules"
        },
        "training.train_step is gone": {"def train_step": "def run_step"},
        "the warmup depth comes from unknown, where we set total_stages": {STAGES: "depth()"},
        "the warmup depth comes from pp_group, where we set total_stages": {STAGES: GROUP},
    }
    folders = [checkout("0.99.0", **changes) for changes in cases.values()]
    assert results(*folders) == [f"trains as stock: {words}" for words in cases]
    both = checkout("0.16.0", "depth()", **{" config,": " settings,"})
    assert results(both) == [
        "trains as stock: schedules.forward_step lacks config; schedules.backward_step lacks "
        "config; schedules.get_tensor_shapes lacks config; "
        "the warmup depth comes from unknown, where we set pp_group"
    ]


def test_every_target_of_the_registry_is_looked_for(checkout):
    (one,) = json.loads(drift("--json", checkout("0.19.0")))
    targets = {target for entry in PATCHES.values() for target in entry.targets}
    assert {t for t in targets if t.startswith("megatron.")} <= one["names"].keys()
    assert NEEDED.keys() | NEEDED_BY_EXECUTOR.keys() <= one["names"].keys()


def test_no_checkout(tmp_path, checkout):
    good = checkout("0.17.0")
    (line,) = drift(good, tmp_path, expect=2).splitlines()
    assert line.startswith(f"drift: error: {tmp_path} is not a Megatron-LM checkout")
    (good / "megatron/training/training.py").write_text("def half(:\n")
    (line,) = drift(good, expect=2).splitlines()
    assert "training.py is not Python" in line


@pytest.mark.skipif(not REAL, reason="set ADAPTRA_MEGATRON_LM=CHECKOUT:CHECKOUT... to test on them")
def test_real_checkouts():
    for one in json.loads(drift("--json", *REAL)):
        assert one["verdict"] in ("known line", "newer than known, seams match: native")
        assert None not in one["names"].values()
        early = tuple(map(int, one["version"].split(".")[:2])) < (0, 17)
        assert one["warmup_depth"] == ("pp_group" if early else "total_stages")
