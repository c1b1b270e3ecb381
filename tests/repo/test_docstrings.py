"""Every public function says what its arguments are and what it raises; an override inherits that.

Ruff's pydocstyle rules ask functions for a docstring; this asks methods for one, unless a class of
the package that theirs is made from has it, and for what stands in it. An argument whose type
says little (a number, a text, a container, anything) is named in backticks or in an `Args:` block,
by the function or by its class, with its unit or shape. Every error that a function raises itself
is named, too.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_adaptra"
FILES = sorted(PACKAGE.rglob("*.py"))
VAGUE = {"int", "float", "str", "bool", "bytes", "Any", "object", "None"}
CONTAINERS = {
    "dict", "list", "tuple", "set", "frozenset", "Sequence", "Mapping", "Iterable", "Iterator",
    "Collection", "Callable", "Container",
}  # fmt: skip

Function = ast.FunctionDef | ast.AsyncFunctionDef


def public(tree: ast.Module) -> Iterator[tuple[str, Function, str]]:
    """Name, function, and the docstring of its class."""
    for node in tree.body:
        if isinstance(node, Function) and not node.name.startswith("_"):
            yield node.name, node, ""
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            words = ast.get_docstring(node) or ""
            for inner in node.body:
                if not isinstance(inner, Function):
                    continue
                if not inner.name.startswith("_") or inner.name == "__init__":
                    yield f"{node.name}.{inner.name}", inner, words


def vague(annotation: ast.expr | None) -> bool:
    """Whether a type alone leaves open what a value means."""
    if annotation is None:
        return True
    names = {n.id for n in ast.walk(annotation) if isinstance(n, ast.Name)}
    return names <= VAGUE | CONTAINERS


def documented(trees: Iterable[ast.Module]) -> Callable[[str, str], bool]:
    """Whether a method of a class has a docstring, by their names: its own or an inherited one."""
    bases: dict[str, set[str]] = defaultdict(set)
    methods: dict[str, set[str]] = defaultdict(set)
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases[node.name] |= {
                    re.split(r"\[", ast.unparse(base))[0].rpartition(".")[2] for base in node.bases
                }
                inner = (one for one in node.body if isinstance(one, Function))
                methods[node.name] |= {one.name for one in inner if ast.get_docstring(one)}

    def has(name: str, method: str) -> bool:
        return method in methods[name] or any(has(base, method) for base in bases[name] - {name})

    return has


TREES = {path: ast.parse(path.read_text()) for path in FILES}
HAS_DOCSTRING = documented(TREES.values())


def faults(path: Path) -> list[str]:
    found = []
    for name, function, of_class in public(TREES[path]):
        owner, _, method = name.rpartition(".")
        if owner and not method.startswith("_") and not ast.get_docstring(function):
            if not HAS_DOCSTRING(owner, method):
                found.append(f"{path.name}:{function.lineno} {name} has no docstring")
            continue
        words = f"{of_class} {ast.get_docstring(function) or ''}"
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        for argument in arguments:
            silent = argument.arg in ("self", "cls") or argument.arg.startswith("_")
            entry = rf"`{argument.arg}|^ +(\w+, )*{argument.arg}(, \w+)*: "
            if not silent and vague(argument.annotation) and not re.search(entry, words, re.M):
                found.append(f"{path.name}:{function.lineno} {name} does not say what "
                             f"`{argument.arg}` is")  # fmt: skip
        for node in ast.walk(function):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                error = ast.unparse(node.exc.func).rpartition(".")[2]
                if error.isidentifier() and error[0].isupper() and error not in words:
                    found.append(f"{path.name}:{node.lineno} {name} raises {error} unsaid")
    return found


def test_public_functions_say_what_they_take_and_raise() -> None:
    assert [fault for path in FILES for fault in faults(path)] == []


VAGUE_OPENINGS = ["Of", "What", "Whether", "Those", "That", "It", "They", "As", "Who", "Which"]


def openings(path: Path) -> list[str]:
    """The first words of its docstrings."""
    nodes = (node for node in ast.walk(TREES[path]) if isinstance(node, Function | ast.ClassDef))
    docs = [ast.get_docstring(node) for node in (TREES[path], *nodes)]
    return [found[1] for doc in docs if doc and (found := re.match(r"\W*(\w+)", doc))]


def test_docstrings_open_with_their_subject_or_a_verb() -> None:
    vague = [(path.name, word) for path in FILES for word in openings(path)]
    assert [(name, word) for name, word in vague if word in VAGUE_OPENINGS] == []
