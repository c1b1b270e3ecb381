"""What measurement costs a healthy training over the fake machine of tests/support/fakes/cuda.

One training; in every second block of iterations Megatron's function and torch's collectives run
without the plugin. Each measured block is compared with those around it, median by median. With
`--of probes` a training on the CPU, whose links are not probed in every second block.

    python benchmarks/measurement_cost.py --iterations 600 --kernel-us 100
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

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "scripts")]

from fakes.cuda import machine  # noqa: E402
from megatron_lm_rows import FLAGS  # noqa: E402

ON_GPUS = ("--distributed-backend", "nccl", "--no-check-for-nan-in-loss-and-grad")
SETTLES = 2  # iterations at a block's begin that are not counted
OPS = 2 * 12  # of a stage


def run(options: argparse.Namespace) -> list[tuple[int, float, float, int]]:
    """Of each iteration: whether it was measured, seconds, those of the CPU, calls for marks."""
    given = {"queues": str(options.queues), "kernel-us": str(options.kernel_us)}
    on_gpus = options.of == "all"
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
        "--rerun-mode", "disabled", "--adaptra",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=options.timeout, check=False,
        )  # fmt: skip
    rows = [line.split()[2:] for line in done.stdout.splitlines() if line.startswith("MEASURED")]
    if done.returncode or len(rows) != options.iterations:
        sys.exit(f"{done.stdout[-4000:]}\nexit status {done.returncode}")
    return [(int(on), float(s), float(cpu), int(calls)) for on, s, cpu, calls in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--of", choices=("all", "probes"), default="all")
    parser.add_argument("--iterations", type=int, default=600)
    parser.add_argument("--block", type=int, default=10, help="iterations of each kind in turn")
    parser.add_argument("--kernel-us", type=int, default=100)
    parser.add_argument("--queues", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=590)
    options = parser.parse_args()
    rows = run(options)
    blocks = [rows[i + SETTLES : i + options.block] for i in range(0, len(rows), options.block)]
    wall: list[float] = []
    cpu: list[float] = []
    for (one, two), three in zip(pairwise(blocks[2:]), blocks[4:], strict=False):
        if two and two[0][0] and three:  # between two that were not measured
            for ratios, what in ((wall, 1), (cpu, 2)):
                around = median(row[what] for row in one + three)
                ratios.append(median(row[what] for row in two) / around)
    low, high = interval(wall)
    print(f"95 % interval of the median ratio, wall clock: {low:.4f} to {high:.4f}\n")
    calls = median(row[3] for row in rows if row[0])
    plain = [row for row in rows[2 * options.block :] if not row[0]]
    cells = []
    for name, ratios, what in (("wall clock", wall, 1), ("CPU of the process", cpu, 2)):
        low, _, high = quantiles(ratios, n=4)
        ms = 1e3 * median(row[what] for row in plain)
        cells.append([name, f"{ms:.1f}", f"{median(ratios):.4f}", f"{low:.4f} to {high:.4f}"])
    columns = ("of an iteration", "without, ms", "measured to not", "half of the ratios")
    title = f"{options.iterations} iterations, {len(wall)} measured blocks of {options.block}"
    if options.of == "all":
        title += (
            f", kernels of {options.kernel_us} us, {options.queues} hardware queue; {calls:g} "
            f"calls into the driver per iteration, {calls / OPS:.1f} per op"
        )
    print(markdown(Table(title, columns, cells)))


if __name__ == "__main__":
    main()
