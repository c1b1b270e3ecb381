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


WORD = next(iter(check_docs.WORDS))
INSTEAD = f"{check_docs.WORDS[WORD]}, or the sentence anew"
SAME_NAME = "tests/a/test_it.py has the same name, which pytest cannot import: rename one"
V = "ADAPTRA_"  # apart from the rest: such a name in this file would have to be in the docs
PAGES = {
    "README.md": "[more](docs/README.md#the-index), [a file](scripts/go.sh), [out](https://x.y/z)\n",
    "docs/README.md": "# The index\n\n[`a`](a.md#what-it-is)\n\n```\n[none](gone.md)\n```\n",
    "docs/a.md": f"## What *it* is?\n\n`scripts/go.sh` reads `{V}GO`, `many` does not.\n",
    "scripts/go.sh": f"echo ${V}GO\n",
    "scripts/many/__main__.py": "",
    "scripts/many/part.py": "",
    "tests/a/test_it.py": "",
}


@pytest.mark.parametrize(
    ("page", "text", "says"),
    [
        ("docs/a.md", "", None),
        ("docs/a.md", "[x](b.md)", "docs/a.md: link b.md: there is no docs/b.md"),
        ("docs/a.md", "[x](README.md#b)", "link README.md#b: docs/README.md has no heading for #b"),
        ("docs/a.md", "[x](../../b.md)", "docs/a.md: link ../../b.md: leads out of the repository"),
        ("docs/b.md", "alone", "docs/b.md: no link leads there from README.md"),
        ("docs/a.md", "--adaptra-tale", "docs/a.md: there is no flag --adaptra-tale"),
        ("docs/a.md", f"{V}GONE=1", f"docs/a.md: there is no variable {V}GONE"),
        ("docs/a.md", "scripts/gone.sh", "docs/a.md: there is no script scripts/gone.sh"),
        ("scripts/new.sh", "true", "no page names the script scripts/new.sh"),
        ("scripts/few/__main__.py", "", "no page names the script scripts/few/__main__.py"),
        ("scripts/go.sh", f"echo ${V}NEW", f"no page names the variable {V}NEW"),
        ("docs/a.md", "Of TensorBoard and a keyboard.", None),
        ("docs/a.md", WORD.upper(), f"docs/a.md:4: '{WORD.upper()}': write {INSTEAD}"),
        ("patches/a.py", f"_the_{WORD} = 1", f"patches/a.py:1: '{WORD}': write {INSTEAD}"),
        ("configs/a.yaml", f"is{WORD.title()}: 1", f"'{WORD.title()}': write {INSTEAD}"),
        ("csrc/a.hpp", f"// {WORD}", f"csrc/a.hpp:1: '{WORD}': write {INSTEAD}"),
        ("run", f"# {WORD}", f"run:1: '{WORD}': write {INSTEAD}"),
        ("CHANGELOG.md", WORD, None),
        ("tests/b/test_it.py", "", f"tests/b/test_it.py: {SAME_NAME}"),
        ("tests/test_it.py", "", f"tests/test_it.py: {SAME_NAME}"),
        ("tests/b/test_it_too.py", "", None),
        ("tests/b/it.py", "", None),
        ("docs/test_it.py", "", None),
    ],
)
def test_a_fault_is_found(page: str, text: str, says: str | None, tmp_path: Path) -> None:
    for name, words in PAGES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(words)
    (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
    with (tmp_path / page).open("a") as out:
        out.write(text)
    # The flags are those of the real package: a page of them would be longer than this test.
    found = [fault for fault in check_docs.faults(tmp_path) if "names the flag" not in fault]
    assert len(found) == (says is not None), found
    assert says is None or found[0].endswith(says)


def test_words_are_counted_by_package(tmp_path: Path) -> None:
    for name in ("go.md", "megatron_adaptra/run/a/b.py", "megatron_adaptra/run/c.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{WORD} {WORD}s\n")
    assert check_docs.word_counts(tmp_path) == {"go.md": 1, "megatron_adaptra/run": 2}
