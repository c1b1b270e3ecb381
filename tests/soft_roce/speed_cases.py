"""How fast the engine is over rails, beside other ways."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from soft_roce.cases import Size, case
from soft_roce.verbs_pair import MTU, RAILS, packets
from soft_roce.verbs_speed import MESSAGES, compare, over_a_long_link

from megatron_adaptra.bench.options import RESULT


@case
def adaptra_bench_has_rows_of_verbs() -> str:
    """Both ranks use the same ports, as two ranks of a host do."""
    before = [packets(rail, 0) for rail in range(RAILS)]
    nbytes = 64 << 10
    script = Path(__file__).with_name("verbs_bench.py")
    done = subprocess.run(
        [sys.executable, script, str(nbytes)], capture_output=True, text=True, timeout=300,
        check=False, env={**os.environ, "NCCL_IB_HCA": "=rail0a,rail1a"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout.removeprefix(RESULT))
    ways = [(row["transport"], row["direction"]) for row in rows]
    names = ("gloo", "shm", "tcp", "verbs", "copy")
    assert ways == [(name, way) for way in ("one way", "both ways") for name in names]
    after = [packets(rail, 0) for rail in range(RAILS)]
    messages = 4 * 100 * 3  # of verbs: bursts, each of a hundred, one way and both ways
    sent = [now - then for now, then in zip(after, before, strict=True)]
    assert messages * nbytes / MTU <= sum(sent) < 1.5 * messages * nbytes / MTU, sent
    return str([row for row in rows if row["transport"] == "verbs"])


@case
def speed_beside_perftest() -> str:
    """Only a ruin of it fails: the machine's host has other work as well."""
    found = {size: compare(size, 7 if Size.full else 2) for size in MESSAGES}
    assert all(ratio > 0.1 for _, _, ratio in found.values()), found
    return ", ".join(
        f"{size >> 10} KiB: {ours:.1f} MB/s, ib_write_bw {theirs:.1f}, ratio {ratio:.2f}"
        for size, (ours, theirs, ratio) in found.items()
    )


@case
def the_better_way_over_a_long_link() -> str:
    """64 MiB over a rail alone, over TCP alone, and over what the engine chooses, in turns.

    Software RDMA leaves a queue pair 512 KiB that are not acknowledged, so that several carry more.
    """
    found = {}
    for delay in (20, 40):
        took = over_a_long_link(delay, 7 if Size.full else 3)
        words = ", ".join(f"{way} {seconds:.2f} s" for way, seconds in took.items())
        found[f"{delay} ms each way"] = words
        assert took["chosen"] < 1.2 * min(took["rail"], took["TCP"]), found
        assert took["8 queue pairs"] < 0.8 * took["rail"], found
    return str(found)
