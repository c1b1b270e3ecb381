"""The demo's hosts of a laboratory whose ports get slow, instead of links."""

from __future__ import annotations

import pytest
from demo.refused import refused_in_a_line

from megatron_adaptra.demo.options import DemoOptions
from megatron_adaptra.transport.rules import PortRule
from megatron_adaptra.view.findings import headline, setting, slow_noun
from megatron_adaptra.view.report import Report

PORT = ("--netlab", "--host", "2:20MB/s")


@pytest.mark.parametrize(
    ("words", "flag", "value", "allowed"),
    [
        (("--host", "2:20MB/s"), "--host", "2:20MB/s", "it needs --netlab"),
        (("--netlab", "--host", "4:20MB/s"), "--host", "4:20MB/s", "the hosts are 0 to 3"),
        (("--netlab", "--host", "2:20MB/s@8.."), "--host", "2:20MB/s@8..", "--from-iteration and"),
        (("--netlab", "--host", "2:fast"), "--host", "fast", "a rate such as"),
        ((*PORT, "--slow-link", "2-3"), "--slow-link", "2-3", "beside --netlab and --host"),
        (
            (*PORT, "--data-parallel", "2", "--slow-path", "0.1-0.2:9ms"),
            "--slow-path", "0.1-0.2:9ms", "no link can be slow",
        ),
        ((*PORT, "--bandwidth", "9MB/s"), "--bandwidth", "9MB/s", "it is of links"),
        ((*PORT, "--emulate-link", "2-3:9ms"), "--host", "2:20MB/s", "beside --emulate-link"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_a_line(
    words: tuple[str, ...], flag: str, value: str, allowed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused_in_a_line(words, flag, value, allowed, capsys)


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
    config = {"stages": 4, "microbatches": 12, "iterations": 30, "slow_hosts": ["2:20MB/s"]}
    phases = {"healthy": (0, 9), "slow": (9, 20), "recovered": (20, 30)}
    summary = {"config": config, "speedup_slow": 1.5}
    report = Report("demo", summary, [], phases)
    assert headline(report) == "1.50× as fast while port 2 is slow"
    assert setting(report).endswith(
        "in iterations 9 to 19 all links of host 2 together pass 20MB/s each way"
    )
    assert slow_noun(summary) == "slow port"
