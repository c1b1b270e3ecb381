"""The registry of patches: set by one function, all taken back, and nothing that cannot be missing.

The scripts train in two ranks: patches_script.py as a user's own, patches_pretrain.py through
Megatron's training program.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from running import zygote
from trainings import (
    HAS_TRAINING,
    TRAINING,
    Done,
    execute,
    needs_training,
    stock,
    words_of,
)

from megatron_adaptra.adapter.compat import patches
from megatron_adaptra.adapter.compat.patch_attr import patch_attr, switched
from megatron_adaptra.adapter.compat.patches import PATCHES, Lasts, Patch, patch
from megatron_adaptra.adapter.entry.activate import Activation

HERE = Path(__file__).parent
TARGETS = [
    (name, target)
    for name, entry in PATCHES.items()
    for target in (entry.targets[:1] if entry.some else entry.targets)
]


class Holder:
    """Something to be patched."""

    def method(self) -> str:
        return "native"

    @staticmethod
    def static(value: int) -> int:
        return value


class Heir(Holder):
    pass


class Other:
    def method(self) -> str:
        return "native"


def test_what_was_there_comes_back() -> None:
    module = types.ModuleType("somewhere")
    module.name = original = object()  # type: ignore[attr-defined]
    undo = patch_attr(module, "name", 1)
    assert module.name == 1
    undo()
    assert module.name is original


def test_what_was_inherited_is_inherited_again() -> None:
    one = Heir()
    undo = [patch_attr(one, "method", lambda: "ours"), patch_attr(Heir, "method", len)]
    assert one.method() == "ours"
    for back in reversed(undo):
        back()
    assert one.method() == "native"
    assert "method" not in {**vars(one), **vars(Heir)}


def test_a_static_method_stays_one() -> None:
    before = vars(Holder)["static"]
    undo = patch_attr(Holder, "static", lambda value: value + 1)
    assert Holder().static(1) == Holder.static(1) == 2
    undo()
    assert vars(Holder)["static"] is before


def test_what_is_on_top_stays() -> None:
    one = Holder()
    undo = patch_attr(one, "method", lambda: "ours")
    below = one.method
    one.method = lambda: f"theirs over {below()}"  # type: ignore[method-assign]
    undo()
    assert one.method() == "theirs over ours"


def test_undone_it_calls_what_was_there() -> None:
    call, off = switched(lambda x: ("ours", x), lambda x: ("native", x))
    assert call(1) == ("ours", 1)
    off()
    assert call(x=2) == ("native", 2)


def test_what_was_patched_last_is_taken_back_first() -> None:
    """One function twice, as two features may do it; the session closes when all is as it was."""
    one, seen = Holder(), []
    activation = Activation(types.SimpleNamespace(close=lambda: seen.append(one.method())))
    activation.undo_with(patch_attr(one, "method", lambda: "ours"))
    activation.undo_with(patch_attr(one, "method", lambda: "ours, too"))
    activation.undo()
    assert "method" not in vars(one)
    assert seen == ["native"]


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> dict[str, Patch]:
    """A registry of our own, on functions of this file."""
    made = {
        "two": Patch(
            (f"{__name__}:Holder.method", f"{__name__}:Other.method"),
            "a test", Lasts.CALL, "always", lambda job: True,
        ),
        "one": Patch(
            (f"{__name__}:Holder.method",),
            "a test", Lasts.CALL, "always", lambda job: True, of="one object",
        ),
    }  # fmt: skip
    monkeypatch.setattr(patches, "PATCHES", made)
    return made


def test_targets_of_one_name_are_patched_together(entries: dict[str, Patch]) -> None:
    with patch("two", method=lambda self: "ours"):
        assert vars(Other)["method"] is vars(Holder)["method"]
        kept = Holder().method
        assert kept() == "ours"
    assert kept() == Holder().method() == Other().method() == "native"


def test_one_object_is_patched_and_no_other(entries: dict[str, Patch]) -> None:
    one, other = Holder(), Holder()
    undo = patch("one", one, method=lambda: "ours")
    assert (one.method(), other.method()) == ("ours", "native")
    undo.close()
    assert one.method() == "native"
    assert vars(one) == {}


def test_a_patch_inside_a_patch_is_undone_first(entries: dict[str, Patch]) -> None:
    with patch("two", method=lambda self: "outer"):
        with patch("two", method=lambda self: "inner"):
            assert Heir().method() == "inner"
        assert Heir().method() == "outer"
    assert Heir().method() == "native"


def test_only_targets_are_patched(entries: dict[str, Patch]) -> None:
    with pytest.raises(KeyError, match="two has no target static"):
        patch("two", method=len, static=len)
    assert Holder().method() == "native"


def test_one_function_sets_attributes() -> None:
    package = Path(patches.__file__).parents[2]
    found = {
        path.name for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Name) and node.id in ("setattr", "delattr")
    }  # fmt: skip
    assert found == {"patch_attr.py", "cpu.py"}  # the latter: stand-ins where there is no CUDA


def test_an_entry_says_what_a_reader_needs() -> None:
    for entry in PATCHES.values():
        assert entry.why
        assert entry.when
        assert not entry.why.endswith(".")
        assert entry.targets
        assert all(re.fullmatch(r"[\w.]+:(\w+\.)?\w+", target) for target in entry.targets)


def found(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in re.findall(r"^FOUND (.*)", text, re.MULTILINE)]


def own_script(mode: str, folder: Path) -> list[dict[str, Any]]:
    words = [str(HERE / "ranks" / "patches_script.py"), mode, str(folder)]
    done = zygote(False).run(folder, words, ranks=2)
    assert done.status == 0, done.text[-4000:]
    return found(done.text)


@pytest.mark.long
def test_in_ones_own_script_all_is_taken_back(tmp_path: Path) -> None:
    undone, on_top = own_script("undo", tmp_path)
    assert undone["not made"] == [], "the training did not use these: it proves nothing of them"
    assert on_top == {
        "case": "on top", "sum": 2.0, "same": True,
        "called": ["all_reduce", "get_forward_backward_func"],
    }  # fmt: skip


@pytest.mark.long
def test_without_a_target_happens_what_its_entry_says(tmp_path: Path) -> None:
    """Without an optional one training goes on."""
    without = own_script("missing", tmp_path)
    for name, target in TARGETS:
        (row,) = (r for r in without if (r.get("entry"), r.get("target")) == (name, target))
        entry = PATCHES[name]
        if "why" in row:
            assert not HAS_TRAINING, target
        elif not entry.feature:
            assert f"{target} does not exist" in row["stock"]
        else:
            assert row["off"][name] == target
            assert f"off: {entry.feature}: this Megatron has no {target}" in row["printed"]
    trained = [row for row in without if row["case"] == "trained"]
    assert {row["entry"] for row in trained} == {"recompute", "interleaved-messages"}
    assert all(row["same"] and not row["made"] for row in trained)


@needs_training
@pytest.mark.parametrize("engine", ["native", "executor"])
def test_in_the_training_program_all_is_taken_back(engine: str, tmp_path: Path) -> None:
    flags = [
        "--adaptra", "--adaptra-small-collectives", "on", "--adaptra-engine", engine,
        "--adaptra-emulate-link", "0-1:1ms", "--save", str(tmp_path / "saved"),
        "--save-interval", "4",
    ]  # fmt: skip
    if engine == "executor":
        flags += ["--adaptra-policy", "zb-h1", "--adaptra-recompute"]
    words = words_of(tmp_path, 2, *flags, iterations=8)
    done = zygote(True).run(
        tmp_path, [str(HERE / "ranks" / "patches_pretrain.py"), *words], ranks=2
    )
    assert done.status == 0, done.text[-4000:]
    ranks = found(done.text)
    program = {t for e in PATCHES.values() if e.lasts is Lasts.PROGRAM for t in e.targets}
    assert [set(rank["wrapped"]) for rank in ranks] == [program, program]
    assert [rank["left"] for rank in ranks] == [[], []]
    expected = {
        "get_forward_backward_func", "all_reduce", "broadcast", "barrier", "print_rank_last",
        "step", "should_run_forward_backward", "logical_and_across_model_parallel_group",
        "reduce_max_stat_across_model_parallel_group",
    }  # fmt: skip
    if engine == "executor":  # only the first stage recomputes
        expected |= {"forward", "backward", "validate_result"}
    assert set(ranks[0]["made"]) | set(ranks[1]["made"]) == expected
    dry = zygote(True).run(tmp_path, [*words, "--adaptra-dry-run"], ranks=2)
    assert dry.status == 0, dry.text[-4000:]
    listed = set(re.findall(r"^    ([\w.]+:[\w.]+)(?: of .*)?$", dry.text, re.MULTILINE))
    assert program <= listed
    expected |= {"batch_isend_irecv", "isend", "_communicate"}  # where its own schedule runs
    assert {target.split(":")[1].split(".")[-1] for target in listed - program} == expected


@needs_training
@pytest.mark.cold
@pytest.mark.parametrize(
    ("names", "printed"),
    [
        pytest.param(
            "train_step", ["training goes on as stock Megatron: .*training:train_step does not"],
            marks=pytest.mark.large,
        ),
        pytest.param(
            "parse_args", ["training goes on as stock Megatron: .*arguments:parse_args does not"],
            marks=pytest.mark.large,
        ),
        (
            "logical_and_across_model_parallel_group,should_run_forward_backward,print_rank_last",
            ["off: results of a step", "off: reruns", "off: the plan in Megatron's log"],
        ),
    ],
)  # fmt: skip
def test_a_megatron_with_other_names_trains(names: str, printed: list[str], tmp_path: Path) -> None:
    """Its sources have these names changed, so that it works without them."""
    words = words_of(tmp_path, 2, "--adaptra", iterations=6)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    launch += ["2", "--redirects", "3", "--log-dir", str(tmp_path / "logs")]
    launch += [str(HERE / "ranks" / "renamed_megatron.py"), names, *words]
    status = execute(launch, tmp_path / "torchrun", tmp_path, 500, TRAINING)
    logs = sorted(tmp_path.glob("logs/*/attempt_0/*/*.log"))
    done = Done(status, "\n".join(log.read_text() for log in logs))
    assert status == 0, done.text[-4000:]
    assert done.printed == stock(2, iterations=6).done.printed
    lines = re.findall(r"^adaptra: (.*)", done.text, re.MULTILINE)
    lines = [line for line in lines if "off: " in line or "as stock" in line]
    assert len(lines) == len(printed), lines
    assert all(any(re.search(words, line) for line in lines) for words in printed)
    assert done.plans == []  # the first two are stock, the last has no log line to add it to
