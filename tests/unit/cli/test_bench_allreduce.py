"""`adaptra bench allreduce`: its rows, its page, and what it refuses."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest
from commands import process, strict
from pages import page, png_size, words

from megatron_adaptra.bench.algorithms import measured_plan
from megatron_adaptra.bench.allreduce_options import ALGORITHMS, NATIVE, AllReduceOptions
from megatron_adaptra.bench.allreduce_rate import KEPT, TRIES, Rate, at_kept_rate
from megatron_adaptra.bench.options import ALLREDUCE
from megatron_adaptra.cli import bench_allreduce
from megatron_adaptra.cli.bench_allreduce_report import Finding, html
from megatron_adaptra.ir.collective import Goal
from megatron_adaptra.plan.collectives.sized import for_gradients
from megatron_adaptra.plan.collectives.sized_shards import for_shards
from megatron_adaptra.transport.engine.bindings import missing
from megatron_adaptra.view.axis import size

KEYS = [
    "algorithm", "ranks", "bytes", "late_ms", "late_ranks", "k", "ms_after_arrival", "spread_ms",
    "predicted_ms", "ratio_to_ring", "ratio_to_native", "cpu_ms", "network",
]  # fmt: skip
MB = 1_000_000
built = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.mark.long
@built
def test_each_algorithm_is_measured_with_each_lateness(tmp_path):
    out = tmp_path / "out"
    words_of = ["--ranks", "4", "--sizes", "400kB", "--late", "0,30ms", "--late-ranks", "1"]
    command = ["bench", ALLREDUCE, *words_of, "--rounds", "1", "--out", out, "--json"]
    data = strict(process(*command).stdout)
    assert data == strict((out / "allreduce.json").read_text())
    here = [row for row in data["rows"] if row["network"] == "this machine"]
    assert all(list(row) == KEYS for row in data["rows"])
    found = {(row["algorithm"], row["late_ms"]): row for row in here}
    assert found.keys() == {(name, late) for name in ALGORITHMS for late in (0, 30)}
    for (name, late), row in found.items():
        assert (row["ranks"], row["bytes"], row["late_ranks"]) == (4, 400_000, [1])
        assert (row["k"] is None) == (name == NATIVE)
        for other in ("ring", NATIVE):
            ratio = found[other, late]["ms_after_arrival"] / row["ms_after_arrival"]
            assert row[f"ratio_to_{other}"] == pytest.approx(ratio)
    printed = words(page(out / "allreduce.html"))
    assert f"This machine, 4 ranks, {size(400_000)}, late: rank 1" in printed
    if (out / "allreduce.png").exists():  # where matplotlib is installed
        assert png_size(out / "allreduce.png")[0] > 100


@pytest.mark.long
@built
@pytest.mark.parametrize("collective", ["reduce-scatter", "all-gather"])
def test_the_halves_of_an_all_reduce_are_measured(collective):
    words_of = ["--ranks", "3", "--sizes", "360kB", "--late", "0", "--rounds", "1"]
    command = ["bench", ALLREDUCE, "--collective", collective, *words_of, "--json"]
    data = strict(process(*command).stdout)
    assert data["collective"] == collective
    here = [row["algorithm"] for row in data["rows"] if row["network"] == "this machine"]
    assert here == ["ring", "direct", NATIVE]
    assert all(list(row) == KEYS for row in data["rows"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--late-ranks", "8"], "--late-ranks 8: the ranks are 0 to 7"),
        (["--late-ranks", "0,1", "--ranks", "2"], "one rank has to be in time"),
        (["--late", "100s"], "--late 100.0: it has to be 0 to 60 seconds"),
        (["--host", "8:1MB/s"], "--host '8:1MB/s': no such host; the hosts are 0 to 7"),
        (["--host", "all:1MB/s", "--link", "1ms"], "it has no place beside --link"),
        (["--algorithms", "ring,star"], "--algorithms 'star': it has to be of ring"),
        (["--delay", "10ms"], "--delay 0.01: it needs --host"),
        (["--delay", "2s", "--host", "all:1MB/s"], "--delay 2.0: it has to be 0 to 1 seconds"),
        (["--collective", "broadcast"], "--collective 'broadcast': it has to be one of all-reduce"),
        (
            ["--collective", "all-gather", "--algorithms", "stragglar"],
            "--algorithms 'stragglar': it has to be of ring, direct, native",
        ),
        (
            ["--collective", "reduce-scatter", "--sizes", "400kB", "--ranks", "7"],
            "--sizes 400000: 7 equal shards need a multiple of 28 bytes",
        ),
    ],
)
def test_bad_input_is_one_line(here, flags, message):
    assert message in here.refused("bench", ALLREDUCE, *flags, "--json")


def options_of(ranks, *late, hosts=("all:20MB/s",)):
    return AllReduceOptions(ALLREDUCE, (3_200_000,), ranks, hosts=hosts, late_ranks=late)


def test_a_late_rank_owns_nothing_and_pieces_take_the_same_time_of_a_port():
    plan = measured_plan("direct", options_of(8, 2), 3_200_000)
    assert "nothing is owned by 2" in plan.why
    seconds = [weight / sum(plan.weights) * 3.2e6 / 20e6 for weight in plan.weights]
    assert all(1e-3 < each < 2e-3 for each in seconds)


def taken_for_late(*flags):
    parser = argparse.ArgumentParser()
    bench_allreduce.add_parser(parser.add_subparsers())
    (options,) = bench_allreduce._options(parser.parse_args([ALLREDUCE, *flags]))
    return options.late_ranks


def test_the_rank_with_the_slowest_port_is_taken_for_late_unless_others_are_named():
    slow = ("--host", "2:10MB/s", "--host", "all:20MB/s", "--late", "0")
    assert taken_for_late(*slow) == (2,)
    assert taken_for_late(*slow, "--late-ranks", "5,1") == (5, 1)
    assert taken_for_late("--host", "all:20MB/s", "--ranks", "4") == (3,)


def test_pieces_of_stragglar_are_smaller_than_what_a_connection_sends_in_its_turn():
    """Or those of a round share the port, and all arrive at its end."""
    for ranks in (4, 8):
        options = options_of(ranks, ranks - 1)
        plan = measured_plan("stragglar", options, 3_200_000)
        assert 3_200_000 / plan.pieces <= options.clock().turn


def test_where_no_port_is_slow_plans_are_those_of_a_training():
    for name in set(ALGORITHMS) - {NATIVE}:
        plan = measured_plan(name, options_of(8, 7, hosts=()), 3_200_000)
        assert plan == for_gradients(name, 8, 3_200_000, [7])


def test_plans_of_halves_are_for_the_delay_between_hosts():
    near, far = (
        AllReduceOptions(
            ALLREDUCE, (MB,), 8, hosts=("all:50MB/s",), late_ranks=(7,), delay=delay,
            algorithms=("ring", "direct"), collective="reduce-scatter",
        )
        for delay in (0.0, 0.01)
    )  # fmt: skip
    assert far.where == "hosts all:50MB/s over 10 ms"
    assert far.clock().delay == near.clock().delay + 0.01
    assert measured_plan("ring", far, MB).pieces > measured_plan("ring", near, MB).pieces
    plan = measured_plan("direct", far, MB)
    assert (plan.name, plan.goal) == ("direct", Goal.REDUCE_SCATTER)
    unknown = replace(near, hosts=())
    assert measured_plan("ring", unknown, MB) == for_shards(Goal.REDUCE_SCATTER, "ring", 8, MB)


ASKED = AllReduceOptions(ALLREDUCE, (3_200_000,), 4, hosts=("3:10MB/s", "all:20MB/s"))


def kept_from(number):
    """Rows of rings that keep to their model from the measurement `number` on; what was asked."""
    asked = []

    def measure(options):
        asked.append(options)
        off = KEPT / 2 if len(asked) >= number else 2 * KEPT
        ring = {"predicted_ms": 100.0, "ms_after_arrival": 100 * (1 + off)}
        early = {"predicted_ms": 100.0, "ms_after_arrival": 99.0}
        other = {"predicted_ms": 100.0, "ms_after_arrival": 300.0}
        native = {"predicted_ms": None, "ms_after_arrival": 300.0}
        return [
            {**row, "algorithm": name, "number": len(asked)}
            for name, row in (("ring", early), ("ring", ring), ("direct", other), (NATIVE, native))
        ]

    return measure, asked


@pytest.mark.parametrize("number", range(1, TRIES + 2))
def test_rates_are_halved_until_the_ring_keeps_to_its_model(number):
    measure, asked = kept_from(number)
    shown = []
    rows, rate = at_kept_rate(ASKED, measure, lambda *args: shown.append(args))
    tries = min(number, TRIES)
    assert [options.rates for options in asked] == [
        [20e6 / 2**n] * 3 + [10e6 / 2**n] for n in range(tries)
    ]
    assert {row["number"] for row in rows} == {tries}
    assert rate.asked == "hosts 3:10MB/s all:20MB/s"
    assert rate.used == asked[-1].where
    assert rate.kept == (number <= TRIES)
    assert [options for options, _ in shown] == asked[1:]
    assert all(before.ring_off == pytest.approx(2 * KEPT) for _, before in shown)


def test_without_a_ring_no_rate_is_lowered():
    row = {"algorithm": "direct", "predicted_ms": 1.0, "ms_after_arrival": 9.0}
    rows, rate = at_kept_rate(
        ASKED, lambda _: [row], lambda *_: pytest.fail("it is measured again")
    )
    assert rows == [row]
    assert (rate.ring_off, rate.kept, rate.used) == (None, True, rate.asked)


def test_the_page_and_the_json_name_the_rate():
    lower = Rate("hosts all:20MB/s", "hosts all:10MB/s", 0.02)
    finding = Finding([], [lower, Rate("hosts all:9MB/s", "hosts all:9MB/s", 0.3)])
    shown = html(finding)
    assert "With hosts all:10MB/s the ring took up to 2% more than its model says" in shown
    assert "asked for were hosts all:20MB/s" in shown
    assert "up to 30% more than its model says: this machine keeps no such rate" in shown
    assert finding.data()["rates"][0] == {
        "asked": "hosts all:20MB/s", "used": "hosts all:10MB/s", "ring_off": 0.02, "kept": True
    }  # fmt: skip


def test_the_default_lateness_is_one_buffer_through_a_port():
    options = AllReduceOptions(ALLREDUCE, (4_000_000,), 4, hosts=("1:5MB/s", "all:20MB/s"))
    assert options.rates == [20e6, 5e6, 20e6, 20e6]
    assert options.lateness(4_000_000) == (0.0, 0.2)
    assert AllReduceOptions.load(options.dump()) == options
