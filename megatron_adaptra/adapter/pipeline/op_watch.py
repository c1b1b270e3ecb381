"""Sees which collectives an iteration's ops call over ranks that may be at another op.

What is known of Megatron's settings is in `closed_groups`; this finds the rest, such as layers of a
user's own: whatever they call in forwards, losses and backwards, on all threads.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Collection, Iterator
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_adaptra.adapter.compat.closed_groups import Tie
from megatron_adaptra.adapter.compat.patches import PATCHES, patch
from megatron_adaptra.execute.blocked import module_of, short

# Of Megatron: gradients and parameters of data-parallel ranks, and barriers of its timers, which
# come once per iteration, whatever the order of ops.
_ONCE = (
    "megatron.core.timers",
    "megatron.core.distributed.param_and_grad_buffer",
    "megatron.core.distributed.finalize_model_grads",
)
_OURS = "megatron_adaptra."
_PATCHES = "megatron_adaptra.adapter.compat.patch_attr"
# Called in place of torch's functions, by the callers of these.
_STAND_INS = (
    _PATCHES,
    "megatron_adaptra.adapter.step.planned_collectives",
    "megatron_adaptra.execute.small.small_collectives",
)


class OpWatch:
    """An OpWatch sees collectives that reach beyond ranks with the same order of ops.

    Torch's functions end in methods of ProcessGroup, so these are watched: also what holds a
    function by a name of its own is seen. Point-to-point messages and kernels that communicate by
    themselves are not.

    Args:
        alike: global ranks that run the same ops in the same order.
        own: those of them that are of this rank's own replica.
        waited: takes the seconds of each wait for other ranks than `own`, unless the collective is
            asynchronous; None where nobody asks.

    `met`: the first collective beyond `alike`, and why its ranks are tied; None until there is one.
    `watched`: an iteration is over. ProcessGroup is patched until `close`.
    """

    def __init__(
        self,
        alike: Collection[int],
        own: Collection[int],
        waited: Callable[[float], None] | None = None,
    ) -> None:
        self.met: Tie | None = None
        self.watched = False
        self._alike, self._own, self._waited = frozenset(alike), frozenset(own), waited
        self._ranks: dict[Any, frozenset[int]] = {}  # of groups, in one iteration
        self._finalize: CodeType | None = None
        self._on = False
        names = [target.rpartition(".")[2] for target in PATCHES["watched-ops"].present()]
        natives = {name: getattr(dist.ProcessGroup, name) for name in names}
        stand_ins = {name: self._seen(name, native) for name, native in natives.items()}
        self.close = patch("watched-ops", **stand_ins).close

    @contextlib.contextmanager
    def watching(self, finalize: Any = None) -> Iterator[None]:
        """Round the ops of an iteration. `finalize`: Megatron's finalize_model_grads_func."""
        while hasattr(finalize, "func"):  # a functools.partial
            finalize = finalize.func
        self._finalize = getattr(finalize, "__code__", None)
        self._on = True
        try:
            yield
        finally:
            self._on, self.watched = False, True
            self._ranks.clear()

    def _seen(self, name: str, native: Callable[..., Any]) -> Callable[..., Any]:
        """Stands in for the method `name` of ProcessGroup."""

        @functools.wraps(native)
        def seen(group: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._on:
                return native(group, *args, **kwargs)
            ranks = self._ranks.get(group)
            if ranks is None:
                ranks = self._ranks[group] = _ranks_of(group)
            if self.met is None and not ranks <= self._alike:
                try:
                    self.met = _meeting(name, ranks, self._finalize)
                except Exception:  # its caller is not known; it is one
                    self.met = Tie(tuple(sorted(ranks)), f"an op calls {name} over other replicas")
            if self._waited is None or ranks <= self._own:
                return native(group, *args, **kwargs)
            return self._timed(native, group, *args, **kwargs)

        return seen

    def _timed(self, native: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The same collective; a caller that waits for it at once waits here."""
        assert self._waited is not None
        begun = time.monotonic()
        work = native(*args, **kwargs)
        options = (*args, *kwargs.values())[-1]
        if work is not None and getattr(options, "asyncOp", True) is False:
            work.wait()
            self._waited(time.monotonic() - begun)
        return work


def _meeting(name: str, ranks: frozenset[int], finalize: CodeType | None) -> Tie | None:
    """The tie of `ranks` that an op's collective makes; None where no op has called it.

    `name`: of ProcessGroup's method. `finalize`: what comes after all ops.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and module_of(frame) in (__name__, _PATCHES):
        frame = frame.f_back  # of this watch, or of several; what calls one of ours is no op
    caller = ""
    while frame is not None:
        module = module_of(frame)
        if module in _ONCE or frame.f_code is finalize:
            return None
        if module == c10d.__name__:
            name = frame.f_code.co_name
        elif not caller and module not in _STAND_INS and module.partition(".")[0] != "torch":
            if module.startswith(_OURS):
                return None
            caller = f"{module}.{frame.f_code.co_name}"
        frame = frame.f_back
    kind = "backward" if torch._C._current_autograd_node() is not None else "forward"
    members = tuple(sorted(ranks))
    return Tie(members, f"{caller or 'torch'} calls {name} over {short(members)} in a {kind}")


def _ranks_of(group: Any) -> frozenset[int]:
    """The global ranks of a `group`; none where torch does not know it, as within torch."""
    try:
        return frozenset(dist.get_process_group_ranks(group))
    except (KeyError, RuntimeError, ValueError):
        return frozenset()
