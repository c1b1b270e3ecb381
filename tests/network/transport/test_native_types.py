"""_native.pyi lists what the built engine exports: names, and how many parameters."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_adaptra.transport.engine import bindings

ATTRIBUTE = -1  # instead of a number of parameters


def stubs(tree: ast.Module | ast.ClassDef) -> dict[str, int]:
    found: dict[str, int] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{name}": count for name, count in stubs(node).items()}
        elif isinstance(node, ast.AnnAssign):
            found[ast.unparse(node.target)] = ATTRIBUTE
        elif isinstance(node, ast.FunctionDef) and node.name != "__buffer__":
            names = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            found[node.name] = sum(name.arg != "self" for name in names)
    return found


def exported(module: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, thing in vars(module).items():
        if inspect.isclass(thing):
            found |= {f"{name}.{inner}": count for inner, count in exported(thing).items()}
        elif isinstance(thing, property):
            found[name] = ATTRIBUTE
        elif name == "__init__" or not name.startswith("_"):
            signature = str(getattr(thing, "__func__", thing).__doc__).splitlines()[0]
            if "(self)" not in signature:  # Python's own: no constructor
                names = re.findall(r"(\w+): ", signature.split(" -> ")[0])
                found[name] = len([one for one in names if one != "self"])
    return found


@pytest.fixture(scope="module")
def built() -> dict[str, int]:
    if bindings.missing():
        pytest.skip(bindings.missing())
    return exported(importlib.import_module("megatron_adaptra.transport.engine._native"))


def test_the_stub_is_what_was_built(built: dict[str, int]) -> None:
    stub = Path(bindings.__file__).with_name("_native.pyi")
    assert stubs(ast.parse(stub.read_text())) == built
    assert (built["Engine.send"], built["new_ring"], built["Mark.fault"]) == (5, 0, ATTRIBUTE)
