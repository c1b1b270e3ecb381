"""How fast the engine is over rails, beside other ways."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from soft_roce.cases import Size, case
from soft_roce.verbs_pair import MTU, RAILS, packets
from soft_roce.verbs_speed import LONG, MESSAGES, compare, over_a_long_link

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
    """64 MiB over a rail alone, over TCP alone, and over what the engine chooses, in turns."""
    found = {}
    for delay in (20, 40):
        took = over_a_long_link(delay, 7 if Size.full else 3, ("rail", "TCP", "chosen"))
        found[f"{delay} ms each way"] = _words(took)
        assert took["chosen"] < 1.2 * min(took["rail"], took["TCP"]), found
    return str(found)


@case
def two_queue_pairs_fill_a_long_link() -> str:
    """One may leave 512 KiB unacknowledged here, 6.5 MB/s over 40 ms each way."""
    found = {}
    for delay, rate in ((20, 20), (40, 10)):
        took = over_a_long_link(delay, 3, ("2 queue pairs", "TCP"), rate)
        of_link = LONG / (1e6 * rate) / took["2 queue pairs"]
        found[f"{delay} ms each way, {rate} MB/s"] = f"{_words(took)}, {of_link:.2f} of the link"
        assert took["2 queue pairs"] < 1.5 * took["TCP"], found
    return str(found)


def _words(took: dict[str, float]) -> str:
    return ", ".join(f"{way} {seconds:.2f} s" for way, seconds in took.items())
