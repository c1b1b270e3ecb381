"""Whether all ranks can run the next iteration by the same shares: some numbers, beside the step.

The all-reduce starts when an iteration's backwards are over, before gradients are reduced, and is
waited for when the next one begins. It goes over a group of its own, so that nothing of Megatron's
waits for it, and on GPUs no work of theirs does. What replicas have taken comes with it: as it goes
round anyway, no rank has to report that to another one.
"""

from __future__ import annotations

import contextlib
import hashlib
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_adaptra import waits
from megatron_adaptra.errors import PeerLost

# ENDED: there are no data for another iteration. DIFFERENT: what plans are, which no rank gives.
READY, ENDED, FAILED, DIFFERENT = range(4)
_NS = 1e9  # of a second
_LONGEST = 1e9  # seconds; what is more, or less than 0, is nonsense


class Voted(NamedTuple):
    """`word`: the worst one of any rank; DIFFERENT where plans differ.

    `seconds`: by replica, of the last of its ranks; None where a rank does not know them.
    """

    word: int
    seconds: tuple[float, ...] | None


class ShareVote:
    """One rank's part; made on all ranks together, over gloo.

    `replicas`: how many there are. `timeout`: seconds that it is waited for, when an iteration has
    ended. Replicas may be late for it by more than that: it begins before they wait for each other
    in their reductions.

    Raises RuntimeError where ranks cannot be connected.
    """

    def __init__(self, replicas: int, timeout: float) -> None:
        self._replicas, self._timeout = replicas, timedelta(seconds=timeout)
        self._group: Any = dist.new_group(backend="gloo", timeout=self._timeout)
        self._asked: tuple[Any, torch.Tensor] | None = None

    def start(self, word: int, plan: str, replica: int, seconds: float | None) -> None:
        """Give this rank's `word`, as all ranks do: READY, ENDED or FAILED for its `plan`.

        `seconds`: that its `replica` has taken here, in an iteration that is the same on all ranks;
        None if they are not known.
        """
        number = int.from_bytes(hashlib.sha256(plan.encode()).digest()[:7], "big")
        each = [0] * self._replicas
        unknown = seconds is None or not 0 <= seconds < _LONGEST
        if seconds is not None and not unknown:
            each[replica] = round(_NS * seconds)
        words = torch.tensor([word, number, -number, unknown, *each], dtype=torch.int64)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        options.timeout = timedelta(seconds=waits.FOREVER)  # `result` has a deadline
        # Not torch's function: it is patched, to send what crosses stages in another way.
        self._asked = self._group.allreduce([words], options), words

    def result(self) -> Voted:
        """What all ranks have given. Raises PeerLost."""
        assert self._asked is not None
        (work, words), self._asked = self._asked, None
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise PeerLost(f"a rank has not voted on the shares of replicas: {reason}") from error
        word, most, least, unknown, *each = words.tolist()
        seconds = None if unknown else tuple(one / _NS for one in each)
        return Voted(word if most == -least or word == FAILED else DIFFERENT, seconds)

    def close(self) -> None:
        """End its connections; a vote that is under way is waited for, if its ranks are there."""
        asked, self._asked = self._asked, None
        with contextlib.suppress(Exception):
            if asked is not None:
                asked[0].wait(timedelta(seconds=waits.CLOSE))
            dist.destroy_process_group(self._group)
