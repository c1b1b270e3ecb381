"""`adaptra bench`: what it measures is what it says, and nothing is left of it."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from commands import process, strict
from pages import page, words
from patience import PATIENCE, in_time
from processes import living, outliving

from megatron_adaptra.bench.options import LEAST, P2P, SIZES
from megatron_adaptra.bench.sizes import sizes_between
from megatron_adaptra.transport.engine.bindings import missing

P2P_KEYS = [
    "transport", "bytes", "direction", "mb_per_s", "us_per_message", "busbw_gb_per_s",
    "ratio_to_gloo", "ratio_to_copy",
]  # fmt: skip
built = pytest.mark.skipif(bool(missing()), reason=missing())


def bench(*command):
    return strict(process("bench", *command, "--json").stdout)


@pytest.mark.long
@built
def test_p2p_measures_each_transport_each_way_and_draws_it(tmp_path):
    out = tmp_path / "out"
    data = bench("p2p", "--sizes", "4KiB,1MiB", "--rounds", "9", "--out", out)
    assert data == strict((out / "p2p.json").read_text())
    rows = data["rows"]
    assert all(list(row) == P2P_KEYS for row in rows)
    found = {(row["transport"], row["bytes"], row["direction"]): row for row in rows}
    assert found.keys() == {
        (transport, nbytes, direction)
        for transport in ("gloo", "shm", "tcp", "copy")
        for nbytes in (4 << 10, 1 << 20)
        for direction in ("one way", "both ways")
    }
    for (transport, nbytes, direction), row in found.items():
        assert row["mb_per_s"] * row["us_per_message"] == pytest.approx(nbytes)
        assert row["busbw_gb_per_s"] == pytest.approx(row["mb_per_s"] / 1e3)
        gloo, copy = found["gloo", nbytes, direction], found["copy", nbytes, direction]
        speed = row["mb_per_s"]
        assert row["ratio_to_gloo"] == pytest.approx(speed / gloo["mb_per_s"]), transport
        assert row["ratio_to_copy"] == pytest.approx(speed / copy["mb_per_s"])
    # By far: 4 times on a machine that does nothing else.
    assert found["shm", 1 << 20, "one way"]["ratio_to_gloo"] > 1.5
    printed = words(page(out / "p2p.html"))
    assert "shm" in printed
    assert "1 MiB" in printed


@pytest.mark.long
@built
def test_collective_measures_each_number_of_ranks():
    span = ("-b", "4", "-e", "4K", "-f", "1024")
    rows = bench("collective", *span, "--ranks", "2,3", "--rounds", "2")["rows"]
    found = {(r["collective"], r["transport"], r["ranks"], r["bytes"]): r for r in rows}
    assert found.keys() == {
        (*way, ranks, nbytes)
        for way in (("all_reduce", "gloo"), ("all_gather", "gloo"), ("all_gather", "engine"))
        for ranks in (2, 3)
        for nbytes in (4, 4 << 10)
    }
    for (operation, _, ranks, nbytes), row in found.items():
        share = {"all_reduce": 2 * (ranks - 1) / ranks, "all_gather": ranks - 1}[operation]
        assert row["busbw_gb_per_s"] == pytest.approx(share * nbytes / row["us_per_call"] / 1e3)
        stock = found["all_reduce", "gloo", ranks, nbytes]
        ratio = stock["us_per_call"] / row["us_per_call"]
        assert row["ratio_to_gloo"] == pytest.approx(ratio)


@pytest.mark.timing
@built
def test_hol_shows_what_waiting_costs():
    rows = bench("hol", "--sizes", "64KiB", "--rounds", "3")["rows"]
    share = {(row["transport"], row["queue"]): row["ratio_to_alone"] for row in rows}
    assert share.keys() == {(t, q) for t in ("gloo", "engine") for q in ("in", "off")}
    for transport in ("gloo", "engine"):
        # 40 ms behind each step of about 10.
        in_time("the share in the queue", share[transport, "in"], 0.6 * share[transport, "off"])


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["p2p", "--sizes", "0.3B"], "--sizes '0.3B': it has to be a whole number of bytes su"),
        (["p2p", "-b", "4"], "-b '4': it has to be 8 to 1073741824 bytes"),
        (
            ["p2p", "-b", "1M", "-e", "1K"],
            "-e '1K': it has to be from -b (1048576) to 1073741824 b",
        ),
        (["p2p", "-f", "1"], "-f '1': it has to be a whole number of at least 2"),
        (["p2p", "-b", "8", "--sizes", "8"], "--sizes '8': it has no place beside -b, -e and"),
        (["collective", "-b", "6"], "-b 6: it has to be 4 to 1073741824 bytes that are a mult"),
        (["p2p", "--link", "40"], "--link '40': it has to be a duration"),
        (["p2p", "--link", "40ms@3..5"], "--link '40ms@3..5': the link has to stay"),
        (["p2p", "-b", "1.5K"], "-b '1.5K': it has to be a whole number of bytes such as 8, 1K"),
        (["p2p", "--rounds", "1001"], "--rounds 1001: it has to be 1 to 1000"),
        (["hol", "--sizes", "4"], "--sizes 4: it has to be 8 to 1073741824 bytes"),
        (["collective", "--ranks", "17"], "--ranks 17: it has to be 2 to 16"),
        (["collective", "--ranks", "2,x"], "--ranks '2,x': it has to be whole numbers"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(command, says, here):
    assert says in here.refused("bench", *command)


@pytest.mark.parametrize(
    ("span", "sizes"),
    [
        (("8", "256M", "2"), [8 << n for n in range(26)]),
        (("1K", "1m", "1024"), [1 << 10, 1 << 20]),
        (("4KiB", "5000", None), [4 << 10]),
        (("1G", None, None), [1 << 30]),
        ((None, "64K", "16"), [4 << 10, 64 << 10]),
    ],
)
def test_sizes_are_those_of_nccl_tests(span, sizes):
    assert list(sizes_between(*span, SIZES[P2P], LEAST[P2P])) == sizes


TORCHRUN = {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("command", "ranks", "says"),
    [
        (["p2p"], "4", "torchrun's number of ranks 4: it has to be 2 for p2p"),
        (["hol"], "2", "torchrun 'hol': it has to be p2p or collective; hol starts its two"),
        (["p2p"], "0", "RANK 0: it has to be 0 to WORLD_SIZE - 1 (-1), as torchrun sets it"),
        (["collective"], "17", "torchrun's number of ranks 17: it has to be 2 to 16"),
        (["collective", "--ranks", "2"], "2", "--ranks '2': it has no place under torchrun"),
    ],
)
def test_what_torchruns_ranks_cannot_do(command, ranks, says, here, monkeypatch):
    for name, value in {**TORCHRUN, "WORLD_SIZE": ranks}.items():
        monkeypatch.setenv(name, value)
    assert here.refused("bench", *command).startswith(says)


def agents(*words, second=()):
    """What two agents of torchrun print, each of a host with one rank; `second`: starts its one."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        at = f"127.0.0.1:{found.getsockname()[1]}"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", at, "-m", "megatron_adaptra", "bench"),
        *words,
    ]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [*first, *command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for first in ((), second)
    ]
    try:
        printed = [process.communicate(timeout=PATIENCE) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [0, 0], printed
    return [out.decode() for out, _ in printed if out]


@built
@pytest.mark.cold
def test_several_hosts_measure_under_torchrun(tmp_path):
    """Rank 0 alone prints, and writes the report.

    Where that can be, the second host's clock is a day ahead, and it shares no memory.
    """
    later = ["unshare", "--time", "--monotonic", "86400", "--fork", "--kill-child"]
    able = subprocess.run([*later, "true"], capture_output=True).returncode == 0
    words = ("p2p", "-b", "8", "-e", "1K", "-f", "128", "--rounds", "1", "--out", tmp_path / "out")
    (out,) = agents(*words, "--json", second=later if able else ())
    rows = strict(out)["rows"]
    over = ("gloo", "tcp", "copy") if able else ("gloo", "shm", "tcp", "copy")
    assert {(r["transport"], r["bytes"]) for r in rows} == {(t, n) for t in over for n in (8, 1024)}
    assert all(0 < row["us_per_message"] < 1e6 * PATIENCE for row in rows)
    assert (tmp_path / "out" / "p2p.html").is_file()


def test_without_torch_it_says_so():
    program = "import sys; sys.modules['torch'] = None\n"
    program += "from megatron_adaptra.cli.main import main; sys.exit(main(['bench', 'p2p']))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2
    needs = "adaptra bench needs torch, which is not installed: pip install torch"
    assert done.stderr == f"adaptra: error: {needs}\n"


@pytest.mark.cold
@built
def test_a_rank_that_fails_says_why(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    error = process("bench", "p2p", "--sizes", "4KiB", "--rounds", "1", expect=1).stderr
    assert error.startswith("adaptra: error: ")
    assert "none0" in error


@pytest.mark.cold
@built
def test_nothing_is_left_of_one_that_is_interrupted():
    mark = "7654321"  # a size that nobody else measures
    command = [sys.executable, "-m", "megatron_adaptra", "bench", "p2p", "--sizes", f"{mark}B"]
    with subprocess.Popen([*command, "--rounds", "1000"], stderr=subprocess.PIPE) as child:
        end = time.monotonic() + PATIENCE
        while sum(rank != "" for rank in living(mark).values()) < 2:
            assert time.monotonic() < end, "the ranks do not start"
            time.sleep(0.05)
        child.send_signal(signal.SIGTERM)
        assert b"interrupted" in child.stderr.read()
        assert child.wait(PATIENCE) == 128 + signal.SIGTERM
    assert not outliving(mark)
