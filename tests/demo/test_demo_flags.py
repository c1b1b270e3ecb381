"""Flags of the demo that contradict each other, and files without anything in them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_adaptra.cli.main import main
from megatron_adaptra.demo.options import DemoOptions
from megatron_adaptra.errors import BadInput

RULE = ("--emulate-link", "2-3:40ms@3..6")
WORKER = ("--emulate-worker", "0.1:2x@3..6")
CONTRADICTIONS = [
    ((*RULE, "--slow-link", "1-2"), "--slow-link", "--emulate-link"),
    ((*RULE, "--delay", "10ms"), "--delay", "--emulate-link"),
    ((*RULE, "--bandwidth", "20MB/s"), "--bandwidth", "--emulate-link"),
    ((*RULE, "--from-iteration", "3"), "--from-iteration", "--emulate-link"),
    ((*RULE, "--to-iteration", "8"), "--to-iteration", "--emulate-link"),
    ((*RULE, "--slow-path", "0.1-0.2:9ms"), "--slow-path", "--emulate-link"),
    ((*RULE, "--slow-worker", "0.1:2x"), "--slow-worker", "--emulate-link"),
    ((*WORKER, "--slow-worker", "0.1:2x"), "--slow-worker", "--emulate-worker"),
    ((*WORKER, "--slow-link", "1-2"), "--slow-link", "--emulate-worker"),
    ((*WORKER, "--to-iteration", "8"), "--to-iteration", "--emulate-worker"),
    (("--no-emulation", *RULE), "--emulate-link", "--no-emulation"),
    (("--no-emulation", *WORKER), "--emulate-worker", "--no-emulation"),
    (("--no-emulation", "--slow-worker", "0.1:2x"), "--slow-worker", "--no-emulation"),
    (("--no-emulation", "--slow-path", "0.1-0.2:9ms"), "--slow-path", "--no-emulation"),
    (("--no-emulation", "--slow-link", "1-2"), "--slow-link", "--no-emulation"),
    (("--no-emulation", "--delay", "10ms"), "--delay", "--no-emulation"),
    (("--no-emulation", "--bandwidth", "20MB/s"), "--bandwidth", "--no-emulation"),
    (("--no-emulation", "--netlab"), "--netlab", "--no-emulation"),
    (("--rank-from-env", "--netlab"), "--netlab", "--rank-from-env"),
]


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


@pytest.mark.parametrize("text", ["links: []\n", "links:\n", "links: null\n", "{}\n"])
def test_a_scenario_without_links(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(text)
    line = refused(capsys, "--emulate-link", str(path))
    assert str(path) in line
    assert "it has to be a list of at least one, each with a link and a delay" in line


def test_the_flag_that_is_wrong_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "--emulate-link", "2-3:40ms@80..", "--iterations", "20")
    assert "--emulate-link" in line
    assert "20 iterations" in line
    assert "--from-iteration" in refused(capsys, "--from-iteration", "-3")
    line = refused(capsys, "--netlab", "--stages", "65")
    assert line.startswith("adaptra: error: --stages")
    assert "at most 64 ranks" in line
    assert "only once" in refused(capsys, "--slow-link", "1-2,2>1")


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
    ("words", "flag", "allowed"),
    [
        (["--slow-worker", "2.1:2x"], "--slow-worker", "they are 0.0 to 1.3"),
        (["--slow-worker", "0.1:2x@3.."], "--slow-worker", "--from-iteration and --to-iteration"),
        (["--slow-worker", "0.1:2x,0.1:3x"], "--slow-worker", "each worker only once"),
        (["--slow-path", "0.1-2.2:9ms"], "--slow-path", "the workers are 0.0 to 1.3"),
        (["--slow-path", "1-2:9ms"], "--slow-path", "a path such as 0.1-0.2"),
        (["--slow-path", "0.1-0.2:9ms@3.."], "--slow-path", "--from-iteration and"),
        (
            ["--slow-path", "0.1-0.2:9ms", "--slow-path", "0.2>0.1:9ms"],
            "--slow-path", "each path only once",
        ),
        (
            ["--slow-path", "0.1-0.2:9ms", "--slow-link", "1-2"],
            "--slow-path", "each path only once",
        ),
        (["--slow-worker", "0.1:2x", "--delay", "9ms"], "--delay", "name one with --slow-link"),
        (["--slow-path", "0.1-0.2:9ms", "--bandwidth", "1MB/s"], "--bandwidth", "--slow-link"),
    ],
)  # fmt: skip
def test_a_slow_worker_or_path_that_cannot_be(
    words: list[str], flag: str, allowed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, "--data-parallel", "2", *words)
    assert line.startswith(f"adaptra: error: {flag} ")
    assert allowed in line


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


@pytest.mark.parametrize(
    ("words", "allowed"),
    [
        (["--data-parallel", "1", "--reroute", "swap"], "--data-parallel 2"),
        (["--reroute", "auto", "--engine", "native"], "it needs --engine executor"),
        (["--reroute", "swap", "--chunks", "2"], "chunks of several replicas"),
        (["--reroute", "auto", "--policy", "zb-h1"], "use adaptive"),
    ],
)
def test_routes_that_cannot_be(
    words: list[str], allowed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, "--data-parallel", "2", *words)
    assert line.startswith("adaptra: error: --reroute ")
    assert allowed in line


def test_what_gets_slow_becomes_rules_of_the_slow_phase() -> None:
    span = {"iterations": 30, "from_iteration": 9, "to_iteration": 20}
    slow = {"slow_workers": ["1.1:2x"], "slow_paths": ["0.1>1.2:40ms"], "data_parallel": 2}
    options = DemoOptions(**span, **slow)
    assert options.worker_rules == ["1.1:2x@9..20"]
    assert options.rules == ["0.1>1.2:40ms@9..20"]
    assert options.slow_links == [], "the last link stays as it is"
    assert options.phases == {"healthy": (0, 9), "slow": (9, 20), "recovered": (20, 30)}
    assert DemoOptions.load(options.dump()) == options
    both = DemoOptions(**span, **slow, slow_links=["2-3"])
    assert both.rules == ["2-3:40000us@9..20", "0.1>1.2:40ms@9..20"]
    assert DemoOptions(**span, **slow, emulate=False).worker_rules == []


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
