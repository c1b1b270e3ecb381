"""Whether all ranks can run the next iteration by the same shares: three numbers, beside the step.

The all-reduce starts when an iteration's backwards are over, before gradients are reduced, and is
waited for when the next one begins. It goes over a group of its own, so that nothing of Megatron's
waits for it, and on GPUs no work of theirs does.
"""

from __future__ import annotations

import contextlib
import hashlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_adaptra import waits
from megatron_adaptra.errors import PeerLost

# ENDED: there are no data for another iteration. DIFFERENT: what plans are, which no rank gives.
READY, ENDED, FAILED, DIFFERENT = range(4)


class ShareVote:
    """One rank's part; made on all ranks together, over gloo.

    `timeout`: seconds that it is waited for, when an iteration has ended. Replicas may be late for
    it by more than that: it begins before they wait for each other in their reductions.

    Raises RuntimeError where ranks cannot be connected.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timedelta(seconds=timeout)
        self._group: Any = dist.new_group(backend="gloo", timeout=self._timeout)
        self._asked: tuple[Any, torch.Tensor] | None = None

    def start(self, word: int, plan: str) -> None:
        """Give this rank's `word`, as all ranks do: READY, ENDED or FAILED for its `plan`."""
        number = int.from_bytes(hashlib.sha256(plan.encode()).digest()[:7], "big")
        words = torch.tensor([word, number, -number], dtype=torch.int64)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        options.timeout = timedelta(seconds=waits.FOREVER)  # `result` has a deadline
        # Not torch's function: it is patched, to send what crosses stages in another way.
        self._asked = self._group.allreduce([words], options), words

    def result(self) -> int:
        """The worst word of any rank; DIFFERENT where plans differ. Raises PeerLost."""
        assert self._asked is not None
        (work, words), self._asked = self._asked, None
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise PeerLost(f"a rank has not voted on the shares of replicas: {reason}") from error
        word, most, least = words.tolist()
        return int(word) if most == -least or word == FAILED else DIFFERENT

    def close(self) -> None:
        """End its connections; a vote that is under way is waited for, if its ranks are there."""
        asked, self._asked = self._asked, None
        with contextlib.suppress(Exception):
            if asked is not None:
                asked[0].wait(timedelta(seconds=waits.CLOSE))
            dist.destroy_process_group(self._group)
