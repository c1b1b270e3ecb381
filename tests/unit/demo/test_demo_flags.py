"""Flags of the demo: which contradict each other, which cannot be, and what the others become."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT
from view.view_sample import sample_report

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.cli.demo import _options_of
from megatron_adaptra.cli.main import _parser, main
from megatron_adaptra.cli.old import renewed
from megatron_adaptra.demo.options import DemoOptions
from megatron_adaptra.emulate.rules import PortRule
from megatron_adaptra.view.findings import headline, setting, slow_noun

CONTRADICTIONS = [
    (("--no-emulation", "--slow", "2-3:40ms"), "--slow", "--no-emulation"),
    (("--no-emulation", "--netlab"), "--netlab", "--no-emulation"),
    (("--rank-from-env", "--netlab"), "--netlab", "--rank-from-env"),
]
TWO, FOUR = "--replicas 2 --slow", "--replicas 4 --slow"
# What cannot be -> the flag that is named, and what may be.
REFUSED = {
    "--slow 2-3:40ms@80.. --iterations 20": ("--slow", "20 iterations"),
    "--slow 2-3:40ms@5s..9s": ("--slow", "its period has to be iterations"),
    "--slow 2-3": ("--slow", "it has to be a rule: 2-3:40ms"),
    "--slow 0.1:dead": ("--slow", "a training ends with its worker"),
    "--netlab --stages 65": ("--stages", "at most 64 ranks"),
    f"{TWO} 2.1:2x": ("--slow", "they are 0.0 to 1.3"),
    f"{TWO} 0.1-2.2:9ms": ("--slow", "the workers are 0.0 to 1.3"),
    "--reroute swap": ("--reroute", "--replicas 2"),
    "--replicas 2 --reroute auto --engine native": ("--reroute", "it needs --engine executor"),
    "--replicas 2 --reroute swap --chunks 2": ("--reroute", "chunks of several replicas"),
    "--replicas 2 --reroute auto --policy zb-h1": ("--reroute", "use adaptive"),
    "--slow 2:30ms": ("--slow", "it needs several replicas: give --replicas 4"),
    f"{FOUR} 4:30ms": ("--slow", "ranks are 0 to 3"),
    f"{FOUR} 1:soon": ("--slow", "a duration such as"),
    f"{FOUR} 1:0ms": ("--slow", "above 0, and below the 25 s"),
    f"{FOUR} 1:25s": ("--slow", "above 0, and below the 25 s"),
    f"{FOUR} 1:3ms@4..8,1-2:9ms@6..12": ("--slow", "in the whole slow phase, @4..12"),
    f"{TWO} 0:1ms,1:2ms": ("--slow", "at least one rank has to stay as it is"),
    f"{FOUR} {'1:2' * 99}": ("--slow", "it has to be a rule"),
    f"{FOUR} 2:9ms --stages 2 --netlab --slow 8:5MB/s": ("--slow", "the hosts are 0 to 7"),
    f"{FOUR} 2:9ms --netlab --slow 2-3:1ms": ("--slow", "no link can be slow"),
    "--slow 0:2x": ("--slow", "--replicas 4"),
    f"{FOUR} 4:2x": ("--slow", "replicas are 0 to 3"),
    f"{FOUR} 1:0.5x": ("--slow", "from 1x to 1000x"),
    f"{TWO} 0:2x,1:3x": ("--slow", "at least one replica has to stay"),
    f"{FOUR} 2:2x --reroute swap": ("--slow", "beside --reroute swap"),
    f"{FOUR} 2:2x --chunks 2": ("--slow", "several --chunks"),
    f"{FOUR} 2:2x --policy interleaved": ("--slow", "several --chunks"),
    "--slow 2:20MB/s": ("--slow", "it needs --netlab"),
    "--netlab --slow 0.1:fast": ("--slow", "a rule such as 1.2:2x"),
    "--netlab --slow 2:0MB/s": ("--slow", "a rate above 0"),
    "--netlab --slow 2:20MB/s,2-3:1ms": ("--slow", "no link can be slow"),
}
ITERATIONS, SPAN = 30, "@9..20"
OF_FOUR: dict[str, Any] = {"stages": 2, "data_parallel": 4}


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line with which the demo refuses these words."""
    assert main(["demo", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    return line


@pytest.mark.parametrize(("words", "flag", "other"), CONTRADICTIONS)
def test_contradictions(
    words: tuple[str, ...], flag: str, other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, *words)
    assert line.startswith(f"adaptra: error: {flag}")
    assert f"it has no place beside {other}" in line


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_is_refused_in_a_line(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flag, allowed = REFUSED[words]
    line = refused(capsys, *words.split())
    assert line.startswith(f"adaptra: error: {flag} ")
    assert allowed in line


@pytest.mark.parametrize("text", ["links: []\n", "links:\n", "links: null\n", "{}\n"])
def test_a_scenario_without_links(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(text)
    line = refused(capsys, "--slow", str(path))
    assert str(path) in line
    assert "it has to be a list of at least one, each with a link and a delay" in line


@pytest.mark.parametrize(
    "text", ["engine: stock", "policy: zb-h1", "timeout: 3", "record: x", "reroute: auto"]
)
def test_settings_that_the_demo_makes_itself(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(text + "\n")
    line = refused(capsys, "--config", str(path))
    assert text.partition(":")[0] in line
    assert "it has no place in a file of --config" in line


def test_a_rule_of_the_whole_run_has_no_healthy_phase() -> None:
    options = DemoOptions(slow=["2-3:40ms@0.."], iterations=30)
    assert options.phases == {"slow": (0, 30)}
    assert DemoOptions.load(options.dump()) == options
    assert DemoOptions(slow=["2-3:40ms"], iterations=30).phases["slow"] == (10, 20)


@pytest.mark.parametrize(
    ("options", "engine", "reroute", "dropout"),
    [
        ({"slow": ["1.1:2x"]}, "executor", "auto", 0.0),
        ({"slow": ["1.1:2x"], "engine": "native"}, "native", "swap", 0.1),
        ({"slow": ["1.1:2x"], "reroute": "off"}, "native", "off", 0.1),
        ({"slow": ["1.1:2x"], "emulate": False}, "native", "off", 0.1),
        ({"slow": ["1.1:2x"], "policy": "1f1b"}, "native", "off", 0.1),
        ({"slow": ["1.1:2x"], "chunks": 2}, "executor", "off", 0.1),
        ({"slow": ["0.1:2x"], "data_parallel": 1}, "native", "off", 0.1),
        ({"slow": ["0.1-0.2:40ms"]}, "native", "swap", 0.1),
        ({"slow": ["0.1-0.2:40ms"], "engine": "executor"}, "executor", "auto", 0.0),
        ({"slow": ["1-2:40ms"]}, "native", "off", 0.1),
        ({"reroute": "auto", "dropout": 0.2}, "executor", "auto", 0.2),
    ],
)
def test_replicas_have_one_plan_where_that_may_help(
    options: dict[str, Any], engine: str, reroute: str, dropout: float
) -> None:
    made = DemoOptions(**{"data_parallel": 2, **options})
    assert (made.engine, made.reroute, made.dropout) == (engine, reroute, dropout)
    assert DemoOptions.load(made.dump()) == made


def test_what_gets_slow_becomes_rules_of_the_slow_phase() -> None:
    slow = {"slow": [f"1.1:2x{SPAN}", "0.1>1.2:40ms"], "data_parallel": 2}
    options = DemoOptions(iterations=ITERATIONS, **slow)
    assert options.worker_rules == ["1.1:2x@9..20"]
    assert options.rules == ["0.1>1.2:40ms@9..20"]
    assert options.slowness.slow_links == [], "the last link stays as it is"
    assert options.slowness.slow_workers == ["1.1:2x"]
    assert options.phases == {"healthy": (0, 9), "slow": (9, 20), "recovered": (20, 30)}
    assert DemoOptions.load(options.dump()) == options
    assert DemoOptions(iterations=ITERATIONS, **slow, emulate=False).worker_rules == []


def test_rules_of_links_and_workers_make_the_phases() -> None:
    """One with its own iterations keeps them; one of the whole run makes no phase."""
    workers = ["1.1:2x@12..24", "1.1:4x@0.."]
    options = DemoOptions(slow=workers, data_parallel=2, iterations=30)
    assert (options.worker_rules, options.rules) == (workers, [])
    assert options.phases == {"healthy": (0, 12), "slow": (12, 24), "recovered": (24, 30)}
    assert (options.engine, options.reroute) == ("executor", "auto")
    both = replace(options, slow=[*workers, "0.1-0.2:40ms@9..20"])
    assert both.phases["slow"] == (9, 24)
    assert both.rules == both.slowness.slow_paths == ["0.1-0.2:40ms@9..20"]


def test_hosts_of_a_laboratory_are_those_of_the_workers() -> None:
    """Rank, and host, is stage * replicas + replica."""
    path = DemoOptions(slow=["0.1>1.2:40ms"], data_parallel=2, netlab=True)
    assert path.rules == []
    assert [(rule.source, rule.target) for rule in path.host_rules] == [(2, 5)]
    link = DemoOptions(slow=["1>2:40ms"], data_parallel=2, netlab=True)
    assert [(rule.source, rule.target) for rule in link.host_rules] == [(2, 4), (3, 5)]
    port = DemoOptions(slow=["1.2:5MB/s"], data_parallel=2, netlab=True)
    assert [rule.host for rule in port.port_rules] == [5]


def test_ranks_are_late_in_the_slow_phase_and_nothing_else_is() -> None:
    slow = [f"2:30ms{SPAN}", f"0:1.5s{SPAN}"]
    options = DemoOptions(**OF_FOUR, iterations=ITERATIONS, slow=slow)
    assert options.lateness == {2: 0.03, 0: 1.5}
    assert options.phases == {"healthy": (0, 9), "slow": (9, 20), "recovered": (20, 30)}
    assert (options.rules, options.worker_rules, options.port_rules) == ([], [], [])
    assert (options.engine, options.reroute, options.dropout) == ("native", "off", 0.1)
    assert DemoOptions.load(options.dump()) == options
    both = DemoOptions(**OF_FOUR, iterations=ITERATIONS, slow=[*slow, "0-1:40ms"])
    assert both.rules == ["0-1:40ms@9..20"]
    assert DemoOptions(**OF_FOUR, slow=["2:30ms"], emulate=False).lateness == {}


def test_hosts_of_a_laboratory_have_ports_beside_late_ranks_alone() -> None:
    """Whose rate is the default, unless it is given; the first rule of a host counts."""
    plain = DemoOptions(**OF_FOUR, netlab=True)
    assert (plain.port_rules, len(plain.host_rules)) == ([], 8)
    late = DemoOptions(**OF_FOUR, netlab=True, slow=["2:30ms"])
    assert late.host_rules == []
    assert {(rule.host, rule.rate) for rule in late.port_rules} == {(h, 5e6) for h in range(8)}
    own = DemoOptions(**OF_FOUR, netlab=True, slow=["2:30ms", "3:1MB/s@4..", "all:9MB/s"])
    assert [(rule.host, rule.rate, rule.first) for rule in own.port_rules[:2]] == [
        (3, 1e6, 4), (0, 9e6, 0),
    ]  # fmt: skip
    assert own.phases["slow"] == (20, 40)


def test_late_ranks_make_all_reduces_found_unless_the_file_has_them(tmp_path: Path) -> None:
    (tmp_path / "direct.yaml").write_text("allreduce: direct\n")
    late = {**OF_FOUR, "slow": ["2:30ms"]}
    assert DemoOptions(**OF_FOUR).allreduce == "native"
    assert DemoOptions(**late).allreduce == "auto"
    assert DemoOptions(**late, config=str(tmp_path / "direct.yaml")).allreduce == "direct"


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes this a machine of so many cores."""
    return lambda count: monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)))


def test_all_workers_of_a_replica_are_slow_in_the_slow_phase_and_nothing_else_is(
    cores: Callable[[int], None],
) -> None:
    cores(8)
    slow = [f"2:2x{SPAN}", "0:1.5x"]
    options = DemoOptions(**OF_FOUR, iterations=ITERATIONS, slow=slow)
    assert options.worker_rules == [
        "2.0:2x@9..20", "2.1:2x@9..20", "0.0:1.5x@9..20", "0.1:1.5x@9..20",
    ]  # fmt: skip
    assert options.rules == []
    assert (options.engine, options.reroute, options.dropout) == ("native", "off", 0.0)
    assert DemoOptions.load(options.dump()) == options
    assert DemoOptions(**OF_FOUR, slow=["2:2x"], dropout=0.2).dropout == 0.2
    both = DemoOptions(**OF_FOUR, iterations=ITERATIONS, slow=[slow[0], "1.1:3x"])
    assert both.worker_rules == ["1.1:3x@9..20", "2.0:2x@9..20", "2.1:2x@9..20"]
    assert both.reroute == "off", "one remedy or the other"


def test_where_ranks_share_cores_all_ops_wait(cores: Callable[[int], None]) -> None:
    """A rule of a slow worker comes first, and its factor is on top of what all take."""
    cores(4)
    slow = [f"2:2x{SPAN}", "1.1:1.5x"]
    options = DemoOptions(**OF_FOUR, iterations=ITERATIONS, slow=slow)
    every = [f"{replica}.{stage}:4x" for replica in range(4) for stage in range(2)]
    assert options.worker_rules == ["1.1:6x@9..20", "2.0:8x@9..20", "2.1:8x@9..20", *every]
    cores(1)
    assert DemoOptions.load(options.dump()) == options, "ranks run what the launcher has found"
    assert DemoOptions(**OF_FOUR, slow=["1.1:2x"]).op_times == 1
    assert DemoOptions(**OF_FOUR, slow=slow, emulate=False).op_times == 1


def test_slow_replicas_make_counts_found_unless_the_file_has_them(tmp_path: Path) -> None:
    (tmp_path / "full.yaml").write_text("sync: full\n")
    (tmp_path / "named.yaml").write_text("sync: share\nsync_counts: 13,13,9,13\n")
    slow = {**OF_FOUR, "slow": ["2:2x"]}
    assert DemoOptions(**OF_FOUR).sync == "full"
    assert DemoOptions(**slow, emulate=False).sync == "full"
    assert (DemoOptions(**slow).sync, DemoOptions(**slow).sync_counts) == ("share", "")
    assert DemoOptions(**slow, config=str(tmp_path / "full.yaml")).sync == "full"
    named = DemoOptions(**slow, config=str(tmp_path / "named.yaml"))
    assert (named.sync, named.sync_counts) == ("share", "13,13,9,13")


def test_ports_are_slow_in_the_slow_phase_and_nothing_else_is() -> None:
    """Of several rules for a host the first one counts."""
    options = DemoOptions(netlab=True, slow=["2:20MB/s@9..20", "all:50MB/s"])
    assert options.port_rules[0] == PortRule(2, 20e6, 9, 20)
    assert {(rule.first, rule.end) for rule in options.port_rules} == {(9, 20)}
    assert options.slowness.slow_hosts == ["0:50MB/s", "1:50MB/s", "2:20MB/s", "3:50MB/s"]
    assert (options.slowness.slow_links, options.rules, options.host_rules) == ([], [], [])
    assert options.phases == {"healthy": (0, 9), "slow": (9, 20), "recovered": (20, 60)}
    assert options.lab_changes == {9, 20}
    assert DemoOptions.load(options.dump()) == options


OLD = {  # flags that go with the next release -> what is written instead
    "--slow-link 0-1,2>3 --delay 60ms": "0-1:60ms 2>3:60ms",
    "--delay 60ms --stages 6": "4-5:60ms",
    "--bandwidth 2MB/s --delay 5ms": "2-3:5ms,bandwidth=2MB/s",
    "--bandwidth 2MB/s --to-iteration 40": "2-3:2MB/s@20..40",
    "--slow-worker 0.1:2x,0.2:3x --from-iteration=9 --iterations 30": "0.1:2x@9..20 0.2:3x@9..20",
    "--data-parallel 2 --slow-path 0.1-1.2:9ms --late-rank 1:9ms": "0.1-1.2:9ms 1:9ms",
    "--data-parallel 4 --slow-replica 2:2x": "2:2x",
    "--emulate-link 2-3:40ms --emulate-worker 0.1:2x@3..9": "2-3:40ms@0.. 0.1:2x@3..9",
    "--emulate-link 0-1:9ms,jitter=1ms,2-3:9ms@3..": "0-1:9ms,jitter=1ms@0.. 2-3:9ms@3..",
    "--emulate-worker 0.1:2x,0.2:3x@3..9,0.3:2x": "0.1:2x@0.. 0.2:3x@3..9 0.3:2x@0..",
    "--slow-path 1-2:9ms,jitter=1ms,0-1:9ms --to-iteration 40": "1-2:9ms,jitter=1ms@20..40 "
    "0-1:9ms@20..40",
}


@pytest.mark.parametrize("words", OLD)
def test_old_flags_become_rules_with_one_line(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    new = renewed(["demo", *words.split()])
    rules = [after for word, after in pairwise(new) if word == "--slow"]
    assert rules == OLD[words].split()
    assert capsys.readouterr().err.splitlines()[-1].endswith(" --slow ".join(["", *rules])[1:])
    parser, _ = _parser(["demo"])
    assert _options_of(parser.parse_args(new)).slow == rules


def test_a_job_that_is_planned_is_trained_and_flags_win(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser, _ = _parser(["demo"])
    words = ["demo", "--profile", str(ROOT / "configs/examples/job.yaml")]
    options = _options_of(parser.parse_args([*words, "--microbatches", "24"]))
    assert options == DemoOptions(microbatches=24, slow=["2-3:60ms"], activation_budget="6")
    measured = capsys.readouterr().err
    assert "forward_ms, backward_input_ms, backward_weight_ms" in measured
    job = tmp_path / "job.yaml"
    job.write_text("{stages: 2, microbatches: 4, forward_ms: 1, backward_ms: 2, replicas: two}")
    with pytest.raises(BadInput, match="--replicas"):
        _options_of(parser.parse_args(["demo", "--profile", str(job)]))


def test_turns_end_where_the_laboratory_changes() -> None:
    """What is so from the beginning, or to the end, changes nothing."""
    rules = ["2-3:40ms@7..13", "0-1:9ms@13..", "1-2:9ms@0..60"]
    options = DemoOptions(netlab=True, slow=rules)
    assert options.lab_changes == {7, 13}
    assert DemoOptions(slow=rules[:2]).lab_changes == set()


def test_a_report_names_the_port() -> None:
    config = {**sample_report().summary["config"], "slow_links": [], "slow_hosts": ["2:20MB/s"]}
    phases = {"healthy": (0, 9), "slow": (9, 20), "recovered": (20, 30)}
    report = replace(sample_report(config=config), phases=phases)
    assert headline(report) == "2.47× as fast while port 2 is slow"
    assert setting(report).endswith(
        "in iterations 9 to 19 all links of host 2 together pass 20MB/s each way"
    )
    assert slow_noun(config) == "slow port"
