"""Every patch of the registry in a user's own script: put in, trained with, and taken back.

Two ranks. `patches_script.py undo FOLDER` trains with every setting, `missing FOLDER` takes one
target after the other away from Megatron. What rank 0 finds is printed as lines of JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_adaptra.adapter.baseline import cpu

cpu.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state as mpu  # noqa: E402
from megatron.core import rerun_state_machine  # noqa: E402
from megatron.core.pipeline_parallel import schedules  # noqa: E402

from megatron_adaptra.adapter.baseline import gpt  # noqa: E402
from megatron_adaptra.adapter.baseline.trace import traced_ops, watched_messages  # noqa: E402
from megatron_adaptra.adapter.compat import patches  # noqa: E402
from megatron_adaptra.adapter.compat.patch_attr import find  # noqa: E402
from megatron_adaptra.adapter.compat.patches import PATCHES, Job, is_there  # noqa: E402
from megatron_adaptra.adapter.compat.profiles import profile  # noqa: E402
from megatron_adaptra.adapter.entry.activate import activate  # noqa: E402
from megatron_adaptra.base.errors import UnsupportedMegatron  # noqa: E402
from megatron_adaptra.config import AdaptraConfig  # noqa: E402
from megatron_adaptra.measure.probe import Probe  # noqa: E402
from megatron_adaptra.plan.pipeline.initial import starting_schedule  # noqa: E402

SLOW = ["0-1:1ms"]
EXECUTOR = AdaptraConfig(
    engine="executor", policy="zb-h1", recompute=True, small_collectives="on", timeout=60.0,
    emulate_link=SLOW, allreduce="direct",
)  # fmt: skip
NATIVE = AdaptraConfig(small_collectives="on", timeout=60.0)
ROUTED = dataclasses.replace(NATIVE, reroute="swap")
SHARED = dataclasses.replace(NATIVE, sync="share")
STOCK = AdaptraConfig(engine="stock", emulate_link=SLOW, emulate_worker=["0.0:1.5x"])
SMALL: dict[str, Any] = {
    "stages": 2, "microbatches": 4, "hidden": 32, "seq_length": 32
}  # fmt: skip
WHOLE, CHUNKS = gpt.GPTShape(**SMALL), gpt.GPTShape(**SMALL, chunks=2, overlapped=True)


def targets() -> dict[str, tuple[Any, str]]:
    found = {t for entry in PATCHES.values() for t in entry.present() if is_there(t)}
    return {target: find(target) for target in sorted(found)}


class State:
    """What every target is, and the same attributes of the objects that are patched instead."""

    def __init__(self, *objects: Any) -> None:
        self.objects, self.was = objects, self._now(objects)

    def _now(self, objects: tuple[Any, ...]) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for target, (owner, name) in targets().items():
            found[target] = vars(owner).get(name, "absent")
            for i, one in enumerate(objects):
                found[target, i] = vars(one).get(name, "absent")
        return found

    def changed(self) -> list[str]:
        now = self._now(self.objects)
        return [str(key) for key, value in self.was.items() if now.get(key) is not value]


@contextlib.contextmanager
def recorded() -> Iterator[set[str]]:
    """The targets that are patched meanwhile."""
    made: set[str] = set()
    set_attribute = patches.patch_attr

    def record(owner: Any, name: str, value: Any) -> Any:
        for target, (holder, attribute) in targets().items():
            ours = isinstance(holder, type) and isinstance(owner, holder)
            if attribute == name and (owner is holder or ours):
                made.add(target)
        return set_attribute(owner, name, value)

    patches.patch_attr = record
    try:
        yield made
    finally:
        patches.patch_attr = set_attribute


class Bench:
    """Trains a new model for some iterations."""

    def __init__(self, folder: Path) -> None:
        self.prefix = folder / "data" / "text"
        if dist.get_rank() == 0:
            gpt.write_dataset(None, self.prefix.parent, limit=100_000)
        dist.barrier()

    def arm(self, shape: gpt.GPTShape) -> gpt.Arm:
        if mpu.model_parallel_is_initialized():
            mpu.destroy_model_parallel()
        gpt.initialize(shape, timeout=60)
        return gpt.Arm.build(shape, gpt.build_dataset(self.prefix, shape, 32))

    def reference(self, shape: gpt.GPTShape) -> list[str]:
        """Of stock Megatron; below 0.18 it sends garbage over gloo if its messages overlap."""
        return self.train(self.arm(dataclasses.replace(shape, overlapped=False)))

    def train(self, arm: gpt.Arm, around: Any = contextlib.nullcontext) -> list[str]:
        losses = []
        for _ in range(3):
            arm.begin()
            with around():
                found = arm.forward_backward(gpt.forward_backward_function())
            losses += [loss.item().hex() for loss in found]
            arm.optimizer.step()
            arm.end()
        return [*losses, arm.digest()]


def undo(bench: Bench) -> None:
    made: set[str] = set()
    on: set[str] = set()
    for config, shape, demo in (
        (EXECUTOR, WHOLE, False), (NATIVE, CHUNKS, False), (STOCK, CHUNKS, False),
        (STOCK, WHOLE, True),
    ):  # fmt: skip
        of_this, active = trained_and_undone(bench, config, shape, demo)
        made |= of_this
        on |= active
    if profile().waits:
        on.remove("whole-outputs")
    wanted = {target for name in on for target in PATCHES[name].present()}
    say({"case": "undo", "made": sorted(made), "not made": sorted(wanted - made)})
    on_top(bench)


def trained_and_undone(
    bench: Bench, config: AdaptraConfig, shape: gpt.GPTShape, demo: bool
) -> tuple[set[str], frozenset[str]]:
    """The targets that were patched, and the entries that might be."""
    reference = bench.reference(shape)
    arm = bench.arm(shape)
    before = State(arm.config, rerun_state_machine.get_rerun_state_machine(), arm.optimizer)
    with recorded() as made:
        active = activate(config, demo=demo)
        session = active.session
        losses = bench.train(arm, functools.partial(demos, session) if demo else usual)
        inside = before.changed()
        active.undo()
    assert "megatron.core.pipeline_parallel:get_forward_backward_func" in inside, inside
    assert losses == reference, config
    assert before.changed() == [], config
    assert not session.patches.off
    allowed = {target for name in session.patches.on for target in PATCHES[name].targets}
    assert made <= allowed, made - allowed
    return made, session.patches.on


usual = contextlib.nullcontext


@contextlib.contextmanager
def demos(session: Any) -> Iterator[None]:
    """What the demo puts around an iteration of its stock arm."""
    line = starting_schedule("1f1b", 2, SMALL["microbatches"], 1, math.inf, False)
    probe = Probe(session.stage)
    probe.begin(0)
    with watched_messages(session.watchdog), traced_ops(probe, line.order[session.stage]):
        yield


def on_top(bench: Bench) -> None:
    """Other code wraps what we have patched: undo leaves that alone, and it works."""
    reference = bench.train(bench.arm(WHOLE))
    arm = bench.arm(WHOLE)
    native, fetch, calls = dist.all_reduce, schedules.get_forward_backward_func, []

    def wrapped(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(function.__name__)
            return function(*args, **kwargs)

        return call

    active = activate(NATIVE)
    early = gpt.forward_backward_function()  # a training loop keeps what it has fetched
    arm.begin()
    arm.forward_backward(early)
    arm.optimizer.step()
    theirs = dist.all_reduce, schedules.get_forward_backward_func = (
        wrapped(dist.all_reduce), wrapped(schedules.get_forward_backward_func)
    )  # fmt: skip
    active.undo()
    assert (dist.all_reduce, schedules.get_forward_backward_func) == theirs
    calls.clear()
    total = torch.ones(1)
    dist.all_reduce(total)
    again = bench.train(bench.arm(WHOLE))
    kept = bench.arm(WHOLE)
    kept.begin()
    kept.forward_backward(early)  # it is Megatron's own again
    dist.all_reduce, schedules.get_forward_backward_func = native, fetch
    say({"case": "on top", "sum": total.item(), "same": again == reference,
         "called": sorted(set(calls))})  # fmt: skip


def missing(bench: Bench) -> None:
    arm = bench.arm(CHUNKS)
    before = State()
    configs = EXECUTOR, NATIVE, STOCK, ROUTED, SHARED
    choices = [(config, demo) for config in configs for demo in (False, True)]
    program = "megatron.training.training" in sys.modules
    for name, entry in PATCHES.items():
        config, demo = next(
            (
                (config, demo) for config, demo in choices
                if entry.active(Job(config, 2, 2, program=True, clips=True, demo=demo))
            ),
            (None, False),
        )  # fmt: skip
        if config is None:
            resolved(name, entry)
            continue
        without_program = Job(config, 2, 2, program=program, clips=True, demo=demo)
        for target in entry.targets:
            row = {"case": "missing", "entry": name, "target": target}
            if not entry.active(without_program) or not is_there(target):
                say({**row, "why": "not without Megatron's training program"})
                continue
            with without(target):
                row |= activated(config, program=program, demo=demo)
            assert before.changed() == [], target
            say(row)
    assert arm.models
    trained_without(bench, "recompute", EXECUTOR, WHOLE)
    trained_without(bench, "interleaved-messages", NATIVE, CHUNKS)


def resolved(name: str, entry: patches.Patch) -> None:
    """What there would be made of a Megatron without its targets: on GPUs, with replicas."""
    job = Job(NATIVE, 2, replicas=2, device=True)
    assert entry.active(job), name
    if entry.some:
        with without(*filter(is_there, entry.targets[1:])):
            assert name in patches.resolve(job).on, "the first is there"
    for target in entry.targets[:1] if entry.some else entry.targets:
        with without(*(filter(is_there, entry.targets) if entry.some else (target,))):
            row = {"case": "missing", "entry": name, "target": target}
            try:
                found = patches.resolve(job)
            except UnsupportedMegatron as error:
                say({**row, "stock": str(error)})
            else:
                say({**row, "off": dict(found.off), "printed": found.lines()})


@contextlib.contextmanager
def without(*targets: str) -> Iterator[None]:
    were = [(owner, name, vars(owner)[name]) for owner, name in map(find, targets)]
    for owner, name, _ in were:
        delattr(owner, name)
    try:
        yield
    finally:
        for owner, name, original in were:
            setattr(owner, name, original)


def activated(config: AdaptraConfig, **facts: bool) -> dict[str, Any]:
    """What activating leads to, and that an error comes before the first patch."""
    before = State()
    try:
        active = activate(config, clips=True, **facts)
    except UnsupportedMegatron as error:
        assert before.changed() == []
        return {"stock": str(error)}
    active.undo()
    return {"off": dict(active.session.patches.off), "printed": active.session.patches.lines()}


def trained_without(bench: Bench, name: str, config: AdaptraConfig, shape: gpt.GPTShape) -> None:
    """A training without the last target of an entry: its feature is off, and results the same."""
    reference, target = bench.reference(shape), PATCHES[name].targets[-1]
    arm = bench.arm(shape)
    with without(target), recorded() as made:
        active = activate(config)
        losses = bench.train(arm)
        active.undo()
    say({"case": "trained", "entry": name, "same": losses == reference,
         "made": bool(made & set(PATCHES[name].targets))})  # fmt: skip


def say(found: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        print("FOUND " + json.dumps(found), flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    {"undo": undo, "missing": missing}[sys.argv[1]](Bench(Path(sys.argv[2])))
    dist.barrier()
    dist.destroy_process_group()
