"""Megatron's training program and torch's build for CUDA, as they are, over the fake machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_trainings import (
    CHUNKS,
    GRAPHS,
    LAYER_GRAPHS,
    Trained,
    needs_torch_for_gpus,
    train,
    train_cold,
)
from fakes.cuda import accounts, traces

pytestmark = [needs_torch_for_gpus, pytest.mark.trains]
HERE = Path(__file__).parent
ITERATIONS = 4
DISTRIBUTED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
# What an iteration does depends on no value then: kernels leave anything behind.
NO_VALUES = ("--clip-grad", "0")
LAYOUTS: dict[str, Any] = {
    "pp4": ((), {"pipeline": 4}),
    "pp2 x dp2, distributed optimizer": (DISTRIBUTED, {"ranks": 4}),
    "chunks": (CHUNKS, {}),
    "bf16": (("--bf16",), {}),
    "tp2 x pp2": (("--tensor-model-parallel-size", "2"), {"ranks": 4}),
}
BY_DEFAULT = {
    ("pp2 x dp2, distributed optimizer", 1), ("chunks", 32),
}  # fmt: skip


def row(layout: str, queues: int) -> Any:
    marks = () if (layout, queues) in BY_DEFAULT else pytest.mark.large
    return pytest.param(layout, queues, marks=marks, id=f"{layout}, {queues} queues")


def assert_well(done: Trained, iterations: int = ITERATIONS) -> None:
    assert done.status == 0, done.text[-4000:]
    assert len(done.milliseconds) == iterations, done.text[-4000:]
    assert done.complaints == []


@pytest.mark.parametrize(
    ("layout", "queues"), [row(name, queues) for name in LAYOUTS for queues in (1, 32)]
)
def test_stock_trains(layout: str, queues: int, tmp_path: Path) -> None:
    flags, sizes = LAYOUTS[layout]
    assert_well(train(tmp_path, *flags, queues=queues, **sizes))


@pytest.mark.cold
def test_as_a_user_starts_it() -> None:
    assert_well(train_cold(queues=32))


@pytest.mark.parametrize("queues", [1, pytest.param(32, marks=pytest.mark.large)])
def test_what_synchronises_devices_in_between_ends_well(queues: int, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    done = train(
        tmp_path, "--bf16", "--eval-iters", "2", "--eval-interval", "2", "--timing-log-level", "2",
        "--save", str(saved), "--save-interval", "2", "--log-memory-interval", "1",
        "--empty-unused-memory-level", "2", queues=queues,
    )  # fmt: skip
    assert_well(done)
    for iteration in (2, 4):
        assert f"validation loss at iteration {iteration} |" in done.text
    assert "memory (MB) | allocated" in done.text
    assert "forward-backward" in done.text
    assert (saved / "iter_0000004").is_dir()


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((), id="stock", marks=pytest.mark.large),
        pytest.param(("--adaptra",), id="ours"),
    ],
)
def test_asynchronous_checkpoints(flags: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("psutil", reason="Megatron's asynchronous checkpoints need psutil")
    saved = tmp_path / "saved"
    done = train(
        tmp_path, "--ckpt-format", "torch_dist", "--async-save", "--save", str(saved),
        "--save-interval", "2", *flags, queues=1, script=HERE / "objects_pretrain.py",
    )  # fmt: skip
    assert_well(done)
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert (saved / "iter_0000002" / "metadata.json").is_file()


def test_a_gpu_that_one_rank_cannot_open_makes_all_ranks_stock(tmp_path: Path) -> None:
    done = train(tmp_path, "--adaptra", queues=32, script=HERE / "pretrain_without_a_gpu.py")
    assert_well(done)
    (line,) = (each for each in done.text.splitlines() if "as stock Megatron" in each)
    assert "rank 1: messages on this GPU are out of reach: GPU" in line
    assert "adaptra: warmup" not in done.text


def test_a_slow_link_slows_a_training(tmp_path: Path) -> None:
    links = tmp_path / "links"
    links.write_text("0-1 30\n")
    done = train(tmp_path, queues=1, links=links, iterations=2)
    assert_well(done, 2)
    # 12 microbatches, two of them under way at a time, there and back.
    assert min(done.milliseconds) > 12 / 2 * 2 * 30 - 30


def test_graphs_of_whole_iterations(tmp_path: Path) -> None:
    """Captured, messages and all, and replayed; with the plugin it is stock's schedule."""
    for flags in ((), ("--adaptra",)):
        folder = tmp_path / str(len(flags))
        folder.mkdir()
        done = train(folder, *GRAPHS, *flags, queues=32, trace=folder)
        assert_well(done)
        assert ("adaptra: stock schedule: CUDA graphs" in done.text) is bool(flags)
        for rank in traces.read_all(folder).values():
            assert rank.counts()["cudaGraphInstantiate"] == 1
            assert rank.iterations[-1]["cudaGraphLaunch"] == 1
            assert rank.iterations[-1]["ncclSend"] == 0


def test_two_stock_runs_make_the_same_calls(tmp_path: Path) -> None:
    """Else no difference between two runs would say anything; and a difference is found."""
    for name, flags in (("a", ()), ("b", ()), ("c", ("--ffn-hidden-size", "64"))):
        (tmp_path / name).mkdir()
        folder = tmp_path / name
        done = train(folder, *NO_VALUES, *flags, queues=8, trace=folder, accounts=folder)
        assert_well(done)
        counted = accounts.of_rank(folder, 1)
        assert counted["kernels"] > 1000
        assert counted["device_bytes"] > 1 << 20
        assert counted["stalls"] == 0
    assert traces.compare(tmp_path / "a", tmp_path / "b") == []
    different = traces.compare(tmp_path / "a", tmp_path / "c")
    assert different
    assert different[0].startswith("rank-0: thread ")
    assert "cudaLaunchKernel" in different[0]


@pytest.mark.parametrize("flags", [(), LAYER_GRAPHS])
def test_what_graphs_of_layers_put_out_is_copied_before_it_is_sent(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    """A replay writes to where the one before has written; other models' messages need no copy."""
    script = HERE / "pretrain_layer_graphs.py"
    done = train(tmp_path, "--adaptra", *flags, queues=32, script=script)
    assert_well(done)
    for stage in range(2):
        assert f"stage {stage}, cloned before it is sent: {bool(flags)}" in done.text


@pytest.mark.parametrize("queues", [1, pytest.param(32, marks=pytest.mark.large)])
def test_a_healthy_pipeline_is_stocks_own(queues: int, tmp_path: Path) -> None:
    """With the plugin the calls are stock's, in stock's order, but for those that only look.

    The third iteration rehearses our messages, and the fourth compares what has come of them.
    """
    iterations, rehearsed = 6, (2, 3)
    for name, flags in (("stock", ()), ("adaptra", ("--adaptra",))):
        (tmp_path / name).mkdir()
        trace = tmp_path / name
        done = train(
            trace, *NO_VALUES, *flags, queues=queues, trace=trace, pipeline=2,
            iterations=iterations,
        )  # fmt: skip
        assert_well(done, iterations)
        assert ("adaptra: warmup 2,1" in done.text) is bool(flags)
    assert traces.compare(tmp_path / "stock", tmp_path / "adaptra", LOOKING, rehearsed) == []
    stock, ours = (
        traces.read_all(tmp_path / name)["rank-0"].iterations for name in ("stock", "adaptra")
    )
    assert len(stock) == len(ours) == iterations
    more = ours[-1] - stock[-1]
    # Each op, 12 forwards and 12 backwards, has an event before it and one after it, and so has
    # each of five all-reduces between stages; the iteration has three.
    assert 0 < more["cuEventRecord"] <= 2 * (24 + 5) + 3, more


# Events of the plugin's own on Megatron's streams, by the driver; what is free, by torch.
LOOKING = frozenset(
    ("cuInit", "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease", "cuEventCreate",
     "cuEventDestroy", "cuEventRecord", "cuEventElapsedTime", "cuEventSynchronize",
     "cuStreamCreateWithPriority", "cuStreamDestroy", "cuMemGetInfo", "cudaMemGetInfo")
)  # fmt: skip
