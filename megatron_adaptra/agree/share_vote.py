"""The vote of all ranks, by an all-reduce, on the shares of microbatches in the next iteration.

The all-reduce starts when an iteration's backwards are over, before gradients are reduced, and is
waited for when the next one begins. It goes over a group of its own, so that neither Megatron nor
work on GPUs waits for it. It carries the seconds that replicas have taken, so that no rank has to
report them to another one, and the counts that the first rank proposes for a later iteration: all
ranks learn of them by one and the same vote, or none does.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from megatron_adaptra.base import waits
from megatron_adaptra.base.errors import PeerLost
from megatron_adaptra.measure.host_use import HostUse

# ENDED: there are no data for another iteration. DIFFERENT: plans differ; no rank votes so itself.
READY, ENDED, FAILED, DIFFERENT = range(4)
_NS = 1e9  # of a second
_LONGEST = 1e9  # seconds; more, or less than 0, counts as unknown
T = TypeVar("T")


class Given(NamedTuple):
    """A contribution holds the measurements and proposals that a rank adds to its vote.

    `seconds`: of its replica on this rank, in an iteration that is the same on all ranks; None if
    not known. `use`: of its host, if it waits for a core. `counts`: proposed by one rank; None on
    others.
    """

    seconds: float | None = None
    use: HostUse | None = None
    counts: tuple[int, ...] | None = None


class Voted(NamedTuple):
    """A result holds the values that all ranks have learned from a vote.

    `word`: the worst one of any rank; DIFFERENT where plans differ. `seconds`: by replica, of its
    slowest rank; None where a rank does not know them. `uses`: by replica, of the rank that waits
    most, if any does. `counts`: the proposed ones, if any.
    """

    word: int
    seconds: tuple[float, ...] | None
    uses: tuple[HostUse | None, ...]
    counts: tuple[int, ...] | None


class ShareVote:
    """A share vote exchanges one rank's vote with all others over gloo; all ranks make it together.

    `replicas`: how many there are. `timeout`: seconds to wait for the result when an iteration has
    ended. Replicas may be late for a vote by more than that: it begins before they wait for each
    other in their reductions.

    Raises RuntimeError where ranks cannot be connected.
    """

    def __init__(self, replicas: int, timeout: float) -> None:
        self._replicas, self._timeout = replicas, timedelta(seconds=timeout)
        self._group: Any = dist.new_group(backend="gloo", timeout=self._timeout)
        self._asked: tuple[Any, torch.Tensor] | None = None

    def start(self, word: int, plan: str, replica: int, given: Given) -> None:
        """Give this rank's `word`, as all ranks do: READY, ENDED or FAILED for its `plan`.

        `given`: with it, by a rank of this `replica`; what is nonsense there is left out.
        """
        number = int.from_bytes(hashlib.sha256(plan.encode()).digest()[:7], "big")
        each, uses = [0] * self._replicas, [0] * self._replicas
        unknown = type(given.seconds) is not float or not 0 <= given.seconds < _LONGEST
        if given.seconds is not None and not unknown:
            each[replica] = round(_NS * given.seconds)
        if isinstance(given.use, HostUse):
            packed = _tried(given.use.packed)
            uses[replica] = packed if type(packed) is int else 0
        row = [word, number, -number, unknown, *each, *uses, *self._counts(given)]
        words = torch.tensor(row, dtype=torch.int64)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        options.timeout = timedelta(seconds=waits.FOREVER)  # `result` has a deadline
        # Not torch's function: it is patched, to send what crosses stages in another way.
        self._asked = self._group.allreduce([words], options), words

    def _counts(self, given: Given) -> list[int]:
        """Return the proposed counts, by replica; zeros for none, or a malformed proposal."""
        counts = given.counts if isinstance(given.counts, tuple) else ()
        fit = len(counts) == self._replicas and all(type(c) is int and c > 0 for c in counts)
        return list(counts) if fit else [0] * self._replicas

    def result(self) -> Voted:
        """Wait for the result of the vote that was started last. Raises PeerLost."""
        assert self._asked is not None
        (work, words), self._asked = self._asked, None
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise PeerLost(f"a rank has not voted on the shares of replicas: {reason}") from error
        word, most, least, unknown, *rest = words.tolist()
        many = range(0, len(rest), self._replicas)
        each, uses, counts = (rest[i : i + self._replicas] for i in many)
        return Voted(
            word if most == -least or word == FAILED else DIFFERENT,
            None if unknown else tuple(one / _NS for one in each),
            tuple(_tried(HostUse.unpacked, one) if one else None for one in uses),
            tuple(counts) if any(counts) else None,
        )

    def close(self) -> None:
        """End its connections; a vote that is under way is waited for, if its ranks are there."""
        asked, self._asked = self._asked, None
        with contextlib.suppress(Exception):
            if asked is not None:
                asked[0].wait(timedelta(seconds=waits.CLOSE))
            dist.destroy_process_group(self._group)


def _tried(function: Callable[..., T], *args: Any) -> T | None:
    """Return the result of `function(*args)`; None where it fails, as training goes on."""
    with contextlib.suppress(Exception):
        return function(*args)
    return None
