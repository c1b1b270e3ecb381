#!/usr/bin/env python3
"""What changed between Megatron-LM checkouts in what the plugin uses, and does it still fit?

It compares what the plugin calls (NEEDED in megatron_adaptra/adapter/compat/profiles.py) and what
it patches (the registry in patches.py beside it). Reads the syntax trees only: neither torch nor
Megatron is imported, nor need they be installed. Give the checkouts from old to new; each is
compared with the one before.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from make_patches import ROOT, Refused, Release, parse, read, release

SCHEDULES = "megatron.core.pipeline_parallel.schedules"
ONE_F_ONE_B = "forward_backward_pipelining_without_interleaving"
LEGEND = """\
A number: so many parameters. Import: defined elsewhere. Value: no function.
=: as in the column before. +1-2: parameters came, went. Order: they changed places.
New, gone: the name itself."""

WORDS = {None: "gone", "=": "value"}
VALUE = "="  # neither a function nor imported
# A function's parameters in order, the place that a name is imported from, or VALUE; None: no such
# name.
Found = list[str] | str | None


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Also those under a top-level `if` or `try`."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            handlers = [handler.body for handler in getattr(node, "handlers", [])]
            for block in (node.body, *handlers, node.orelse, getattr(node, "finalbody", [])):
                yield from statements(block)


def definitions(body: list[ast.stmt]) -> dict[str, Found]:
    found: dict[str, Found] = {}
    for node in statements(body):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            a = node.args
            found[node.name] = [
                *(p.arg for p in (*a.posonlyargs, *a.args)),
                *(["*" + a.vararg.arg] if a.vararg else []),
                *(p.arg for p in a.kwonlyargs),
                *(["**" + a.kwarg.arg] if a.kwarg else []),
            ]
        elif isinstance(node, ast.ClassDef):
            methods = definitions(node.body).items()
            found.update((f"{node.name}.{name}", method) for name, method in methods)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found.update((t.id, VALUE) for t in targets if isinstance(t, ast.Name))
        elif isinstance(node, ast.ImportFrom):
            where = "." * node.level + (node.module or "")
            found.update((alias.asname or alias.name, where) for alias in node.names)
    return found


def warmup_depth(body: list[ast.stmt]) -> str:
    """What Megatron's 1F1B reads its warmup from, in the words of adapter/compat/profiles.py."""
    read_by_it = {
        attribute.attr
        for node in statements(body)
        if isinstance(node, ast.FunctionDef) and node.name == ONE_F_ONE_B
        for assignment in ast.walk(node)
        if isinstance(assignment, ast.Assign)
        and any(getattr(t, "id", "") == "num_warmup_microbatches" for t in assignment.targets)
        for attribute in ast.walk(assignment.value)
        if isinstance(attribute, ast.Attribute)
    }
    if {"total_stages", "current_stage"} <= read_by_it:
        return "total_stages"
    return "pp_group" if {"pp_group", "size", "rank"} <= read_by_it else "unknown"


def short(target: str) -> str:
    """The name without its class, or the module's own name and the name."""
    module, _, name = target.partition(":")
    return name if "." in name else f"{module.rpartition('.')[2]}.{name}"


def bound() -> dict[str, list[str]]:
    """Targets in Megatron, by module: what is called, and what is patched."""
    from megatron_adaptra.adapter.compat.patches import PATCHES
    from megatron_adaptra.adapter.compat.profiles import NEEDED, NEEDED_BY_EXECUTOR

    patched = [target for entry in PATCHES.values() for target in entry.targets]
    found: dict[str, list[str]] = {}
    for target in dict.fromkeys([*NEEDED, *NEEDED_BY_EXECUTOR, *patched]):
        if target.startswith("megatron."):
            found.setdefault(target.partition(":")[0], []).append(target)
    return found


def source(checkout: Path, module: str) -> ast.Module:
    path = module.replace(".", "/")
    name = f"{path}/__init__.py" if (checkout / path).is_dir() else f"{path}.py"
    return parse(checkout / name, read(checkout, name))


def look(checkout: Path) -> dict[str, Any]:
    version = release(checkout)
    names: dict[str, Found] = {}
    for module, targets in bound().items():
        have = definitions(source(checkout, module).body)
        names.update((target, have.get(target.partition(":")[2])) for target in targets)
    depth = warmup_depth(source(checkout, SCHEDULES).body)
    return {
        "checkout": str(checkout), "version": str(version), "names": names,
        "warmup_depth": depth, "verdict": result(version, names, depth),
    }  # fmt: skip


def result(version: Release, names: dict[str, Found], depth: str) -> str:
    from megatron_adaptra.adapter.compat.patches import PATCHES
    from megatron_adaptra.adapter.compat.profiles import (
        _PROFILES,
        NEEDED,
        NEEDED_BY_EXECUTOR,
        NEWEST,
    )

    line = (version.major, version.minor)
    row = next((row for row in _PROFILES if line >= row.first.release[:2]), None)
    if row is None:
        return "older than known: refused"
    wrong = [fault for target, more in NEEDED.items() if (fault := lack(target, more, names))]
    off: dict[str, str] = {}  # by feature
    for target, more in NEEDED_BY_EXECUTOR.items():
        if fault := lack(target, more, names):
            off.setdefault("engine executor", fault)
    for entry in PATCHES.values():
        for target in entry.targets:
            if fault := lack(target, set(), names):
                off.setdefault(entry.feature, fault)
    wrong += [fault for feature, fault in off.items() if not feature and fault not in wrong]
    if depth != row.depth:
        wrong.append(f"the warmup depth comes from {depth}, where we set {row.depth}")
    if wrong:
        return "trains as stock: " + "; ".join(wrong)
    known = line <= NEWEST.release[:2]
    fits = "known line" if known else "newer than known, seams match: native"
    return "; ".join([fits, *(f"without {feature}: {fault}" for feature, fault in off.items())])


def lack(target: str, parameters: set[str], names: dict[str, Found]) -> str:
    """What of a target is not there, in words, or nothing."""
    found = names.get(target, VALUE)  # others are torch's
    if found is None:
        return f"{short(target)} is gone"
    missing = parameters.difference(found) if isinstance(found, list) else ()
    return f"{short(target)} lacks {', '.join(sorted(missing))}" if missing else ""


def difference(old: Found, new: Found) -> tuple[str, str]:
    """In a cell of the table, and in words; empty where nothing changed."""
    if old == new:
        return "=", ""
    if old is None or new is None:
        return ("new", "is new") if old is None else ("gone", "is gone")
    if VALUE in (old, new):
        return "value", "is a value" if new == VALUE else "is no longer a value"
    if isinstance(old, str) or isinstance(new, str):
        if isinstance(new, str):
            return "import", f"is imported from {new}"
        return str(len(new)), f"is defined here, no longer imported from {old}"
    came, went = [p for p in new if p not in old], [p for p in old if p not in new]
    cell = (f"+{len(came)}" if came else "") + (f"-{len(went)}" if went else "")
    words = [f"+ {p}" for p in came] + [f"- {p}" for p in went]
    if [p for p in old if p in new] != [p for p in new if p in old]:
        cell, words = cell or "order", [*words, "another order: " + ", ".join(new)]
    return cell, ", ".join(words)


def report(looked: list[dict[str, Any]]) -> str:
    labels = [one["version"] for one in looked]
    labels = [v if labels.count(v) == 1 else f"{v}#{i}" for i, v in enumerate(labels, 1)]
    wide = max(8, *map(len, labels)) + 2
    pairs = list(pairwise(looked))

    def row(head: str, cells: list[str]) -> str:
        return f"{head:51}" + "".join(cell.rjust(wide) for cell in cells)

    out = [row("", labels)]
    for module, targets in bound().items():
        out.append(module)
        for target in targets:
            first = looked[0]["names"][target]
            cells = [str(len(first)) if isinstance(first, list) else WORDS.get(first, "import")]
            cells += [difference(a["names"][target], b["names"][target])[0] for a, b in pairs]
            out.append(row("  " + target.partition(":")[2], cells))
    depths = [one["warmup_depth"] for one in looked]
    out += [row("warmup depth of 1F1B", [d.removeprefix("total_") for d in depths]), "", LEGEND]
    for (a, b), label in zip(pairs, pairwise(labels), strict=True):
        words = {short(n): difference(a["names"][n], b["names"][n])[1] for n in a["names"]}
        if a["warmup_depth"] != b["warmup_depth"]:
            words["warmup depth"] = f"from {a['warmup_depth']} to {b['warmup_depth']}"
        lines = [f"  {name}: {change}" for name, change in words.items() if change]
        out += ["", " -> ".join(label), *(lines or ["  nothing"])]
    results = zip(labels, looked, strict=True)
    return "\n".join([*out, "", *(f"{v}  {o['checkout']}: {o['verdict']}" for v, o in results)])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", nargs="+", type=Path, help="a Megatron-LM checkout")
    parser.add_argument("--json", action="store_true", help="all names with all parameters")
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(ROOT))  # what the plugin binds, also where it is not installed
    try:
        looked = [look(checkout) for checkout in options.checkout]
    except (Refused, ImportError) as error:
        print(f"drift: error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(looked, indent=1) if options.json else report(looked))
    return 0


if __name__ == "__main__":
    sys.exit(main())
