#!/usr/bin/env python3
"""Check the Markdown of this repository, the words of its files, and the names of its tests.

Every relative link and its anchor leads somewhere; every page under docs/ can be reached from
README.md; every script, flag and ADAPTRA_ variable that a page names exists, and every one that
exists is named on some page. No file, except WORDS_FREE, uses one of WORDS. No two test files have
one name. One line per fault; exit status 1 if there is one. No network.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"!?\[[^\]]*\]\(([^()\s]+(?:\([^()\s]*\))?)\)")
CODE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]+`", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
FLAG = re.compile(r"--adaptra(?:-[a-z0-9]+)*\b(?!-\*|\*)")
VARIABLE = re.compile(r"\bADAPTRA_[A-Z0-9_]+\b")
SCRIPT = re.compile(r"\bscripts/[\w/]+\.(?:sh|py|sbatch|yaml)\b")
HISTORY = ("CHANGELOG.md",)  # names things that have gone, and may
# Metaphors and idioms that a newcomer has to guess, each with what to write instead.
WORDS = {
    **dict.fromkeys(("said", "told", "tell", "tells"), "reported, printed, sent, shows"),
    **dict.fromkeys(("hear", "hears", "heard", "overheard"), "received; no message arrived for"),
    **dict.fromkeys(("somebody", "whoever", "everybody", "everyone"), "rank, peer, the caller"),
    **dict.fromkeys(("befall", "befalls", "befallen"), "happens to, fails"),
    **dict.fromkeys(("errand", "errands"), "blocking call"),
    **dict.fromkeys(("lane", "lanes"), "connection, link, path, stream, half of a ring"),
    **dict.fromkeys(("seat", "seats"), "fixture, place"),
    **dict.fromkeys(("verdict", "verdicts"), "decision, result"),
    **dict.fromkeys(("board", "boards"), "store, rendezvous"),
    "goodbye": "close",
    "whereabouts": "address",
}
WORDS_FREE = (
    "CHANGELOG.md",
    "tests/unit/golden/",
    "scripts/check_docs.py",
)  # this list; what is past
WORDS_ALLOWED = {  # a pattern; why
    r"TensorBoard|tensorboard": "a product's name",
    r"[\"'`]verdict[\"'`]": "a key of the JSON of `adaptra doctor` and scripts/drift.py",
    r"[mM]ultiGpuBoard": "fields of CUDA's cudaDeviceProp",
}
TEXT = {
    "", ".cpp", ".h", ".hpp", ".json", ".md", ".patch", ".py", ".pyi", ".sbatch", ".sh", ".supp",
    ".toml", ".txt", ".yaml", ".yml",
}  # fmt: skip
PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")  # of snake_case and CamelCase, and whole words


def tracked(root: Path) -> list[Path]:
    """The files that git knows or would take; of an archive, all."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    names = done.stdout.splitlines() if done.returncode == 0 else []
    found = [root / name for name in names] or list(root.rglob("*"))
    return sorted(path for path in found if path.is_file())


def anchors(text: str) -> set[str]:
    """Of the headings, as GitHub makes them."""
    found: set[str] = set()
    for title in HEADING.findall(re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        number = 0
        while (name := f"{slug}-{number}" if number else slug) in found:
            number += 1
        found.add(name)
    return found


def links(page: Path) -> list[tuple[str, Path, str]]:
    """Relative ones: as written, where it leads, the anchor."""
    found = []
    for target in LINK.findall(CODE.sub("", page.read_text())):
        if not re.match(r"[a-z]+:", target):
            name, _, anchor = target.partition("#")
            found.append((target, (page.parent / name).resolve() if name else page, anchor))
    return found


def link_faults(pages: list[Path], root: Path) -> Iterator[str]:
    for page in pages:
        for target, path, anchor in links(page):
            where = f"{page.relative_to(root)}: link {target}"
            if not path.is_relative_to(root):
                yield f"{where}: leads out of the repository"
            elif not path.exists():
                yield f"{where}: there is no {path.relative_to(root)}"
            elif anchor and path.suffix == ".md" and anchor not in anchors(path.read_text()):
                yield f"{where}: {path.relative_to(root)} has no heading for #{anchor}"


def unreachable(pages: list[Path], root: Path) -> Iterator[str]:
    seen, todo = set(), [root / "README.md"]
    while todo:
        page = todo.pop()
        if page in seen or not page.is_file():
            continue
        seen.add(page)
        todo += [path for _, path, _ in links(page) if path.suffix == ".md"]
    for page in pages:
        if page.is_relative_to(root / "docs") and page not in seen:
            yield f"{page.relative_to(root)}: no link leads there from README.md"


def name_faults(pages: list[Path], files: list[Path], root: Path) -> Iterator[str]:
    """What pages name and does not exist; what exists and no page names."""
    sys.path.insert(0, str(root))
    from megatron_adaptra.config import add_flags

    settings = add_flags(argparse.ArgumentParser(add_help=False))._actions
    flags = {option for action in settings for option in action.option_strings}
    code = [p for p in files if p.suffix in (".py", ".sh", ".sbatch", ".yaml")]
    variables = {name for path in code for name in VARIABLE.findall(path.read_text())}
    scripts = {
        str(path.relative_to(root))
        for path in files
        if path.is_relative_to(root / "scripts") and path.suffix != ".md"
    }
    programs = {path.parent for path in files if path.name == "__main__.py"}
    texts = {page: page.read_text() for page in pages if page.name not in HISTORY}
    for what, pattern, exist in (
        ("flag", FLAG, flags),
        ("variable", VARIABLE, variables),
        ("script", SCRIPT, scripts),
    ):
        for page, text in texts.items():
            for name in sorted(set(pattern.findall(text)) - exist):
                yield f"{page.relative_to(root)}: there is no {what} {name}"
        everything = "\n".join(texts.values())
        for name in sorted(exist):
            # The page of the scripts names a folder that is a program, and no other folder.
            folder = (root / name).parent
            word = folder.name if folder in programs else name.rpartition("/")[2]
            if not re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", everything):
                yield f"no page names the {what} {name}"


def word_faults(files: list[Path], root: Path) -> Iterator[tuple[str, str]]:
    """The path of each file that uses one of WORDS, as often as it does; and the fault."""
    allowed = re.compile("|".join(WORDS_ALLOWED))
    for path in files:
        name = path.relative_to(root).as_posix()
        if path.suffix not in TEXT or name.startswith(WORDS_FREE):
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            for word in PART.findall(allowed.sub("", line)):
                if better := WORDS.get(word.lower()):
                    yield name, f"{name}:{number}: '{word}': write {better}, or the sentence anew"


def same_names(files: list[Path], root: Path) -> Iterator[str]:
    """Test files of one name: pytest imports them as one module, and stops."""
    first: dict[str, str] = {}
    for path in files:
        name = path.relative_to(root).as_posix()
        if not (name.startswith("tests/") and path.match("test_*.py")):
            continue
        if (other := first.setdefault(path.name, name)) != name:
            yield f"{name}: {other} has the same name, which pytest cannot import: rename one"


def word_counts(root: Path) -> Counter[str]:
    """How often WORDS are used, by package: a folder and the one below it."""
    found = (name for name, _ in word_faults(tracked(root), root))
    return Counter("/".join(name.split("/")[:-1][:2]) or name for name in found)


def faults(root: Path) -> list[str]:
    files = tracked(root)
    pages = [path for path in files if path.suffix == ".md"]
    found = [*link_faults(pages, root), *unreachable(pages, root)]
    found += [fault for _, fault in word_faults(files, root)]
    found += same_names(files, root)
    return found + list(name_faults(pages, files, root))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--words", action="store_true", help="count the words to avoid by package")
    if parser.parse_args().words:
        for package, count in sorted(word_counts(ROOT).items()):
            print(f"{count:5} {package}")
        return 0
    found = faults(ROOT)
    for fault in found:
        print(f"check_docs: {fault}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
