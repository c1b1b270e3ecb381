"""Megatron's training program and torch's build for CUDA, as they are, over the fake machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_trainings import GRAPHS, LAYER_GRAPHS, Trained, needs_torch_for_gpus, train
from fakes.cuda import traces

pytestmark = [needs_torch_for_gpus, pytest.mark.trains]
HERE = Path(__file__).parent
ITERATIONS = 4


def assert_well(done: Trained, iterations: int = ITERATIONS) -> None:
    assert done.status == 0, done.text[-4000:]
    assert len(done.milliseconds) == iterations, done.text[-4000:]
    assert done.complaints == []


def test_what_synchronises_devices_in_between_ends_well(tmp_path: Path) -> None:
    """Evaluations, timers, memory reports, and checkpoints that are written meanwhile."""
    pytest.importorskip("psutil", reason="Megatron's asynchronous checkpoints need psutil")
    saved = tmp_path / "saved"
    done = train(
        tmp_path, "--adaptra", "--bf16", "--eval-iters", "2", "--eval-interval", "2",
        "--timing-log-level", "2", "--log-memory-interval", "1",
        "--empty-unused-memory-level", "2", "--ckpt-format", "torch_dist", "--async-save",
        "--save", str(saved), "--save-interval", "2", queues=1,
        script=HERE / "objects_pretrain.py",
    )  # fmt: skip
    assert_well(done)
    for iteration in (2, 4):
        assert f"validation loss at iteration {iteration} |" in done.text
    assert "memory (MB) | allocated" in done.text
    assert "forward-backward" in done.text
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert (saved / "iter_0000002" / "metadata.json").is_file()


def test_a_gpu_that_one_rank_cannot_open_makes_all_ranks_stock(tmp_path: Path) -> None:
    done = train(tmp_path, "--adaptra", queues=32, script=HERE / "pretrain_without_a_gpu.py")
    assert_well(done)
    (line,) = (each for each in done.text.splitlines() if "as stock Megatron" in each)
    assert "rank 1: messages on this GPU are out of reach: GPU" in line
    assert "adaptra: warmup" not in done.text


def test_graphs_of_whole_iterations(tmp_path: Path) -> None:
    """Captured, messages and all, and replayed: it is stock's schedule."""
    done = train(tmp_path, *GRAPHS, "--adaptra", queues=32, trace=tmp_path)
    assert_well(done)
    assert "adaptra: stock schedule: CUDA graphs" in done.text
    for rank in traces.read_all(tmp_path).values():
        assert rank.counts()["cudaGraphInstantiate"] == 1
        assert rank.iterations[-1]["cudaGraphLaunch"] == 1
        assert rank.iterations[-1]["ncclSend"] == 0


def test_what_graphs_of_layers_put_out_is_copied_before_it_is_sent(tmp_path: Path) -> None:
    """A replay writes to where the one before has written."""
    script = HERE / "pretrain_layer_graphs.py"
    done = train(tmp_path, "--adaptra", *LAYER_GRAPHS, queues=32, script=script)
    assert_well(done)
    for stage in range(2):
        assert f"stage {stage}, cloned before it is sent: True" in done.text


def test_a_healthy_pipeline_is_stocks_own(tmp_path: Path) -> None:
    """With the plugin the calls are stock's, in stock's order, but for those that only look.

    The third iteration rehearses our messages, and the fourth compares what has come of them.
    """
    iterations, rehearsed = 6, (2, 3)
    for name, flags in (("stock", ()), ("adaptra", ("--adaptra",))):
        (tmp_path / name).mkdir()
        trace = tmp_path / name
        # What an iteration does depends on no value then: kernels leave anything behind.
        done = train(
            trace, "--clip-grad", "0", *flags, queues=1, trace=trace, iterations=iterations
        )
        assert_well(done, iterations)
        assert ("adaptra: warmup 2,1" in done.text) is bool(flags)
    folders = tmp_path / "stock", tmp_path / "adaptra"
    assert traces.compare(*folders, LOOKING, rehearsed) == []
    # A difference is found: one call more, and what is sent in a rehearsal.
    found = traces.compare(*folders, LOOKING - {"cuEventRecord"}, rehearsed)
    assert found
    assert all("cuEventRecord" in each for each in found), found
    assert traces.compare(*folders, LOOKING)
    stock, ours = (traces.read_all(folder)["rank-0"].iterations for folder in folders)
    assert len(stock) == len(ours) == iterations
    more = ours[-1] - stock[-1]
    # Each op, 12 forwards and 12 backwards, has an event before it and one after it, and so have
    # each of 12 batches and of five all-reduces between stages; the iteration has three.
    assert 0 < more["cuEventRecord"] <= 2 * (24 + 12 + 5) + 3, more


# Events of the plugin's own on Megatron's streams, by the driver; what is free, by torch.
LOOKING = frozenset(
    ("cuInit", "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease", "cuEventCreate",
     "cuEventDestroy", "cuEventRecord", "cuEventElapsedTime", "cuEventSynchronize",
     "cuStreamCreateWithPriority", "cuStreamDestroy", "cuMemGetInfo", "cudaMemGetInfo")
)  # fmt: skip
