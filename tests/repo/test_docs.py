"""The docs name what there is: scripts/check_docs.py, and that it finds what it is for."""

import re
import sys
from pathlib import Path

import pytest

from megatron_adaptra.cli.main import COMMANDS, main

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import check_docs  # noqa: E402


def test_the_docs_of_this_repository_are_true() -> None:
    assert check_docs.faults(ROOT) == []


# Words of the code that no user needs; the two pages are for those who change it.
OURS = re.compile(r"\b(slack|arms?|light microbatch|nobody waits who)\b", re.IGNORECASE)
KEY = "`arms`"  # of summary.json, and so on the page that describes it
INSIDE = ("testing.md", "wire-protocol.md")


def test_pages_for_users_do_without_our_own_words() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        if page.name not in INSIDE:
            assert OURS.findall(page.read_text().replace(KEY, "")) == [], page.name


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "run"])
def test_help_does_without_our_own_words(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert OURS.findall(capsys.readouterr().out) == []
