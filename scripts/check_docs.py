#!/usr/bin/env python3
"""Check that the Markdown of this repository is true where a program can tell. No network.

Every relative link and its anchor leads somewhere; every page under docs/ can be reached from
README.md; every script, flag and ADAPTRA_ variable that a page names exists, and every one that
exists is named on some page. One line per fault; exit status 1 if there is one.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
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
            word = name.rpartition("/")[2]  # the page of the scripts leaves out the folder
            if not re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", everything):
                yield f"no page names the {what} {name}"


def faults(root: Path) -> list[str]:
    files = tracked(root)
    pages = [path for path in files if path.suffix == ".md"]
    found = [*link_faults(pages, root), *unreachable(pages, root)]
    return found + list(name_faults(pages, files, root))


def main() -> int:
    found = faults(ROOT)
    for fault in found:
        print(f"check_docs: {fault}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
