"""Every public function says what its arguments are and what it raises.

Ruff's pydocstyle rules ask for a docstring; this asks for what stands in it. An argument whose type
says little (a number, a text, a container, anything) is named in backticks or in an `Args:` block,
by the function or by its class, with its unit or shape. Every error that a function raises itself
is named, too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
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


def faults(path: Path) -> list[str]:
    found = []
    for name, function, of_class in public(ast.parse(path.read_text())):
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
