"""Where a thread is blocked, by its frames: in a collective, with which ranks, or in what code."""

from __future__ import annotations

import contextlib
import linecache
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist

_C10D = "torch.distributed.distributed_c10d"
_OURS = "megatron_adaptra."
_WAITS = re.compile(r"\bwait\w*\(")  # for a handle, which does not know its ranks
# Calls that wait for a GPU, and so perhaps for other ranks' messages.
_SYNCHRONIZES = re.compile(r"\.(item|cpu|tolist|numpy|nonzero|synchronize|wait\w*)\(")
_LAUNCHES = ("torch", "megatron", "megatron_adaptra", "transformer_engine", "apex", "triton")
_SHOWN = 8  # ranks of a group


class Blocked(NamedTuple):
    """A block says in `text` where a thread is: `is in f (file.py:3)`.

    `waits`: the global ranks of which it needs one or all, itself left out; none where it needs no
    other rank, and None where that is not known. `together`: they are in one collective.
    """

    text: str
    waits: tuple[int, ...] | None = ()
    together: bool = False


def blocked(frames: Sequence[FrameType], me: int, on_gpu: bool = False) -> Blocked:
    """Find where the thread with these `frames`, innermost first, of global rank `me`, is blocked.

    `on_gpu`: its ops run on a GPU, so that code which launches them may wait for any rank.
    """
    place = place_of(frames)
    for find in (_in_torch, _for_handle, _in_ours):
        with contextlib.suppress(Exception):  # frames of a release that is not known
            what, ranks, together = find(frames, place)
            if ranks is None:
                return Blocked(what, None)
            if others := tuple(rank for rank in ranks if rank != me):
                return Blocked(what, others, together)
    inner = frames[0] if frames else None
    launches = on_gpu and inner is not None and _may_wait_for_gpu(inner)
    loads = any(module_of(frame).startswith("torch.utils.data") for frame in frames)
    what = "the data loader, in " if loads else ""
    return Blocked(f"is in {what}{place}", None if launches else ())


def place_of(frames: Sequence[FrameType]) -> str:
    """Describe the place: the innermost frame, and its callers in Megatron's and the user's code.

    The user's is named only inside an op or a data set: each frame has the script round it.
    """
    shown: list[FrameType] = list(frames[:1])
    outside = [frame for frame in frames if not _library(frame)]
    shown += [frame for frame in outside[:1] if frame not in shown]
    for frame in outside[1:]:
        module = module_of(frame)
        if module == "megatron.training.training" or module.endswith("pipeline_parallel.schedules"):
            break
        if not module.startswith(("megatron", _OURS)):
            shown.append(frame)
            break
    return ", called by ".join(map(_named, shown)) or "no code of Python's"


_Found = tuple[str, Sequence[int] | None, bool]


def _in_torch(frames: Sequence[FrameType], place: str) -> _Found:
    """Return the collective or message of torch's that the thread is in; raises where it is not."""
    inside = [at for at, frame in enumerate(frames) if module_of(frame) == _C10D]
    outer = frames[inside[-1]]
    name, found = outer.f_code.co_name, [dict(frames[at].f_locals) for at in inside]
    ends = ("src", "dst") if name in ("recv", "send") else ()
    peers = [names.get(end) for names in found for end in ends]
    group = next((names["group"] for names in found if names.get("group") is not None), None)
    peer = next((peer for peer in peers if isinstance(peer, int)), None)
    ranks = dist.get_process_group_ranks(group) if peer is None else [peer]
    callers = [frame for frame in frames[inside[-1] + 1 :] if not _passes(frame)]
    caller = place_of([frame for frame in callers if not _library(frame)] or callers)
    label = getattr(group, "group_desc", "") or ""
    label = "" if label in ("undefined", "default_pg") else f" ({label})"
    over = f"over {short(ranks)}" if peer is None else f"with rank {peer}"
    return f"is in torch's {name} {over}{label}, called by {caller}", ranks, peer is None


def _in_ours(frames: Sequence[FrameType], place: str) -> _Found:
    """Return what a thread waits for in the plugin's own code; raises where it is not there."""
    ours = [frame for frame in frames if module_of(frame).startswith(_OURS)]
    if frames and not module_of(next(f for f in frames if not _library(f))).startswith(_OURS):
        raise LookupError("it is in other code")
    for frame in ours:
        if module_of(frame).startswith("megatron_adaptra.execute.small"):
            members = getattr(frame.f_locals.get("self"), "members", None)
            if isinstance(members, tuple):
                what = f"is in a small collective over {short(members)}, at {place}"
                return what, members, True
    if module_of(ours[0]).startswith(("megatron_adaptra.emulate", "megatron_adaptra.demo")):
        raise LookupError("it waits for no other rank")
    return f"is in {place}", None, False


def _for_handle(frames: Sequence[FrameType], place: str) -> _Found:
    """Return the group of a handle that is waited for, where the object that waits has it."""
    frame = next(f for f in frames if not _library(f) and not module_of(f).startswith(_OURS))
    if not _WAITS.search(linecache.getline(frame.f_code.co_filename, frame.f_lineno)):
        raise LookupError("it waits for no handle")
    if "self" not in frame.f_code.co_varnames:  # a schedule's locals are tensors, kept by reading
        return f"waits in {place}", None, False
    names = frame.f_locals
    holders: list[Any] = [*vars(names.get("self", object())).values()] if "self" in names else []
    group = next((one for one in holders if isinstance(one, dist.ProcessGroup)), None)
    if group is None:
        return f"waits in {place}", None, False
    ranks = dist.get_process_group_ranks(group)
    return f"waits in {place}, over {short(ranks)}", ranks, True


def _may_wait_for_gpu(frame: FrameType) -> bool:
    module = module_of(frame)
    if module.startswith("torch.utils.data"):
        return False
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return module.partition(".")[0] in _LAUNCHES or bool(_SYNCHRONIZES.search(line))


def module_of(frame: FrameType) -> str:
    """Return the name of the module whose code a `frame` runs; "" if it has none."""
    return str(frame.f_globals.get("__name__", ""))


def _library(frame: FrameType) -> bool:
    """Return whether a frame is of Python's own library, or of torch."""
    top = module_of(frame).partition(".")[0]
    return top == "torch" or top in sys.stdlib_module_names


def _passes(frame: FrameType) -> bool:
    """Return whether a frame only hands a call of torch's on."""
    return module_of(frame).startswith((_OURS, "torch.distributed.c10d_logger"))


def _named(frame: FrameType) -> str:
    name = Path(frame.f_code.co_filename).name
    return f"{frame.f_code.co_name} ({name}:{frame.f_lineno})"


def short(ranks: Sequence[int]) -> str:
    """Name all of up to eight `ranks`, else the first ones and how many there are."""
    if len(ranks) <= _SHOWN:
        return f"ranks {', '.join(map(str, ranks))}"
    return f"ranks {', '.join(map(str, ranks[: _SHOWN - 2]))} and {len(ranks) - _SHOWN + 2} more"
