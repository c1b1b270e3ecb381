"""`adaptra bench`: what it measures is what it says, and nothing is left of it."""

import signal
import subprocess
import sys
import time

import pytest
from commands import process, strict
from pages import page, png_size, words
from patience import PATIENCE
from processes import living, outliving

from megatron_adaptra.transport.engine.native import missing

P2P_KEYS = [
    "transport", "bytes", "direction", "mb_per_s", "us_per_message", "ratio_to_gloo",
    "ratio_to_copy",
]  # fmt: skip
built = pytest.mark.skipif(bool(missing()), reason=missing())


def bench(*command):
    return strict(process("bench", *command, "--json").stdout)


@built
def test_p2p_measures_each_transport_each_way_and_draws_it(tmp_path):
    out = tmp_path / "out"
    data = bench("p2p", "--sizes", "4KiB,1MiB", "--rounds", "3", "--out", out)
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
        gloo, copy = found["gloo", nbytes, direction], found["copy", nbytes, direction]
        speed = row["mb_per_s"]
        assert row["ratio_to_gloo"] == pytest.approx(speed / gloo["mb_per_s"]), transport
        assert row["ratio_to_copy"] == pytest.approx(speed / copy["mb_per_s"])
    said = words(page(out / "p2p.html"))
    assert "shm" in said
    assert "1 MiB" in said
    if (out / "p2p.png").exists():  # where matplotlib is installed
        assert png_size(out / "p2p.png")[0] > 100


@built
def test_shm_is_faster_than_gloo():
    """By far: 4 times on a machine that does nothing else."""
    rows = bench("p2p", "--sizes", "1MiB", "--rounds", "9")["rows"]
    (row,) = (r for r in rows if (r["transport"], r["direction"]) == ("shm", "one way"))
    assert row["ratio_to_gloo"] > 1.5


@built
def test_collective_measures_each_number_of_ranks():
    rows = bench("collective", "--sizes", "4B,4KiB", "--ranks", "2,3", "--rounds", "2")["rows"]
    found = {(r["collective"], r["transport"], r["ranks"], r["bytes"]): r for r in rows}
    assert found.keys() == {
        (*way, ranks, nbytes)
        for way in (("all_reduce", "gloo"), ("all_gather", "gloo"), ("all_gather", "engine"))
        for ranks in (2, 3)
        for nbytes in (4, 4 << 10)
    }
    for (_, _, ranks, nbytes), row in found.items():
        stock = found["all_reduce", "gloo", ranks, nbytes]
        ratio = stock["us_per_call"] / row["us_per_call"]
        assert row["ratio_to_gloo"] == pytest.approx(ratio)


@built
def test_hol_shows_what_waiting_costs():
    rows = bench("hol", "--sizes", "64KiB", "--rounds", "3")["rows"]
    share = {(row["transport"], row["queue"]): row["ratio_to_alone"] for row in rows}
    assert share.keys() == {(t, q) for t in ("gloo", "engine") for q in ("in", "off")}
    for transport in ("gloo", "engine"):
        # 40 ms behind each step of about 10.
        assert share[transport, "in"] < 0.6 * share[transport, "off"]


@built
def test_hol_prints_a_table():
    out = process("bench", "hol", "--sizes", "4KiB", "--rounds", "1").stdout
    assert "ratio to alone" in out
    assert "4 KiB" in out


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["p2p", "--sizes", "4Kib"], "--sizes '4Kib': sizes such as 4KiB,1MiB"),
        (["p2p", "--sizes", "0.3B"], "--sizes '0.3B': whole numbers of bytes"),
        (["p2p", "--sizes", "2GiB"], "--sizes 2147483648: 8 to 1073741824 bytes"),
        (["p2p", "--rounds", "0"], "--rounds 0: 1 to 1000"),
        (["p2p", "--link", "40"], "--link '40': it has to be a duration"),
        (["collective", "--sizes", "6B"], "bytes that are a multiple of 4"),
        (["collective", "--ranks", "1"], "--ranks 1: 2 to 16"),
        (["collective", "--ranks", "2,x"], "--ranks '2,x': whole numbers"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(command, says, here):
    assert says in here.refused("bench", *command)


def test_without_the_engine_it_says_how_to_get_it():
    program = """
import sys
sys.modules["megatron_adaptra.transport.engine._native"] = None
from megatron_adaptra.cli.main import main
sys.exit(main(["bench", "p2p"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("adaptra: error: there is no engine to measure: it was not built")


@built
def test_a_rank_that_fails_says_why(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    error = process("bench", "p2p", "--sizes", "4KiB", "--rounds", "1", expect=1).stderr
    assert error.startswith("adaptra: error: ")
    assert "none0" in error


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
