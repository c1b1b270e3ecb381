"""torch.distributed through the host: tensors on a GPU over gloo, which takes few of them itself.

NCCL refuses two ranks on one GPU, and gloo knows tensors on a GPU in broadcast and all_reduce alone
(torch's documentation, "Backends"): Megatron's own messages and most collectives would end with an
error. While `host_staged` is in force, what Megatron calls gets copies in the host's memory, and
what a call fills is copied back when it is waited for. All calls go the same way, also those that
gloo could take: one rule is simpler.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron_adaptra.adapter.compat.patch_attr import patch_attr

# Function -> the argument that it fills. Others end with gloo's own error.
_FILLS = {
    "isend": "",
    "irecv": "tensor",
    "broadcast": "tensor",
    "all_reduce": "tensor",
    "all_gather": "tensor_list",
    "all_gather_into_tensor": "output_tensor",
    "_all_gather_base": "output_tensor",
    "reduce_scatter_tensor": "output",
    "_reduce_scatter_base": "output",
    "all_to_all_single": "output",
}
_FRESH = _FILLS.keys() - {"isend", "broadcast", "all_reduce"}  # what is filled had nothing to say
_Pair = tuple[torch.Tensor, torch.Tensor]  # a tensor, and its copy in the host's memory


@contextlib.contextmanager
def host_staged(everything: bool = False) -> Iterator[None]:
    """Begin before Megatron is imported: it binds some of these functions by name.

    `everything`: also tensors that are on the host already, to try this without a GPU.
    """
    staging = _Staging(everything)
    with contextlib.ExitStack() as stack:
        for name, fills in _FILLS.items():
            function = staging.through_host(getattr(dist, name), fills, name in _FRESH)
            owners = (dist, dist.distributed_c10d) if name in ("isend", "irecv") else (dist,)
            for owner in owners:  # P2POp knows those of c10d
                stack.callback(patch_attr(owner, name, function))
        stack.callback(patch_attr(dist, "_coalescing_manager", staging.coalescing))
        yield


class _Staging:
    def __init__(self, everything: bool) -> None:
        self._everything = everything
        self._coalesced: list[_Staged] | None = None
        self._kept: list[_Staged] = []  # gloo cancels a send whose handle is dropped too early

    def through_host(
        self, function: Callable[..., Any], fills: str, fresh: bool
    ) -> Callable[..., Any]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            pairs: list[_Pair] = []
            for name, value in given.arguments.items():
                mine: list[_Pair] = []
                given.arguments[name] = self._copies(value, mine, fresh and name == fills)
                pairs += mine if name == fills else []
            work = function(*given.args, **given.kwargs)
            staged = _Staged(work, pairs)
            if work is None:  # not an asynchronous call: it is over
                staged.wait()
                return None
            if not fills:
                self._kept = [s for s in self._kept if not s.over] + [staged]
            if self._coalesced is not None:
                self._coalesced.append(staged)
            return staged

        return call

    @contextlib.contextmanager
    def coalescing(
        self, group: Any = None, device: Any = None, async_ops: bool = False
    ) -> Iterator[_Several]:
        """Torch would run the calls together at the end; here each runs when it is made."""
        before, self._coalesced = self._coalesced, []
        several = _Several(self._coalesced)
        try:
            yield several
        finally:
            self._coalesced = before
        if not async_ops:
            several.wait()

    def _copies(self, value: Any, pairs: list[_Pair], fresh: bool) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(self._copies(v, pairs, fresh) for v in value)
        if not isinstance(value, torch.Tensor):
            return value
        on_gpu = value.device.type == "cuda"
        if not (on_gpu or self._everything):
            return value
        host = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=on_gpu)
        if not fresh:
            host.copy_(value.detach())  # waits until it is computed, and copied
        pairs.append((value, host))
        return host


class _Staged:
    """A call under way on the host. `over`: it has been waited for."""

    def __init__(self, work: Any, pairs: list[_Pair]) -> None:
        self._work, self._pairs, self.over = work, pairs, False

    def wait(self, *timeout: Any) -> bool:
        if self._work is not None and not self.over:
            self._work.wait(*timeout)
        for tensor, host in self._pairs:
            tensor.data.copy_(host)  # autograd has no part in a message
        self._pairs, self.over = [], True
        return True

    def is_completed(self) -> bool:
        return self._work is None or bool(self._work.is_completed())


class _Several:
    """What torch's coalescing manager hands out."""

    def __init__(self, works: list[_Staged]) -> None:
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()
