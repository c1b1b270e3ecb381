#!/usr/bin/env python3
"""Write patches/core_vX.Y.patch: our two statements for pretrain_gpt.py of a Megatron-LM checkout.

A patch has no context lines, so it contains nothing of Megatron's text; its index line names the
one file it is for by full blob ids. scripts/apply_patches.sh checks them and applies it.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = "pretrain_gpt.py"
INSERTED = (
    "import megatron_adaptra  # registers the --adaptra flags, see its docs/megatron.md",
    "",
    "megatron_adaptra.register()",
    "",
)
HEADER = """\
The --adaptra flags for {script} of Megatron-LM, release line core_v{line}.
Made from megatron-core {version}{commit}.
Put in and taken out by scripts/apply_patches.sh CHECKOUT; made anew by
scripts/make_patches.py CHECKOUT.

"""


class Refused(Exception):
    """One line about what is wrong with the input."""


class Release(NamedTuple):
    major: int
    minor: int
    patch: int
    pre_release: str

    @property
    def line(self) -> str:
        return f"{self.major}.{self.minor}"

    def __str__(self) -> str:
        return f"{self.line}.{self.patch}{self.pre_release}"


def parse(path: Path, content: bytes) -> ast.Module:
    try:
        return ast.parse(content)
    except (SyntaxError, ValueError) as error:
        raise Refused(f"{path} is not Python that {sys.executable} can read: {error}") from None


def read(checkout: Path, name: str) -> bytes:
    try:
        return (checkout / name).read_bytes()
    except OSError as error:
        raise Refused(
            f"{checkout} is not a Megatron-LM checkout: {name}: {error.strerror}"
        ) from None


def release(checkout: Path) -> Release:
    """The version in megatron/core/package_info.py, without running it, because it calls git."""
    name = "megatron/core/package_info.py"
    values = {}
    for node in parse(checkout / name, read(checkout, name)).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            values.update((t.id, node.value.value) for t in node.targets if isinstance(t, ast.Name))
    try:
        return Release(
            int(values["MAJOR"]), int(values["MINOR"]), int(values["PATCH"]), values["PRE_RELEASE"]
        )
    except (KeyError, TypeError, ValueError):
        raise Refused(f"{checkout / name} does not say MAJOR, MINOR, PATCH, PRE_RELEASE") from None


def imported(statement: ast.stmt) -> Iterator[str]:
    """The modules that are imported when `statement` runs; the body of a function runs later."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            waiting.extend(ast.iter_child_nodes(node))


def place(body: list[ast.stmt]) -> int | None:
    """The number of the statement before which ours belong: before torch and megatron come in."""
    for number, statement in enumerate(body):
        roots = {name.split(".")[0] for name in imported(statement)}
        if roots - sys.stdlib_module_names:
            # A line is inserted whole: step back over statements that share it (`import a; b()`).
            while number and body[number - 1].end_lineno == body[number].lineno:
                number -= 1
            return number
    return None


def insert(path: Path, before: bytes) -> tuple[int, bytes]:
    """Number of the line after which ours are added, and the file with them."""
    body = parse(path, before).body
    if any(name.split(".")[0] == "megatron_adaptra" for s in body for name in imported(s)):
        raise Refused(f"{path} imports megatron_adaptra already; give a checkout without our lines")
    number = place(body)
    if number is None:
        raise Refused(f"{path}: no place found: no top-level import beyond the standard library")
    after = body[number].lineno - 1
    lines = before.split(b"\n")
    ours = "\n".join(INSERTED).encode()
    changed = b"\n".join([*lines[:after], ours, *lines[after:]])
    # The lines must have become two statements there: not the middle of something longer.
    expected = [*body[:number], *ast.parse(ours).body, *body[number:]]
    try:
        fits = [*map(ast.dump, ast.parse(changed).body)] == [*map(ast.dump, expected)]
    except SyntaxError:
        fits = False
    if not fits:
        raise Refused(f"{path}: no place found: line {after + 1} goes on with a line before it")
    return after, changed


def blob(content: bytes) -> str:
    """The name that git gives to a file with this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def commit(checkout: Path) -> str:
    if not (checkout / ".git").exists():
        return ""
    done = subprocess.run(
        ["git", "-C", checkout, "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return f", commit {done.stdout.strip()}" if done.returncode == 0 else ""


def make(checkout: Path) -> tuple[str, str, str]:
    """Release line, pre-image and text of the patch for a checkout."""
    version = release(checkout)
    # In the repository lines end in LF, whatever core.autocrlf made of them in this checkout.
    before = read(checkout, SCRIPT).replace(b"\r\n", b"\n")
    after, changed = insert(checkout / SCRIPT, before)
    header = HEADER.format(
        script=SCRIPT, line=version.line, version=version, commit=commit(checkout)
    )
    diff = [
        f"diff --git a/{SCRIPT} b/{SCRIPT}",
        f"index {blob(before)}..{blob(changed)} 100644",
        f"--- a/{SCRIPT}",
        f"+++ b/{SCRIPT}",
        f"@@ -{after},0 +{after + 1},{len(INSERTED)} @@",
        *("+" + line for line in INSERTED),
    ]
    return version.line, blob(before), header + "\n".join(diff) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", nargs="+", type=Path, help="a Megatron-LM checkout")
    parser.add_argument("--out", type=Path, default=ROOT / "patches", help="folder to write into")
    options = parser.parse_args(arguments)
    made: dict[str, tuple[str, str]] = {}
    try:
        for checkout in options.checkout:
            line, before, text = make(checkout)
            if made.get(line, (before, ""))[0] != before:
                raise Refused(
                    f"{checkout}: another checkout of core_v{line} has another {SCRIPT}; "
                    "a line has one patch: make them one by one, with an --out for each"
                )
            made[line] = (before, text)
        options.out.mkdir(parents=True, exist_ok=True)
        for line, (before, text) in made.items():
            path = options.out / f"core_v{line}.patch"
            path.write_text(text, newline="\n")
            print(f"{path}: for {SCRIPT} {before}")
    except (Refused, OSError) as error:
        print(f"make_patches: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
