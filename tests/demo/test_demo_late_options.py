"""The demo's late ranks: which can be, when they are late, and what hosts have ports for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from demo.refused import refused_in_a_line

from megatron_adaptra.demo.options import DemoOptions
from megatron_adaptra.errors import BadInput

FOUR: dict[str, Any] = {"stages": 2, "data_parallel": 4}
LATE = ("--data-parallel", "4", "--late-rank", "2:30ms")


@pytest.mark.parametrize(
    ("words", "flag", "value", "allowed"),
    [
        (("--late-rank", "2:30ms"), "--late-rank", "2:30ms", "--data-parallel 4"),
        ((*LATE, "--late-rank", "4:30ms"), "--late-rank", "4:30ms", "ranks are 0 to 3"),
        ((*LATE, "--late-rank", "2:9ms"), "--late-rank", "2:30ms,2:9ms", "each rank only once"),
        ((*LATE, "--late-rank", "1"), "--late-rank", "'1'", "such as 2:30ms"),
        ((*LATE, "--late-rank=-1:3ms"), "--late-rank", "-1:3ms", "such as 2:30ms"),
        ((*LATE, "--late-rank", "1:soon"), "--late-rank", "soon", "a duration such as"),
        ((*LATE, "--late-rank", "1:0ms"), "--late-rank", "1:0ms", "above 0, and below the 25 s"),
        ((*LATE, "--late-rank", "1:25s"), "--late-rank", "1:25s", "above 0, and below the 25 s"),
        ((*LATE, "--late-rank", "1:3ms@4.."), "--late-rank", "1:3ms@4..", "--from-iteration and"),
        (
            ("--data-parallel", "2", "--late-rank", "0:1ms,1:2ms"),
            "--late-rank", "0:1ms,1:2ms", "at least one rank has to come in time",
        ),
        ((*LATE, "--late-rank", "1:2" * 99), "--late-rank", "1:2", "such as 2:30ms"),
        ((*LATE, "--host", "all:5MB/s"), "--host", "all:5MB/s", "it needs --netlab"),
        (
            (*LATE, "--stages", "2", "--netlab", "--host", "8:5MB/s"),
            "--host", "8:5MB/s", "the hosts are 0 to 7",
        ),
        ((*LATE, "--netlab", "--slow-link", "2-3"), "--slow-link", "2-3", "no link can be slow"),
        (
            (*LATE, "--netlab", "--slow-path", "0.1-0.2:9ms"),
            "--slow-path", "0.1-0.2:9ms", "ports of hosts have rates",
        ),
        (("--emulate-link", "2-3:9ms", *LATE), "--late-rank", "2:30ms", "beside --emulate-link"),
        (("--no-emulation", *LATE), "--late-rank", "2:30ms", "beside --no-emulation"),
        ((*LATE, "--delay", "9ms"), "--delay", "9ms", "name one with --slow-link"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_a_line(
    words: tuple[str, ...], flag: str, value: str, allowed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused_in_a_line(words, flag, value, allowed, capsys)


def test_ranks_are_late_in_the_slow_phase_and_nothing_else_is() -> None:
    span = {"iterations": 30, "from_iteration": 9, "to_iteration": 20}
    options = DemoOptions(**FOUR, **span, late_ranks=["2:30ms", "0:1.5s"])
    assert options.lateness == {2: 0.03, 0: 1.5}
    assert options.phases == {"healthy": (0, 9), "slow": (9, 20), "recovered": (20, 30)}
    assert (options.rules, options.worker_rules, options.port_rules) == ([], [], [])
    assert (options.engine, options.reroute, options.dropout) == ("native", "off", 0.1)
    assert DemoOptions.load(options.dump()) == options
    both = DemoOptions(**FOUR, **span, late_ranks=["2:30ms"], slow_links=["0-1"])
    assert both.rules == ["0-1:40000us@9..20"]
    assert DemoOptions(**FOUR, late_ranks=["2:30ms"], emulate=False).lateness == {}


def test_hosts_of_a_laboratory_have_ports_beside_late_ranks_alone() -> None:
    """Whose rate is the default, unless it is given; the first rule of a host counts."""
    plain = DemoOptions(**FOUR, netlab=True)
    assert (plain.port_rules, len(plain.host_rules)) == ([], 8)
    late = DemoOptions(**FOUR, netlab=True, late_ranks=["2:30ms"])
    assert late.host_rules == []
    assert {(rule.host, rule.rate) for rule in late.port_rules} == {(h, 5e6) for h in range(8)}
    own = DemoOptions(
        **FOUR, netlab=True, late_ranks=["2:30ms"], hosts=["3:1MB/s@4..", "all:9MB/s"]
    )
    assert [(rule.host, rule.rate, rule.first) for rule in own.port_rules[:2]] == [
        (3, 1e6, 4), (0, 9e6, 0),
    ]  # fmt: skip
    with pytest.raises(BadInput, match="above 0"):
        DemoOptions(**FOUR, netlab=True, late_ranks=["2:30ms"], hosts=["all:0MB/s"])


def test_late_ranks_make_all_reduces_found_unless_the_file_has_them(tmp_path: Path) -> None:
    (tmp_path / "direct.yaml").write_text("allreduce: direct\n")
    late = {**FOUR, "late_ranks": ["2:30ms"]}
    assert DemoOptions(**FOUR).allreduce == "native"
    assert DemoOptions(**late).allreduce == "auto"
    assert DemoOptions(**late, config=str(tmp_path / "direct.yaml")).allreduce == "direct"
