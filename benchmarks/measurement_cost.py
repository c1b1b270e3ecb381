"""What measurement costs a healthy training over the fake machine of tests/support/fakes/cuda.

One training; in every second block of iterations Megatron's function and torch's collectives run
without the plugin. Each measured block is compared with those around it, median by median. With
`--on cpu` two ranks of stock Megatron over gloo. With `--of probes` a training on the CPU, whose
links are not probed in every second block. With several `--act` one training each, and their costs
compared block by block: those of the first, as a share of those of each other one.

    python benchmarks/measurement_cost.py --iterations 600 --kernel-us 100
    python benchmarks/measurement_cost.py --on cpu --act observe bits
    python benchmarks/measurement_cost.py --of probes
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles

from common import interval, markdown

from megatron_adaptra.cli.output import Table
from megatron_adaptra.config import ACTS

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "scripts")]

from fakes.cuda import machine  # noqa: E402
from megatron_lm_rows import FLAGS  # noqa: E402

ON_GPUS = ("--distributed-backend", "nccl", "--no-check-for-nan-in-loss-and-grad")
SETTLES = 2  # iterations at a block's begin that are not counted
Row = tuple[int, float, float]  # of an iteration: whether it was measured, seconds, CPU seconds


def run(options: argparse.Namespace, act: str) -> list[Row]:
    """Train with `--adaptra-act` ACT."""
    given = {"queues": str(options.queues), "kernel-us": str(options.kernel_us)}
    on_gpus = options.of == "all" and options.on == "gpus"
    environment = {
        **(machine.environment(given) if on_gpus else os.environ), "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore", "MEASUREMENT_BLOCK": str(options.block),
        "MEASUREMENT_OF": options.of, "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "megatron_adaptra.run", str(ROOT / "benchmarks" / "measurement_cost_rank.py"),
        *FLAGS, *(ON_GPUS if on_gpus else ()), "--num-layers", "4", "--global-batch-size", "12",
        "--pipeline-model-parallel-size", "2", "--train-iters", str(options.iterations),
        "--rerun-mode", "disabled", "--adaptra", "--adaptra-act", act,
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=options.timeout, check=False,
        )  # fmt: skip
    rows = [line.split()[2:] for line in done.stdout.splitlines() if line.startswith("MEASURED")]
    if done.returncode or len(rows) != options.iterations:
        sys.exit(f"{done.stdout[-4000:]}\nexit status {done.returncode}")
    return [(int(on), float(s), float(cpu)) for on, s, cpu in rows]


def compared(rows: list[Row], block: int, what: int) -> list[float]:
    """Return by measured block its median of `what` to that of the blocks around it."""
    blocks = [rows[i + SETTLES : i + block] for i in range(0, len(rows), block)]
    return [
        median(row[what] for row in two) / median(row[what] for row in one + three)
        for (one, two), three in zip(pairwise(blocks[2:]), blocks[4:], strict=False)
        if two and two[0][0] and three  # between two that were not measured
    ]


def shown(what: str, ratios: list[float]) -> str:
    """Describe the median of `ratios`, of all of them and of either half of the training."""
    halves = (ratios, ratios[: len(ratios) // 2], ratios[len(ratios) // 2 :])
    low, high = ([f"{interval(one)[side]:.4f}" for one in halves] for side in (0, 1))
    every, first, last = (f"{a} to {b}" for a, b in zip(low, high, strict=True))
    return (
        f"95 % interval of the median ratio, {what}: {every}; first half {first}, last half {last}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--of", choices=("all", "probes"), default="all")
    parser.add_argument("--on", choices=("gpus", "cpu"), default="gpus", help="gpus: fake ones")
    parser.add_argument("--act", choices=ACTS, nargs="+", default=["bits"])
    parser.add_argument("--iterations", type=int, default=600)
    parser.add_argument("--block", type=int, default=10, help="iterations of each kind in turn")
    parser.add_argument("--kernel-us", type=int, default=100)
    parser.add_argument("--queues", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=590, help="seconds of a training")
    options = parser.parse_args()
    if options.iterations < 8 * options.block:
        parser.error(f"--iterations {options.iterations}: 8 blocks of {options.block} are needed")
    walls: dict[str, list[float]] = {}
    for act in options.act:
        rows = run(options, act)
        plain, cells = [row for row in rows[2 * options.block :] if not row[0]], []
        for name, what in (("wall clock", 1), ("CPU of the process", 2)):
            ratios = compared(rows, options.block, what)
            walls.setdefault(act, ratios)  # the first one
            low, _, high = quantiles(ratios, n=4)
            ms = 1e3 * median(row[what] for row in plain)
            cells.append([name, f"{ms:.1f}", f"{median(ratios):.4f}", f"{low:.4f} to {high:.4f}"])
        columns = ("of an iteration", "without, ms", "measured to not", "half of the ratios")
        title = f"{options.iterations} iterations, {len(ratios)} measured blocks of {options.block}"
        if options.of == "all" and options.on == "gpus":
            title += f", kernels of {options.kernel_us} us, {options.queues} hardware queue"
        print(shown(f"wall clock, {act}", walls[act]) + "\n")
        print(markdown(Table(f"--adaptra-act {act}, {title}", columns, cells)))
    first = options.act[0]
    for act in options.act[1:]:
        pairs = zip(walls[first], walls[act], strict=True)
        print(shown(f"wall clock, {first} to {act}", [a / b for a, b in pairs]))


if __name__ == "__main__":
    main()
