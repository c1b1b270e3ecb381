#!/usr/bin/env python3
"""What changed between Megatron-LM checkouts where the plugin binds, and does it still fit?

Reads the syntax trees only: neither torch nor Megatron is imported, nor need they be installed.
Give the checkouts from old to new; each is compared with the one before.
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

SCHEDULES = "megatron/core/pipeline_parallel/schedules.py"
P2P = "megatron/core/pipeline_parallel/p2p_communication.py"
ARGUMENTS = "megatron/training/arguments.py"
TRAINING = "megatron/training/training.py"
CHECKPOINTING = "megatron/training/checkpointing.py"
ONE_F_ONE_B = "forward_backward_pipelining_without_interleaving"
BOUND = {
    SCHEDULES: [
        "get_forward_backward_func", "forward_step", "backward_step", ONE_F_ONE_B,
        "forward_backward_pipelining_with_interleaving",
        # engine="executor" calls these around the two steps
        "check_first_val_step", "clear_embedding_activation_buffer", "deallocate_output_tensor",
        "finish_embedding_wgrad_compute", "get_model_config",
    ],
    P2P: [
        "P2PCommunicator.__init__", "P2PCommunicator.recv_forward", "P2PCommunicator.recv_backward",
        "P2PCommunicator.send_forward", "P2PCommunicator.send_backward",
        "P2PCommunicator.send_forward_recv_backward", "P2PCommunicator.send_backward_recv_forward",
        "P2PCommunicator._communicate",
    ],
    ARGUMENTS: ["parse_args", "validate_args"],
    TRAINING: [
        "pretrain", "setup_model_and_optimizer", "train_step", "training_log", "evaluate",
        "get_forward_backward_func",
    ],
    CHECKPOINTING: ["save_checkpoint", "get_checkpoint_name"],
}  # fmt: skip
LEGEND = """\
A number: so many parameters. Import: defined elsewhere. =: as in the column before.
+1-2: parameters came, went. Order: they changed places. New, gone: the name itself."""

# A function's parameters in order, or the place that a name is imported from; None: no such name.
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


def short(file: str, name: str) -> str:
    return name if "." in name else f"{Path(file).stem}.{name}"


def look(checkout: Path, profiles: Any) -> dict[str, Any]:
    version = release(checkout)
    names: dict[str, Found] = {}
    depth = "unknown"
    for file, bound in BOUND.items():
        body = parse(checkout / file, read(checkout, file)).body
        have = definitions(body)
        names.update((short(file, name), have.get(name)) for name in bound)
        if file == SCHEDULES:
            depth = warmup_depth(body)
    return {
        "checkout": str(checkout), "version": str(version), "names": names,
        "warmup_depth": depth, "verdict": verdict(version, names, depth, profiles),
    }  # fmt: skip


def required(profiles: Any) -> dict[str, set[str]]:
    """Parameters that must be there, by name as in `short`."""
    functions = {short(SCHEDULES, name): p for name, p in profiles.EXPECTED.items()}
    methods = {f"P2PCommunicator.{name}": p for name, p in profiles.EXPECTED_METHODS.items()}
    return functions | methods


def verdict(version: Release, names: dict[str, Found], depth: str, profiles: Any) -> str:
    wrong = [f"{name} is gone" for name, found in names.items() if found is None]
    for name, parameters in required(profiles).items():
        found = names[name]
        have = found if isinstance(found, list) else []
        if found is not None:  # otherwise it has been said above
            wrong += [f"{name} lacks {p}" for p in sorted(parameters) if p not in have]
    line = (version.major, version.minor)
    row = next((row for row in profiles._PROFILES if line >= row.first.release[:2]), None)
    if row is None:
        return "older than known: refused"
    if depth != row.depth:
        wrong.append(f"the warmup depth comes from {depth}, where we set {row.depth}")
    if wrong:
        return "seams differ: " + "; ".join(wrong)
    known = line <= profiles.NEWEST.release[:2]
    return "known line" if known else "newer than known, seams match: native"


def difference(old: Found, new: Found) -> tuple[str, str]:
    """In a cell of the table, and in words; empty where nothing changed."""
    if old == new:
        return "=", ""
    if old is None or new is None:
        return ("new", "is new") if old is None else ("gone", "is gone")
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
    for file, bound in BOUND.items():
        out.append(file)
        for name in bound:
            key = short(file, name)
            first = looked[0]["names"][key]
            cells = [str(len(first)) if isinstance(first, list) else "import" if first else "gone"]
            cells += [difference(a["names"][key], b["names"][key])[0] for a, b in pairs]
            out.append(row("  " + name, cells))
    depths = [one["warmup_depth"] for one in looked]
    out += [row("warmup depth of 1F1B", [d.removeprefix("total_") for d in depths]), "", LEGEND]
    for (a, b), label in zip(pairs, pairwise(labels), strict=True):
        words = {n: difference(a["names"][n], b["names"][n])[1] for n in a["names"]}
        if a["warmup_depth"] != b["warmup_depth"]:
            words["warmup depth"] = f"from {a['warmup_depth']} to {b['warmup_depth']}"
        lines = [f"  {name}: {change}" for name, change in words.items() if change]
        out += ["", " -> ".join(label), *(lines or ["  nothing"])]
    verdicts = zip(labels, looked, strict=True)
    return "\n".join([*out, "", *(f"{v}  {o['checkout']}: {o['verdict']}" for v, o in verdicts)])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", nargs="+", type=Path, help="a Megatron-LM checkout")
    parser.add_argument("--json", action="store_true", help="all names with all parameters")
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(ROOT))  # what the plugin requires, also where it is not installed
    try:
        from megatron_adaptra.adapter.compat import profiles

        methods = [f"P2PCommunicator.{name}" for name in profiles.EXPECTED_METHODS]
        for file, names in ((SCHEDULES, list(profiles.EXPECTED)), (P2P, methods)):
            BOUND[file] += [name for name in names if name not in BOUND[file]]
        looked = [look(checkout, profiles) for checkout in options.checkout]
    except (Refused, ImportError) as error:
        print(f"drift: error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(looked, indent=1) if options.json else report(looked))
    return 0


if __name__ == "__main__":
    sys.exit(main())
