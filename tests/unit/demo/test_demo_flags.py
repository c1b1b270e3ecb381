"""Flags of the demo: which contradict each other, which cannot be, and what the others become."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from view.view_sample import sample_report

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.cli.main import main
from megatron_adaptra.demo.options import DemoOptions
from megatron_adaptra.emulate.rules import PortRule
from megatron_adaptra.view.findings import headline, setting, slow_noun

RULES = {"--emulate-link": "2-3:40ms@3..6", "--emulate-worker": "0.1:2x@3..6"}
SLOW = {
    "--slow-link": "1-2", "--slow-worker": "0.1:2x", "--slow-path": "0.1-0.2:9ms",
    "--late-rank": "2:30ms", "--slow-replica": "2:2x", "--host": "2:20MB/s", "--delay": "10ms",
    "--bandwidth": "20MB/s", "--from-iteration": "3", "--to-iteration": "8",
}  # fmt: skip
CONTRADICTIONS = [
    *(((flag, rule, other, value), other, flag) for flag, rule in RULES.items()
      for other, value in SLOW.items()),
    *((("--no-emulation", other, value), other, "--no-emulation")
      for other, value in {**SLOW, **RULES}.items()),
    (("--no-emulation", "--netlab"), "--netlab", "--no-emulation"),
    (("--rank-from-env", "--netlab"), "--netlab", "--rank-from-env"),
]  # fmt: skip
TWO, FOUR = "--data-parallel 2", "--data-parallel 4"
LATE, REPLICA, PORT = f"{FOUR} --late-rank", f"{FOUR} --slow-replica", "--netlab --host 2:20MB/s"
# What cannot be -> the flag that is named, and what may be.
REFUSED = {
    "--emulate-link 2-3:40ms@80.. --iterations 20": ("--emulate-link", "20 iterations"),
    "--from-iteration -3": ("--from-iteration", "counted from 0"),
    "--netlab --stages 65": ("--stages", "at most 64 ranks"),
    "--slow-link 1-2,2>1": ("--slow-link", "only once"),
    f"{TWO} --slow-worker 2.1:2x": ("--slow-worker", "they are 0.0 to 1.3"),
    f"{TWO} --slow-worker 0.1:2x@3..": ("--slow-worker", "--from-iteration and --to-iteration"),
    f"{TWO} --slow-worker 0.1:2x,0.1:3x": ("--slow-worker", "each worker only once"),
    f"{TWO} --slow-path 0.1-2.2:9ms": ("--slow-path", "the workers are 0.0 to 1.3"),
    f"{TWO} --slow-path 1-2:9ms": ("--slow-path", "a path such as 0.1-0.2"),
    f"{TWO} --slow-path 0.1-0.2:9ms@3..": ("--slow-path", "--from-iteration and"),
    f"{TWO} --slow-path 0.1-0.2:9ms --slow-path 0.2>0.1:9ms": ("--slow-path", "each path only"),
    f"{TWO} --slow-path 0.1-0.2:9ms --slow-link 1-2": ("--slow-path", "each path only once"),
    f"{TWO} --slow-worker 0.1:2x --delay 9ms": ("--delay", "name one with --slow-link"),
    f"{TWO} --slow-path 0.1-0.2:9ms --bandwidth 1MB/s": ("--bandwidth", "--slow-link"),
    "--reroute swap": ("--reroute", "--data-parallel 2"),
    f"{TWO} --reroute auto --engine native": ("--reroute", "it needs --engine executor"),
    f"{TWO} --reroute swap --chunks 2": ("--reroute", "chunks of several replicas"),
    f"{TWO} --reroute auto --policy zb-h1": ("--reroute", "use adaptive"),
    "--late-rank 2:30ms": ("--late-rank", "--data-parallel 4"),
    f"{LATE} 4:30ms": ("--late-rank", "ranks are 0 to 3"),
    f"{LATE} 2:30ms,2:9ms": ("--late-rank", "each rank only once"),
    f"{LATE} 1": ("--late-rank", "such as 2:30ms"),
    f"{FOUR} --late-rank=-1:3ms": ("--late-rank", "such as 2:30ms"),
    f"{LATE} 1:soon": ("--late-rank", "a duration such as"),
    f"{LATE} 1:0ms": ("--late-rank", "above 0, and below the 25 s"),
    f"{LATE} 1:25s": ("--late-rank", "above 0, and below the 25 s"),
    f"{LATE} 1:3ms@4..": ("--late-rank", "--from-iteration and"),
    f"{TWO} --late-rank 0:1ms,1:2ms": ("--late-rank", "at least one rank has to come in time"),
    f"{LATE} {'1:2' * 99}": ("--late-rank", "such as 2:30ms"),
    f"{LATE} 2:9ms --stages 2 --netlab --host 8:5MB/s": ("--host", "the hosts are 0 to 7"),
    f"{LATE} 2:9ms --netlab --slow-link 2-3": ("--slow-link", "no link can be slow"),
    "--slow-replica 0:2x": ("--slow-replica", "--data-parallel 4"),
    f"{REPLICA} 4:2x": ("--slow-replica", "replicas are 0 to 3"),
    f"{REPLICA} 2:2x,2:3x": ("--slow-replica", "replica only once"),
    f"{REPLICA} 1.0:2x": ("--slow-replica", "such as 2:2x"),
    f"{REPLICA} 1:20ms": ("--slow-replica", "such as 2:2x"),
    f"{REPLICA} 1:0.5x": ("--slow-replica", "from 1x to 1000x"),
    f"{TWO} --slow-replica 0:2x,1:3x": ("--slow-replica", "at least one replica has to stay"),
    f"{REPLICA} 2:2x --reroute swap": ("--slow-replica", "beside --reroute swap"),
    f"{REPLICA} 2:2x --chunks 2": ("--slow-replica", "several --chunks"),
    f"{REPLICA} 2:2x --policy interleaved": ("--slow-replica", "several --chunks"),
    f"{REPLICA} 2:2x --slow-worker 2.0:3x": ("--slow-worker", "each worker only once"),
    "--host 2:20MB/s": ("--host", "it needs --netlab"),
    "--netlab --host 2:20MB/s@8..": ("--host", "--from-iteration and"),
    "--netlab --host 2:fast": ("--host", "a rate such as"),
    f"{PORT} --slow-link 2-3": ("--slow-link", "beside --netlab and --host"),
    f"{PORT} {TWO} --slow-path 0.1-0.2:9ms": ("--slow-path", "no link can be slow"),
    f"{PORT} --bandwidth 9MB/s": ("--bandwidth", "it is of links"),
}
SPAN = {"iterations": 30, "from_iteration": 9, "to_iteration": 20}
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
    line = refused(capsys, "--emulate-link", str(path))
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


def test_a_link_that_is_slow_from_the_start_has_no_healthy_phase() -> None:
    options = DemoOptions(emulate_link=["2-3:40ms"], iterations=30)
    assert options.phases == {"slow": (0, 30)}
    assert DemoOptions.load(options.dump()) == options


@pytest.mark.parametrize(
    ("options", "engine", "reroute", "dropout"),
    [
        ({"slow_workers": ["1.1:2x"]}, "executor", "auto", 0.0),
        ({"slow_workers": ["1.1:2x"], "engine": "native"}, "native", "swap", 0.1),
        ({"slow_workers": ["1.1:2x"], "reroute": "off"}, "native", "off", 0.1),
        ({"slow_workers": ["1.1:2x"], "emulate": False}, "native", "off", 0.1),
        ({"slow_workers": ["1.1:2x"], "policy": "1f1b"}, "native", "off", 0.1),
        ({"slow_workers": ["1.1:2x"], "chunks": 2}, "executor", "off", 0.1),
        ({"slow_workers": ["0.1:2x"], "data_parallel": 1}, "native", "off", 0.1),
        ({"slow_paths": ["0.1-0.2:40ms"]}, "native", "swap", 0.1),
        ({"slow_paths": ["0.1-0.2:40ms"], "engine": "executor"}, "executor", "auto", 0.0),
        ({"slow_links": ["1-2"]}, "native", "off", 0.1),
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
    slow = {"slow_workers": ["1.1:2x"], "slow_paths": ["0.1>1.2:40ms"], "data_parallel": 2}
    options = DemoOptions(**SPAN, **slow)
    assert options.worker_rules == ["1.1:2x@9..20"]
    assert options.rules == ["0.1>1.2:40ms@9..20"]
    assert options.slow_links == [], "the last link stays as it is"
    assert options.phases == {"healthy": (0, 9), "slow": (9, 20), "recovered": (20, 30)}
    assert DemoOptions.load(options.dump()) == options
    both = DemoOptions(**SPAN, **slow, slow_links=["2-3"])
    assert both.rules == ["2-3:40000us@9..20", "0.1>1.2:40ms@9..20"]
    assert DemoOptions(**SPAN, **slow, emulate=False).worker_rules == []


def test_rules_of_links_and_workers_make_the_phases() -> None:
    workers = ["1.1:2x@12..24", "1.1:4x"]
    options = DemoOptions(emulate_worker=workers, data_parallel=2, iterations=30)
    assert (options.worker_rules, options.rules, options.slow_links) == (workers, [], [])
    assert options.phases == {"healthy": (0, 12), "slow": (12, 24), "recovered": (24, 30)}
    assert (options.engine, options.reroute) == ("executor", "auto")
    assert DemoOptions.load(options.dump()) == options
    both = replace(options, emulate_link=["0.1-0.2:40ms@9..20"])
    assert both.phases["slow"] == (9, 24)
    assert both.rules == ["0.1-0.2:40ms@9..20"]
    always = DemoOptions(emulate_worker=["1.1:4x"], data_parallel=2, iterations=30)
    assert always.phases == {"slow": (0, 30)}
    with pytest.raises(BadInput, match=r"--emulate-worker '1\.1:4x@30\.\.': it has to begin"):
        DemoOptions(emulate_worker=["1.1:4x@30.."], data_parallel=2, iterations=30)


def test_hosts_of_a_laboratory_are_those_of_the_workers() -> None:
    """Rank, and host, is stage * replicas + replica."""
    path = DemoOptions(slow_paths=["0.1>1.2:40ms"], data_parallel=2, netlab=True)
    assert path.rules == []
    assert [(rule.source, rule.target) for rule in path.host_rules] == [(2, 5)]
    link = DemoOptions(slow_links=["1>2"], data_parallel=2, netlab=True)
    assert [(rule.source, rule.target) for rule in link.host_rules] == [(2, 4), (3, 5)]


def test_links_of_all_replicas_are_named_by_stages() -> None:
    rules = ["1-2:40ms", "1.2>1.3:40ms", "0.0>1.1:5ms"]
    options = DemoOptions(emulate_link=rules, data_parallel=2)
    assert options.slow_links == ["0.0>1.1", "1.2>1.3", "1>2", "2>1"]
    assert DemoOptions.load(options.dump()) == options


def test_ranks_are_late_in_the_slow_phase_and_nothing_else_is() -> None:
    options = DemoOptions(**OF_FOUR, **SPAN, late_ranks=["2:30ms", "0:1.5s"])
    assert options.lateness == {2: 0.03, 0: 1.5}
    assert options.phases == {"healthy": (0, 9), "slow": (9, 20), "recovered": (20, 30)}
    assert (options.rules, options.worker_rules, options.port_rules) == ([], [], [])
    assert (options.engine, options.reroute, options.dropout) == ("native", "off", 0.1)
    assert DemoOptions.load(options.dump()) == options
    both = DemoOptions(**OF_FOUR, **SPAN, late_ranks=["2:30ms"], slow_links=["0-1"])
    assert both.rules == ["0-1:40000us@9..20"]
    assert DemoOptions(**OF_FOUR, late_ranks=["2:30ms"], emulate=False).lateness == {}


def test_hosts_of_a_laboratory_have_ports_beside_late_ranks_alone() -> None:
    """Whose rate is the default, unless it is given; the first rule of a host counts."""
    plain = DemoOptions(**OF_FOUR, netlab=True)
    assert (plain.port_rules, len(plain.host_rules)) == ([], 8)
    late = DemoOptions(**OF_FOUR, netlab=True, late_ranks=["2:30ms"])
    assert late.host_rules == []
    assert {(rule.host, rule.rate) for rule in late.port_rules} == {(h, 5e6) for h in range(8)}
    own = DemoOptions(
        **OF_FOUR, netlab=True, late_ranks=["2:30ms"], hosts=["3:1MB/s@4..", "all:9MB/s"]
    )
    assert [(rule.host, rule.rate, rule.first) for rule in own.port_rules[:2]] == [
        (3, 1e6, 4), (0, 9e6, 0),
    ]  # fmt: skip
    with pytest.raises(BadInput, match="above 0"):
        DemoOptions(**OF_FOUR, netlab=True, late_ranks=["2:30ms"], hosts=["all:0MB/s"])


def test_late_ranks_make_all_reduces_found_unless_the_file_has_them(tmp_path: Path) -> None:
    (tmp_path / "direct.yaml").write_text("allreduce: direct\n")
    late = {**OF_FOUR, "late_ranks": ["2:30ms"]}
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
    options = DemoOptions(**OF_FOUR, **SPAN, slow_replicas=["2:2x", "0:1.5x"])
    assert options.worker_rules == [
        "2.0:2x@9..20", "2.1:2x@9..20", "0.0:1.5x@9..20", "0.1:1.5x@9..20",
    ]  # fmt: skip
    assert options.rules == []
    assert (options.engine, options.reroute, options.dropout) == ("native", "off", 0.0)
    assert DemoOptions.load(options.dump()) == options
    assert DemoOptions(**OF_FOUR, slow_replicas=["2:2x"], dropout=0.2).dropout == 0.2
    both = DemoOptions(**OF_FOUR, **SPAN, slow_replicas=["2:2x"], slow_workers=["1.1:3x"])
    assert both.worker_rules == ["1.1:3x@9..20", "2.0:2x@9..20", "2.1:2x@9..20"]
    assert both.reroute == "off", "one remedy or the other"


def test_where_ranks_share_cores_all_ops_wait(cores: Callable[[int], None]) -> None:
    """A rule of a slow worker comes first, and its factor is on top of what all take."""
    cores(4)
    slow = {"slow_replicas": ["2:2x"], "slow_workers": ["1.1:1.5x"]}
    options = DemoOptions(**OF_FOUR, **SPAN, **slow)
    every = [f"{replica}.{stage}:4x" for replica in range(4) for stage in range(2)]
    assert options.worker_rules == ["1.1:6x@9..20", "2.0:8x@9..20", "2.1:8x@9..20", *every]
    cores(1)
    assert DemoOptions.load(options.dump()) == options, "ranks run what the launcher has found"
    assert DemoOptions(**OF_FOUR, slow_workers=["1.1:2x"]).op_times == 1
    assert DemoOptions(**OF_FOUR, **slow, emulate=False).op_times == 1


def test_slow_replicas_make_counts_found_unless_the_file_has_them(tmp_path: Path) -> None:
    (tmp_path / "full.yaml").write_text("sync: full\n")
    (tmp_path / "named.yaml").write_text("sync: share\nsync_counts: 13,13,9,13\n")
    slow = {**OF_FOUR, "slow_replicas": ["2:2x"]}
    assert DemoOptions(**OF_FOUR).sync == "full"
    assert DemoOptions(**slow, emulate=False).sync == "full"
    assert (DemoOptions(**slow).sync, DemoOptions(**slow).sync_counts) == ("share", "")
    assert DemoOptions(**slow, config=str(tmp_path / "full.yaml")).sync == "full"
    named = DemoOptions(**slow, config=str(tmp_path / "named.yaml"))
    assert (named.sync, named.sync_counts) == ("share", "13,13,9,13")


def test_ports_are_slow_in_the_slow_phase_and_nothing_else_is() -> None:
    """Of several rules for a host the first one counts."""
    options = DemoOptions(
        netlab=True, hosts=["2:20MB/s", "all:50MB/s"], from_iteration=9, to_iteration=20
    )
    assert options.port_rules[0] == PortRule(2, 20e6, 9, 20)
    assert {(rule.first, rule.end) for rule in options.port_rules} == {(9, 20)}
    assert options.slow_hosts == ["0:50MB/s", "1:50MB/s", "2:20MB/s", "3:50MB/s"]
    assert (options.slow_links, options.rules, options.host_rules) == ([], [], [])
    assert options.phases == {"healthy": (0, 9), "slow": (9, 20), "recovered": (20, 60)}
    assert options.lab_changes == {9, 20}
    assert DemoOptions.load(options.dump()) == options


def test_turns_end_where_the_laboratory_changes() -> None:
    """What is so from the beginning, or to the end, changes nothing."""
    rules = ["2-3:40ms@7..13", "0-1:9ms@13..", "1-2:9ms@0..60"]
    options = DemoOptions(netlab=True, emulate_link=rules)
    assert options.lab_changes == {7, 13}
    assert DemoOptions(emulate_link=rules[:2]).lab_changes == set()


def test_a_report_names_the_port() -> None:
    config = {**sample_report().summary["config"], "slow_links": [], "slow_hosts": ["2:20MB/s"]}
    phases = {"healthy": (0, 9), "slow": (9, 20), "recovered": (20, 30)}
    report = replace(sample_report(config=config), phases=phases)
    assert headline(report) == "2.47× as fast while port 2 is slow"
    assert setting(report).endswith(
        "in iterations 9 to 19 all links of host 2 together pass 20MB/s each way"
    )
    assert slow_noun(config) == "slow port"
