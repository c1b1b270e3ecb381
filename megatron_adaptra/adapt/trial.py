"""Trials of changes: whether one has made iterations longer, and when to try it again if so.

Every remedy that judges itself by measured time does so here: plans of pipelines and routes, shares
of microbatches, reductions. Iterations with a change are compared with those before it, and each of
these with a *control*: seconds of the same iteration that the change cannot make longer. What makes
the control longer, too, is no fault of the change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from statistics import median, median_low
from typing import Generic, NamedTuple, TypeVar

from megatron_adaptra.adapt.log import Decision

BEFORE, AFTER = 2, 4  # iterations whose medians are compared; the first one on a plan is in neither
RETRIED, ON_AGAIN = ": tried again", ": acting is on again"
LONGER = 8  # further iterations that are compared where the difference may be chance
LONGEST = 100  # iterations after a change in which its control has to be as it was, to judge it
STEADY = 0.1  # a control that takes longer by a larger share explains longer iterations
NOISE = 0.05  # share by which the medians of iterations may differ, whatever has changed
FIRST_BLOCK, LONGEST_BLOCK = 50, 800  # iterations

T = TypeVar("T")


class Measured(NamedTuple):
    """A measured iteration has `seconds` that are judged, and those of its `control`, if any."""

    seconds: float
    control: float | None


class Outcome(NamedTuple):
    """An outcome compares the median seconds before a change with those after it."""

    before: float
    after: float


class History(Generic[T]):
    """A history keeps measurements of the last iterations, by number."""

    def __init__(self) -> None:
        self._known: deque[tuple[int, T]] = deque(maxlen=BEFORE + 1 + AFTER + LONGEST)

    def add(self, iteration: int, known: T) -> None:
        """Take what is `known` of an `iteration`, after all before it."""
        self._known.append((iteration, known))

    def around(self, since: int) -> tuple[list[T], list[T]]:
        """Return the last BEFORE entries before iteration `since`, and the last AFTER past it."""
        before = [known for i, known in self._known if since - BEFORE - AFTER <= i < since]
        return before[-BEFORE:], [known for i, known in self._known if since < i][-AFTER:]


def compare_iterations(
    before: Sequence[Measured], after: Sequence[Measured]
) -> tuple[Outcome, Outcome] | None:
    """Compare iterations `before` a change with those `after` it.

    Returns their medians, and the nearest: the longest iteration before it, and the shortest after
    it, divided by how many times as long the control takes. None where there are too few of them,
    or the control itself has got longer by more than STEADY.
    """
    if len(before) < BEFORE or len(after) < AFTER:
        return None
    longer = _longer([m.control for m in before], [m.control for m in after])
    if longer > 1 + STEADY:
        return None
    old, new = ([m.seconds for m in row] for row in (before, after))
    # The second of four: one or two that something else has held up do not decide.
    typical = Outcome(median(old), median_low(new))
    return typical, Outcome(max(old), min(new) / max(1.0, longer))


def _longer(before: Sequence[float | None], after: Sequence[float | None]) -> float:
    """Return how many times as long a control takes as before; 1 where there is none."""
    was, now = ([seconds for seconds in row if seconds] for row in (before, after))
    return median(now) / median(was) if was and now else 1.0


def clearly_longer(outcome: Outcome) -> bool:
    """Return whether iterations take longer after a change, by more than chance may explain."""
    return outcome.after > outcome.before * (1 + NOISE)


class Backoff:
    """A backoff blocks a kind of change that has failed, for twice as long each time.

    If no failure follows for as long as the last block, the next block is the shortest again.

    Args:
        longest: iterations of the longest block.

    `until`: the iteration from which on the change may be tried.
    """

    def __init__(self, longest: int = LONGEST_BLOCK) -> None:
        self.until = 0
        self._length, self._longest = 0, longest

    def failed(self, iteration: int) -> None:
        """Block the change from `iteration` on: it has made iterations longer."""
        if iteration >= self.until + self._length:
            self._length = FIRST_BLOCK
        else:
            self._length = min(2 * self._length, self._longest)
        self.until = iteration + self._length

    def forget(self) -> None:
        """Make the next block the shortest: conditions have changed since the last failure."""
        self._length = 0

    def blocks(self, iteration: int) -> bool:
        """Return whether the change is blocked in `iteration`."""
        return iteration < self.until


class Trial:
    """A trial compares iterations after a change with those before, until it has a result.

    Args:
        since: the first iteration with the change, which does not count.
        backoff: blocks this kind of change if it fails.
        slower: returns whether an outcome shows that iterations have clearly become longer.

    `over`: it has its result, or gives up. `failed`: the outcome of a change that is to be undone;
    None else.
    """

    def __init__(
        self, since: int, backoff: Backoff, slower: Callable[[Outcome], bool] = clearly_longer
    ) -> None:
        self.since, self.backoff, self.over = since, backoff, False
        self.failed: Outcome | None = None
        self._slower, self._left = slower, LONGER

    def judge(self, iteration: int, before: Sequence[Measured], after: Sequence[Measured]) -> None:
        """Compare the iterations known in this `iteration`: see `compare_iterations`."""
        if self.over:
            return
        compared = compare_iterations(before, after)
        if compared is None:
            self.over = iteration > self.since + LONGEST
            return
        typical, nearest = compared
        if not self._slower(typical):
            self.over = True
        elif self._slower(nearest):
            self.over, self.failed = True, typical
            self.backoff.failed(iteration)
        else:  # single iterations differ as much as the medians: later ones may decide
            self.over, self._left = not self._left, self._left - 1


class Attempt:
    """An attempt puts the change in force on trial, or plans another try of one taken back.

    `trial`: of the change in force; None where nothing is to be judged. `again`: the iteration from
    which on to choose again although nothing has changed, and why; None for never. `held`: the
    reason of a change that waits until ranks act; "" for none.
    """

    def __init__(self) -> None:
        self.backoff = Backoff()
        self.trial: Trial | None = None
        self.again: tuple[int, str] | None = None
        self.held = ""

    def hold(self, decision: Decision | None) -> None:
        """Take note that the change of a `decision`, if there is one, waits until ranks act."""
        if decision is not None:
            self.held, self.again = decision.why, None

    def resume(self) -> None:
        """Choose again: ranks act."""
        if self.held:
            self.held, self.again = "", (0, self.held + ON_AGAIN)

    def forget(self) -> None:
        """Judge nothing, and choose again only once something has changed."""
        self.trial = self.again = None

    def switched(self, decision: Decision, before: Decision | None, tried: bool) -> None:
        """Begin with a `decision` in place of the one `before`; it is judged if it is `tried`."""
        self.trial = Trial(decision.iteration, self.backoff) if tried else None
        self.again = None
        if decision.again is not None and before is not None:
            self.again = decision.again, before.why.removesuffix(RETRIED) + RETRIED

    def due(self, iteration: int) -> bool:
        """Return whether to choose again in `iteration` although nothing has changed."""
        return self.again is not None and iteration >= self.again[0]


def in_words(again: int | None, counted: str = "iteration") -> str:
    """Describe when a change that is taken back is tried again, as the end of a sentence.

    Args:
        again: the first iteration in which it may be; None where nothing is taken back.
        counted: what is counted, from one for people.
    """
    return "" if again is None else f"; tried again from {counted} {again + 1} on"
