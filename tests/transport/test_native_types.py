"""_native.pyi lists what the built engine exports: names, parameters, which of them have names."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_adaptra.device import native as of_gpus
from megatron_adaptra.transport.engine import native

STUB = Path(native.__file__).with_name("_native.pyi")


def stubs(tree: ast.Module | ast.ClassDef) -> dict[str, str]:
    """Parameters of each function by name, as `parameters` writes them; "property"."""
    found: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{name}": what for name, what in stubs(node).items()}
        elif isinstance(node, ast.FunctionDef) and node.name != "__buffer__":
            marks = [ast.unparse(mark) for mark in node.decorator_list]
            free = [a.arg for a in node.args.args + node.args.kwonlyargs]
            names = ["_"] * len(node.args.posonlyargs) + free
            if isinstance(tree, ast.ClassDef) and "staticmethod" not in marks:
                names = names[1:]
            found[node.name] = "property" if "property" in marks else " ".join(names)
    return found


def parameters(function: Any) -> str:
    """`_` for a parameter without a name."""
    signature = re.sub(r"\[[^()]*?\]", "", str(function.__doc__).splitlines()[0])
    inside = signature[signature.index("(") + 1 : signature.index(")")]
    names = [part.split(":")[0].strip() for part in inside.split(",") if part]
    return " ".join("_" if n.startswith("arg") else n for n in names if n not in ("self", "*"))


def exported(module: Any) -> dict[str, str]:
    """The same of the module as it was built."""
    found: dict[str, str] = {}
    for name, thing in vars(module).items():
        if name.startswith("_") and name != "__init__":
            continue
        if inspect.isclass(thing):
            found |= {f"{name}.{inner}": what for inner, what in exported(thing).items()}
        elif isinstance(thing, property):
            found[name] = "property"
        elif name != "__init__" or "arg0" in str(thing.__doc__) or "*" in str(thing.__doc__):
            found[name] = parameters(getattr(thing, "__func__", thing))
    return found


@pytest.fixture(scope="module")
def built() -> dict[str, str]:
    if native.missing():
        pytest.skip(native.missing())
    return exported(importlib.import_module("megatron_adaptra.transport.engine._native"))


def test_the_stub_is_what_was_built(built: dict[str, str]) -> None:
    assert stubs(ast.parse(STUB.read_text())) == built
    assert {"Engine.send", "DeviceMessages.abort", "new_ring", "Mark.recorded"} <= set(built)
    assert built["Engine.send"] == "rank tag at bytes sent"


@pytest.mark.parametrize(
    ("described", "name"),
    [(native.Work, "Work"), (of_gpus.Mark, "Mark"), (of_gpus.Device, "Device"),
     (of_gpus.Pinned, "Pinned"), (of_gpus.Transfer, "Transfer"),
     (of_gpus.Messages, "DeviceMessages")],
)  # fmt: skip
def test_what_python_describes_is_there(described: type, name: str, built: dict[str, str]) -> None:
    for method, function in vars(described).items():
        if inspect.isfunction(function) and not method.startswith("_"):
            count = len(inspect.signature(function).parameters) - 1
            assert len(built[f"{name}.{method}"].split()) == count, method
