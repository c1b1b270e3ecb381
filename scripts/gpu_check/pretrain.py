"""One rank of a training for parts hide, memory and equality: Megatron's own program, watched.

Runs the training script of the tests. A link is slow for Megatron's messages from one iteration to
another: over NCCL, each begins on its stream so much later; over gloo, which takes its place where
ranks share a GPU, the copy that is sent waits at the host. Writes what was seen to rankN.json.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import runpy
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

GIVEN = json.loads(os.environ["ADAPTRA_GPU_CHECK"])
# Several ranks may share a GPU; Megatron takes the one that this names.
os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) % max(1, GIVEN["gpus"]))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from gpu_check import kept_outputs, shared_nccl, without_numerics  # noqa: E402
from gpu_check.deterministic import deterministic  # noqa: E402
from gpu_check.host_staged import host_staged  # noqa: E402
from gpu_check.slow_links import HeldBack, Late, OverNetwork  # noqa: E402

CALLS = ("batch_isend_irecv", "all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor")


class Calls:
    """A list of Megatron's calls of torch.distributed: which, with whom, of how many values."""

    def __init__(self) -> None:
        self._seen: list[Any] = []
        for name in CALLS:
            setattr(dist, name, self._around(name, getattr(dist, name)))

    def _around(self, name: str, function: Any) -> Any:
        @functools.wraps(function)
        def call(*words: Any, **named: Any) -> Any:
            given = words[0] if words else next(iter(named.values()), None)
            ops = given if isinstance(given, list) else []
            each = [(op.op.__name__, op.peer, op.tensor.numel()) for op in ops]
            self._seen.append([name, each or getattr(given, "numel", int)()])
            return function(*words, **named)

        return call

    def take(self) -> str:
        """Return a digest of the calls since the last time, and their number."""
        text, count = json.dumps(self._seen), len(self._seen)
        self._seen = []
        return f"{count} {hashlib.sha256(text.encode()).hexdigest()[:16]}"


class Watch:
    """Around each iteration: its time, memory, the plan, pinned memory; at the end parameters."""

    def __init__(self, slow: Any, calls: Calls | None = None) -> None:
        self.slow, self.calls, self.count, self.on = slow, calls, 0, False
        self.rows: list[dict[str, Any]] = []

    def around(self, step: Any) -> Any:
        @functools.wraps(step)
        def train_step(*words: Any, **named: Any) -> Any:
            on = GIVEN["begin"] <= self.count < GIVEN["end"]
            if on != self.on:
                self.on = on
                self.slow.switch(on)
            session = self.session()
            ours = session is not None and session.run is not None and not session.run.stock
            in_flight = planned(session)  # of this iteration: after it, the next one's is known
            begin = time.monotonic()
            result = step(*words, **named)
            row = {"ms": 1e3 * (time.monotonic() - begin), "ours": ours, "in_flight": in_flight}
            row |= memory(session)
            row["calls"] = self.calls.take() if self.calls is not None else ""
            if GIVEN["spoil"] and session is not None:
                torch.cuda.reset_peak_memory_stats()  # as a planted fault
            self.rows.append(row)
            self.count += 1
            if self.count == GIVEN["iterations"]:
                self.write(words[2] if len(words) > 2 else named["model"], session)
            return result

        return train_step

    def session(self) -> Any:
        if "megatron_adaptra.adapter.entry.plugin" not in sys.modules:
            return None
        from megatron_adaptra.adapter.entry.plugin import PLUGIN

        if (found := PLUGIN.session) is not None:
            found.reports.keep_records = range(1 << 30)
        return found

    def write(self, models: list[Any], session: Any) -> None:
        sha = hashlib.sha256()
        for model in models:
            for name, parameter in sorted(model.named_parameters()):
                flat = parameter.detach().contiguous().view(-1).view(torch.uint8)
                sha.update(name.encode() + flat.cpu().numpy().tobytes())
        found = {"rows": self.rows, "digest": sha.hexdigest(), "records": []}
        if session is not None:
            found["records"] = [
                {"iteration": r.iteration, "stock": r.stock, "unusable": r.unusable,
                 "starved": r.starved if r.known else None,
                 "memory": None if r.memory is None else asdict(r.memory)}
                for r in session.reports.records
            ]  # fmt: skip
        path = Path(GIVEN["folder"]) / f"rank{os.environ['RANK']}.json"
        path.write_text(json.dumps(found))


def memory(session: Any) -> dict[str, Any]:
    """Of torch's allocator, as Megatron reports it, and of the host."""
    found = {"allocated": torch.cuda.memory_allocated(), "most": torch.cuda.max_memory_allocated(),
             "reserved": torch.cuda.max_memory_reserved()}  # fmt: skip
    run = None if session is None else session.run
    if run is not None and (staging := run.wiring.staging) is not None:
        host = staging.memory()
        found["clones"] = all(transport.clones for transport in run.wiring.pipelines)
        found |= {"held": host.held, "used": host.used, "pinned_peak": host.peak}
    return found


def planned(session: Any) -> float | None:
    """Microbatches in flight at most, of the plan in force; None before there is one."""
    if session is None or session.run is None:
        return None
    return float(session.run.controller.ballot.schedule.peak_in_flight()[session.stage])


def on_a_gpu_all_the_same() -> None:
    """Have gloo's messages, which are in the host's memory, taken for those of a GPU.

    So the plugin measures, plans and switches as under NCCL, though ranks share a GPU.
    """
    from megatron_adaptra.adapter.compat.patch_attr import find, patch_attr

    patch_attr(*find("megatron_adaptra.adapter.entry.activate:messages_on_gpus"), lambda: True)


def uncopied() -> None:
    """As a planted fault, what a graph has put out is sent from where the next replay writes."""
    from megatron_adaptra.adapter.compat.patch_attr import find, patch_attr

    patch_attr(*find("megatron_adaptra.adapter.pipeline.wiring:has_graphs"), lambda config: False)


def main() -> None:
    deterministic()
    if GIVEN["graphs"]:
        kept_outputs.install()
    if GIVEN["uncopied"]:
        uncopied()
    with contextlib.ExitStack() as stack:
        if GIVEN["network"]:
            shared_nccl.join(int(os.environ["RANK"]))
            slow: Any = OverNetwork(GIVEN["network"], GIVEN["links"], GIVEN["delay"])
        elif GIVEN["nccl"]:
            slow = Late(GIVEN["delay"])
        else:
            stack.enter_context(host_staged())
            slow = HeldBack(f"0-1:{1e3 * GIVEN['delay']:g}ms", GIVEN["stages"])
            if "--adaptra" in sys.argv:
                on_a_gpu_all_the_same()
        calls = Calls()  # before Megatron binds some of these functions by name
        if GIVEN["fake"]:
            without_numerics.allow()
        from megatron.training import training

        watch = Watch(slow, calls)
        training.train_step = watch.around(training.train_step)
        script = Path(GIVEN["script"])
        sys.path.insert(0, str(script.parent))
        runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
