"""`adaptra draw --allreduce`: pictures and plan files of all-reduces, and what is refused."""

from __future__ import annotations

import random
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from commands import strict
from pages import page, png_size, titles, words
from seeding import new_seed

from megatron_adaptra.cli.main import main
from megatron_adaptra.ir.collective import CollectivePlan
from megatron_adaptra.plan.reductions.halving_doubling import halving_doubling
from megatron_adaptra.plan.reductions.ring import ring
from megatron_adaptra.sim.ports import Ports, run_on_ports
from megatron_adaptra.view.all_reduce import all_reduce_gantt

LATE = ("--late-ranks", "7", "--late", "160ms")
ALGORITHMS = ("ring", "halving-doubling", "sorted-chain", "direct", "stragglar")


@pytest.mark.parametrize("how", ALGORITHMS)
def test_the_terminal_shows_what_all_ports_do(here, how):
    job, head, *rows, _, legend = here("draw", "--allreduce", how, *LATE, "--width", 100)[
        0
    ].splitlines()
    assert job == "8 ranks, 3.2 MB, ports of 20 MB/s, rank 7 late by 160 ms"
    assert head.startswith(f"{how}: ")
    assert [row.split("|")[0].split() for row in rows] == [
        ["rank", str(rank), side] for rank in range(8) for side in ("out", "in")
    ]
    assert max(map(len, rows)) == 100
    assert rows[14].split("|")[1].startswith("late~~~")
    assert "sends parts" in legend
    assert "receives sums" in legend


def test_a_plan_is_saved_and_drawn_again(here, tmp_path):
    file = tmp_path / "late7.plan"
    assert here("draw", "--allreduce", "stragglar", *LATE, "--out", file)[0].strip() == str(file)
    plan = CollectivePlan.parse(file.read_text(), 8)
    assert plan.name == "stragglar"
    built = here.json("draw", "--allreduce", "stragglar", *LATE)
    read = here.json("draw", "--allreduce", file, *LATE)
    assert built["plan"] == file.read_text()
    assert read == built
    assert here("draw", "--allreduce", file, "--format", "plan")[0] == file.read_text()


def test_auto_is_the_fastest_by_the_simulator(here):
    found = here.json("draw", "--allreduce", "auto", *LATE)
    others = [here.json("draw", "--allreduce", how, *LATE)["predicted_ms"] for how in ALGORITHMS]
    assert found["predicted_ms"] <= 1.05 * min(others)
    assert f"{found['predicted_ms']:.0f} ms, native 283 ms" in found["why"]


def test_auto_stays_with_native_while_nobody_is_late(here):
    found = here.json("draw", "--allreduce", "auto")
    assert (found["allreduce"], found["why"]) == ("ring", "native, which nothing clearly beats")
    assert (
        here.refused("draw", "--allreduce", "auto", "--pieces", 4)
        == "--pieces '4': auto finds them"
    )


def test_the_figures_are_those_of_the_clock(capsys):
    """The first rule of --host that fits counts."""
    words = "--ranks 4 --pieces 2 --late-ranks 3 --late 50ms --bytes 1MB --host 1:5MB/s"
    words += " --host all:10MB/s --delay 2ms --message-cost 1ms --json"
    assert main(["draw", "--allreduce", "ring", *words.split()]) == 0
    data = strict(capsys.readouterr().out)
    ports = Ports.equal([10e6, 5e6, 10e6, 10e6], 2e-3, 1e-3)
    run = run_on_ports(ring(4, 2), 1_000_000, ports, [0, 0, 0, 0.05])
    assert data["predicted_ms"] == pytest.approx(1e3 * run.after_arrival)
    assert data["pieces"] == 8
    assert len(data["messages"]) == len(run.transfers)
    assert data["lower_bound_ms"] <= data["predicted_ms"]


def test_a_folder_gets_every_picture(here, tmp_path):
    pytest.importorskip("matplotlib")
    folder = tmp_path / "new"
    here("draw", "--allreduce", "direct", "--ranks", 4, "--late-ranks", "1,2", "--out", folder)
    svg, html = folder / "direct.svg", folder / "direct.html"
    root = page(html)
    for text in ("rank 3 out", "rank 0 in", "sends sums", "late by 160 ms", "comes at"):
        assert text in words(root)
    assert "late: not there yet" in " ".join(titles(ET.fromstring(svg.read_text())))
    assert png_size(folder / "direct.png")[0] > 1000


def test_a_bar_names_the_piece_and_the_other_rank():
    run = run_on_ports(halving_doubling(4), 100_000, Ports.equal([1e6] * 4), [0, 0, 0, 0.1])
    bars = all_reduce_gantt(halving_doubling(4), run).bars
    assert [b.label for b in sorted(bars, key=lambda b: b.start) if b.row == 6] == [
        "late", "P0-1>1", "P2>2", "S3>2", "S2-3>1"
    ]  # fmt: skip
    assert [b.label for b in sorted(bars, key=lambda b: b.start) if b.row == 7] == [
        "A2-3<1", "A3<2", "R2<2", "R0-1<1"
    ]  # fmt: skip


def test_bars_are_the_messages_whole_and_in_their_time():
    """Nothing is lost or moved where short messages are one bar; bars of a port do not overlap."""
    rng = random.Random(new_seed())
    for _ in range(10):
        ranks = rng.randint(2, 9)
        plan = ring(ranks, rng.choice([1, 4, 16]))
        came = [rng.choice([0.0, 0.02]) for _ in range(ranks)]
        run = run_on_ports(plan, 100_000, Ports.equal([1e6] * ranks, 1e-3, 1e-4), came)
        bars = all_reduce_gantt(plan, run).bars
        for row in range(2 * ranks):
            out = row % 2 == 0
            mine = sorted(b.start for b in bars if b.row == row and b.label != "late")
            times = [
                (t.sent, t.left) if out else (t.began, t.arrived)
                for t in run.transfers
                if (t.source if out else t.target) == row // 2
            ]
            shown = [b for b in bars if b.row == row and b.label != "late"]
            assert sum(b.details["messages"] for b in shown) == len(times)
            assert {b.start for b in shown} <= {start for start, _ in times}
            assert {b.end for b in shown} <= {end for _, end in times}
            shown.sort(key=lambda b: b.start)
            assert [b.start for b in shown] == mine
            assert all(a.end <= b.start + 1e-9 for a, b in pairwise(shown))
            for start, end in times:
                assert any(b.start <= start and end <= b.end for b in shown)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--ranks", "8"], "--ranks '8': it needs --allreduce"),
        (["--allreduce", "ring", "--stages", "4"], "--stages '4': it is of a pipeline's schedule"),
        (["--allreduce", "tree"], "--allreduce 'tree': it has to be one of ring, halving-doubl"),
        (["--allreduce", "ring", "--ranks", "1"], "--ranks '1': it has to be a whole number from"),
        (["--allreduce", "ring", "--late", "1s"], "--late '1s': it needs --late-ranks"),
        (["--allreduce", "ring", "--late-ranks", "8"], "--late-ranks '8': ranks are 0 to 7"),
        (["--allreduce", "stragglar"], "late ranks []: stragglar needs the one rank"),
        (["--allreduce", "ring", "--host", "1:1MB/s"], "--host '1:1MB/s': no rule has a rate for"),
        (["--allreduce", "ring", "--bytes", "0B"], "--bytes '0B': at least 1B"),
    ],
)  # fmt: skip
def test_what_goes_not_together_is_refused(here, flags, line):
    assert here.refused("draw", *flags).startswith(line)


def test_a_damaged_plan_or_one_for_another_number_of_ranks(here, tmp_path):
    file = tmp_path / "a.plan"
    file.write_text(ring(4).text())
    line = here.refused("draw", "--allreduce", file, "--ranks", 8)
    assert line.startswith(f"--allreduce '{file}': in it, ")
    assert "for 4 ranks': there are 8" in line
    line = here.refused("draw", "--allreduce", file, "--pieces", 8)
    assert line == f"--pieces '8': the plan in {file} has its own"
    line = here.refused("draw", "--allreduce", file, "--out", file)
    assert line.endswith("it is the file of --allreduce; name another one")
    file.write_text(ring(4).text().replace("P0>1", "P0>2", 1))
    assert "does not receive it" in here.refused("draw", "--allreduce", file)
