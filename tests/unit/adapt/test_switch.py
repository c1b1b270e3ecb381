"""The switch of a running job: a file, and what it does while that cannot be used."""

import os
from pathlib import Path

import pytest

from megatron_adaptra.adapt.switch import Switch, acts_of, always, never
from megatron_adaptra.config import AdaptraConfig


def lines(capfd: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capfd.readouterr().err.splitlines() if line.startswith("adaptra: ")]


def test_it_follows_the_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "act"
    acts = Switch(file, "rank 0 on here", True)
    assert acts()
    for text in ("on\n", "off\n", " OFF", "on", "off"):
        file.write_text(text)
        on = text.strip() == "on"
        assert [acts(), acts()] == [on, on]
    file.unlink()
    assert acts()
    found = lines(capfd)
    assert [" acting is on: " in line for line in found] == [False, True, False, True]
    assert all(line.startswith("adaptra: rank 0 on here: ") for line in found)
    assert all(str(file) in line for line in found)


@pytest.mark.parametrize("before", ["on", "off"])
def test_what_cannot_be_used_changes_nothing_and_is_logged_once(
    before: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "act"
    acts = Switch(file, "rank 0 on here", True)
    file.write_text(before)
    assert acts() == (before == "on")
    lines(capfd)

    def stays(words: str) -> None:
        assert [acts() == (before == "on") for _ in range(3)] == [True] * 3
        (line,) = lines(capfd)
        assert f"acting stays {before}: " in line
        assert words in line

    file.write_text("offf")
    stays("'offf': it has to be on or off")
    file.write_text("off" * 1000)
    stays("more than 64 bytes")
    file.write_bytes(b"\xff")
    stays("no UTF-8")
    file.unlink()
    file.mkdir()
    stays("cannot be read")
    file.rmdir()
    os.mkfifo(file)
    stays("a pipe")
    file.unlink()
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    file.symlink_to(loop)
    stays("symbolic links")
    file.unlink()
    file.write_text("off")
    assert not acts()


def test_other_ranks_log_no_change(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "act"
    acts = Switch(file, "rank 4 on there", False)
    file.write_text("off")
    assert not acts()
    assert lines(capfd) == []


def test_settings_name_it(tmp_path: Path) -> None:
    def made(**settings: str) -> object:
        return acts_of(AdaptraConfig.from_mapping(settings, "a test"), "rank 0", False)

    assert made() is always
    assert made(act="observe") is never
    assert isinstance(made(act="exact", act_file=str(tmp_path / "act")), Switch)
