"""Deliberate faults as data, and the code with one of them in it.

A fault names a function by its qualified name, never by file or line, and what stands in it by its
parsed form, so that a refactoring which only moves or formats code leaves the fault where it is.
"""

from __future__ import annotations

import ast
import copy
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

FAULTS = Path(__file__).with_name("sentinels.yaml")
PACKAGE, SOURCES = "megatron_adaptra", Path("csrc") / "rdma_offload"
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Misfit(Exception):
    """A fault that does not fit the code (any more)."""


@dataclass(frozen=True)
class Fault:
    """`where`: a function or class such as `Ballot.offer`, found once in the whole package, or a
    function of the engine such as `Mark::at`.
    `find`: an expression or statements that stand in it `times` times; `put`: what replaces them.
    `tests`: files or node ids of pytest, the quickest first, of which one has to fail.
    """

    id: str
    wrong: str
    where: str
    find: str
    put: str
    tests: tuple[str, ...]
    times: int = 1

    @property
    def engine(self) -> bool:
        """Whether it is one in the engine's C++, which has to be built then."""
        return "::" in self.where


def load() -> list[Fault]:
    """All faults, in the order of the file."""
    entries = yaml.safe_load(FAULTS.read_text())
    return [Fault(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def changed(fault: Fault, root: Path) -> tuple[Path, str]:
    """The file that a fault is in and that file's text with the fault; raises Misfit."""
    return _changed_engine(fault, root) if fault.engine else _changed_package(fault, root)


def _changed_engine(fault: Fault, root: Path) -> tuple[Path, str]:
    """A function of the engine ends with the first brace that stands where its lines begin."""
    body = re.compile(rf"^\S[^\n;]*\b{fault.where}\(.*?^}}", re.DOTALL | re.MULTILINE)
    found = [
        (path, match)
        for path in sorted((root / SOURCES).rglob("*.cpp"))
        for match in body.finditer(path.read_text())
    ]
    path, match = _only(fault, found, root, str(SOURCES))
    if fault.find.split() == fault.put.split():
        raise Misfit("`find` and `put` are the same code")
    code = re.compile(r"\s+".join(map(re.escape, fault.find.split())))
    _counted(fault, len(code.findall(match.group())))
    changed = code.sub(lambda _: fault.put, match.group())
    return path, match.string[: match.start()] + changed + match.string[match.end() :]


def _only(fault: Fault, found: list[tuple[Path, Any]], root: Path, within: str) -> tuple[Path, Any]:
    if len(found) != 1:
        files = ", ".join(str(path.relative_to(root)) for path, _ in found) or "no file"
        raise Misfit(f"{fault.where} has to be found once in {within}; it is in {files}")
    return found[0]


def _counted(fault: Fault, count: int) -> None:
    if count != fault.times:
        raise Misfit(
            f"`{fault.find.strip()}` stands {count} times in {fault.where}, not {fault.times}"
        )


def _changed_package(fault: Fault, root: Path) -> tuple[Path, str]:
    found = [hit for path in _files(root) for hit in _scopes(path).get(fault.where, [])]
    path, trail = _only(fault, found, root, PACKAGE)
    tree = copy.deepcopy(_tree(path))
    scope: Any = tree
    for index in trail:
        scope = list(ast.iter_child_nodes(scope))[index]
    find, put = _parsed(fault.find), _parsed(fault.put)
    if _dump(find) == _dump(put):
        raise Misfit("`find` and `put` are the same code")
    rewriting = _Rewriting(find, put)
    rewriting.visit(scope)
    _counted(fault, rewriting.count)
    text = ast.unparse(ast.fix_missing_locations(tree))
    compile(text, str(path), "exec")
    return path, text


@cache
def _files(root: Path) -> list[Path]:
    return sorted((root / PACKAGE).rglob("*.py"))


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def _scopes(path: Path) -> dict[str, list[tuple[Path, list[int]]]]:
    """Functions and classes by their qualified name: where each is, as a way down the tree."""
    found: dict[str, list[tuple[Path, list[int]]]] = {}

    def walk(node: ast.AST, names: list[str], trail: list[int]) -> None:
        for i, child in enumerate(ast.iter_child_nodes(node)):
            if isinstance(child, ast.expr):
                continue
            inner = names
            if isinstance(child, _SCOPES):
                inner = [*names, child.name]
                found.setdefault(".".join(inner), []).append((path, [*trail, i]))
            walk(child, inner, [*trail, i])

    walk(_tree(path), [], [])
    return found


def _parsed(code: str) -> list[ast.stmt]:
    try:
        return ast.parse(code).body
    except SyntaxError as error:
        raise Misfit(f"`{code.strip()}` cannot be parsed: {error}") from None


def _dump(nodes: list[ast.stmt]) -> list[str]:
    return [ast.dump(node) for node in nodes]


class _Rewriting(ast.NodeTransformer):
    """Replaces an expression by an expression, or some statements in a row by others."""

    def __init__(self, find: list[ast.stmt], put: list[ast.stmt]) -> None:
        self.count = 0
        self._find, self._put = find, put
        self._expression = ""
        if all(len(part) == 1 and isinstance(part[0], ast.Expr) for part in (find, put)):
            self._expression = ast.dump(find[0].value)  # type: ignore[attr-defined]

    def visit(self, node: ast.AST) -> ast.AST:
        if self._expression:
            if isinstance(node, ast.expr) and ast.dump(node) == self._expression:
                self.count += 1
                return copy.deepcopy(self._put[0].value)  # type: ignore[attr-defined]
            return super().generic_visit(node)
        node = super().generic_visit(node)  # first, for what is put may contain what was found
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(node, name, None)
            if isinstance(statements, list):
                setattr(node, name, self._replaced(statements))
        return node

    def _replaced(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        wanted, size = _dump(self._find), len(self._find)
        out: list[ast.stmt] = []
        i = 0
        while i < len(statements):
            if _dump(statements[i : i + size]) == wanted:
                out += copy.deepcopy(self._put)
                self.count += 1
                i += size
            else:
                out.append(statements[i])
                i += 1
        return out
