"""Off NCCL's messages and back, three times in a training over the fake machine (fakes/cuda).

A link gets slower by some milliseconds for both kinds of messages, which otherwise take what they
take: NCCL's a delay, ours their bytes on a thin link. Stock trains over the same links. "Back
after" counts from when the link has healed.

    python benchmarks/there_and_back.py --wires 1,8,12,20,60
"""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles

from common import markdown

from megatron_adaptra.cli.output import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "scripts")]

from fakes.cuda import machine  # noqa: E402
from megatron_lm_rows import FLAGS, LINE  # noqa: E402

SCRIPT = ROOT / "tests" / "device" / "fake_cuda" / "pretrain_changing_links.py"
ON_GPUS = ("--distributed-backend", "nccl", "--no-check-for-nan-in-loss-and-grad")
MESSAGE = 4 * 32 * 64  # bytes of one of FLAGS' job
FIRST, SLOW, HEALED = 10, 14, 20  # iterations
INTO, BACK = "its messages leave the GPU's queue", "back to Megatron's own messages"
SOON = 10  # iterations after which stock's messages are due again


def train(options: argparse.Namespace, wire: float, ours: bool) -> str:
    """What a training prints, in which ours take `wire` milliseconds; exits if it fails."""
    links = [f"{stage}-{stage + 1}" for stage in range(options.stages - 1)]
    times = changes(options)
    words = []
    for begin, end in list(pairwise(times))[::2] if ours else []:
        slow = f"{options.link}:{options.slow:g}ms,bandwidth={MESSAGE / wire:g}kB/s@{begin}..{end}"
        words += ["--adaptra-emulate-link", slow]
    for link in links if ours else []:
        rule = f"{link}:0us,bandwidth={MESSAGE / wire:g}kB/s"
        words += ["--adaptra-emulate-link", rule]
    healthy = [f"{link} {options.nccl:g}" for link in links]
    slow = [f"{link} {options.nccl + (link == options.link) * options.slow:g}" for link in links]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "links")
        path.write_text("\n".join(healthy) + "\n")
        given = {"queues": "1", "kernel-us": str(options.kernel_us), "links": str(path)}
        rules = ";".join(slow), ",".join(map(str, times)), ";".join(healthy)
        environment = {
            **machine.environment(given), "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1", "FAKE_LINKS_CHANGE": "|".join((str(path), *rules)),
        }  # fmt: skip
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            "--nproc-per-node", str(options.stages), "-m", "megatron_adaptra.run", str(SCRIPT),
            *FLAGS, *ON_GPUS, "--num-layers", str(options.stages),
            "--global-batch-size", str(options.microbatches), "--rerun-mode", "disabled",
            "--pipeline-model-parallel-size", str(options.stages),
            "--train-iters", str(times[-1] + HEALED),
            *(("--adaptra", *words, *options.flags.split()) if ours else ()),
        ]  # fmt: skip
        done = subprocess.run(
            command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=options.timeout, check=False,
        )  # fmt: skip
    if done.returncode:
        sys.exit(f"{done.stdout[-4000:]}\nexit status {done.returncode}")
    if options.keep:
        Path(options.keep, f"wire-{wire:g}-{'ours' if ours else 'stock'}.log").write_text(
            done.stdout
        )
    return done.stdout


def changes(options: argparse.Namespace) -> list[int]:
    """Iterations (from 0) that begin and end slow times."""
    begins = [FIRST + turn * (SLOW + HEALED) for turn in range(options.times)]
    return [at for begin in begins for at in (begin, begin + SLOW)]


def seconds(text: str) -> list[float]:
    """Milliseconds of each iteration."""
    return [float(match[2]) for match in map(LINE.search, text.splitlines()) if match]


def healed(options: argparse.Namespace) -> list[int]:
    """Iterations in which stock's messages are due again."""
    ends = changes(options)[1::2]
    return [i for end in ends for i in range(end + SOON, end + HEALED)]


def row(options: argparse.Namespace, wire: float) -> list[str]:
    stock, text = seconds(train(options, wire, ours=False)), train(options, wire, ours=True)
    ours = seconds(text)
    found = re.findall(r"adaptra: from iteration (\d+) on, (.*)", text)
    decisions = [(int(number) - 1, words) for number, words in found]
    there, back = [], []
    for begin, end in list(pairwise(changes(options)))[::2]:
        into = [i - begin for i, words in decisions if begin < i < end and INTO in words]
        after = begin + into[0] if into else end
        out = [i - end for i, words in decisions if after < i <= end + HEALED and BACK in words]
        there.append(str(into[0]) if into else "stays")
        back.append((str(out[0]) if out else "never") if into else "stays")
    times = changes(options)
    late = [i for begin, end in list(pairwise(times))[::2] for i in range(end - SLOW // 2, end)]
    calm = healed(options)
    parts = [[each[i] for i in which] for which in (late, calm) for each in (stock, ours)]
    last = [quantiles(part, n=20, method="inclusive")[-1] for part in parts]
    return [
        f"{wire:g}", ", ".join(there), ", ".join(back),
        f"{median(parts[0]):.0f}", f"{median(parts[1]):.0f}",
        f"{median(parts[2]):.0f}", f"{median(parts[3]):.0f}",
        f"{last[2]:.0f}", f"{last[3]:.0f}", f"{last[3] / last[2]:.2f}",
    ]  # fmt: skip


def wires(text: str) -> list[float]:
    values = [float(part) for part in text.split(",")]
    if not all(0 < value < math.inf for value in values):
        raise ValueError(text)
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--wires", type=wires, default=[1, 8, 12, 20, 60], help="ms of ours")
    parser.add_argument("--nccl", type=float, default=2.0, help="ms of NCCL's messages")
    parser.add_argument("--slow", type=float, default=40.0, help="ms that the link gets slower by")
    parser.add_argument("--link", default="1-2")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--kernel-us", type=int, default=300)
    parser.add_argument("--timeout", type=float, default=590)
    parser.add_argument("--flags", default="", help="more of them for ours")
    parser.add_argument("--keep", default="", help="folder for what the trainings print")
    options = parser.parse_args()
    columns = (
        "ours, ms", "there after", "back after", "slow: stock", "ours", "healed: stock", "ours",
        "95 %: stock", "ours", "ratio",
    )  # fmt: skip
    title = (
        f"{options.stages} stages, {options.microbatches} microbatches, kernels of "
        f"{options.kernel_us} us; NCCL's messages {options.nccl:g} ms, link {options.link} slower "
        f"by {options.slow:g} ms for {SLOW} iterations, {options.times} times; healed: from "
        f"{SOON} iterations later on"
    )
    print(markdown(Table(title, columns, [row(options, wire) for wire in options.wires])))


if __name__ == "__main__":
    main()
