"""Flags of the demo that contradict each other, and files without anything in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_adaptra.cli.main import main
from megatron_adaptra.demo.options import DemoOptions

RULE = ("--emulate-link", "2-3:40ms@3..6")
CONTRADICTIONS = [
    ((*RULE, "--slow-link", "1-2"), "--slow-link", "--emulate-link"),
    ((*RULE, "--delay", "10ms"), "--delay", "--emulate-link"),
    ((*RULE, "--bandwidth", "20MB/s"), "--bandwidth", "--emulate-link"),
    ((*RULE, "--from-iteration", "3"), "--from-iteration", "--emulate-link"),
    ((*RULE, "--to-iteration", "8"), "--to-iteration", "--emulate-link"),
    (("--no-emulation", *RULE), "--emulate-link", "--no-emulation"),
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


@pytest.mark.parametrize("text", ["engine: stock", "policy: zb-h1", "timeout: 3", "record: x"])
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
