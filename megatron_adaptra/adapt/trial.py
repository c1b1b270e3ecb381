"""Whether a change has made iterations longer, and when it is tried again if it has.

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

BEFORE, AFTER = 2, 4  # iterations whose medians are compared; the first one on a plan is in neither
RETRIED = ": tried again"
LONGER = 8  # iterations for which that is tried again where they differ by chance, perhaps
LONGEST = 100  # iterations after a change in which its control has to be as it was, to judge it
STEADY = 0.1  # a control that takes longer by a larger share explains longer iterations
NOISE = 0.05  # share by which the medians of iterations may differ, whatever has changed
FIRST_BLOCK, LONGEST_BLOCK = 50, 800  # iterations

T = TypeVar("T")


class Measured(NamedTuple):
    """An iteration: the `seconds` of what is judged, and of its control; None: there is none."""

    seconds: float
    control: float | None


class Outcome(NamedTuple):
    """Median seconds before and after a change."""

    before: float
    after: float


class Compared(NamedTuple):
    """Iterations before and after a change.

    `typical`: their medians. `nearest`: the longest one before it, and the shortest one after it as
    that would have been if its control took no longer than before.
    """

    typical: Outcome
    nearest: Outcome


class History(Generic[T]):
    """What is known of the last iterations, by number."""

    def __init__(self) -> None:
        self._known: deque[tuple[int, T]] = deque(maxlen=BEFORE + 1 + AFTER + LONGEST)

    def add(self, iteration: int, known: T) -> None:
        """Take what is `known` of an `iteration`, after all before it."""
        self._known.append((iteration, known))

    def around(self, since: int) -> tuple[list[T], list[T]]:
        """The last ones before iteration `since`, and after it; some are not measured."""
        before = [known for i, known in self._known if since - BEFORE - AFTER <= i < since]
        return before[-BEFORE:], [known for i, known in self._known if since < i][-AFTER:]


def compare_iterations(before: Sequence[Measured], after: Sequence[Measured]) -> Compared | None:
    """Iterations `before` a change with those `after` it.

    None where there are too few of them, or the control itself has got longer by more than STEADY.
    """
    if len(before) < BEFORE or len(after) < AFTER:
        return None
    longer = _longer([m.control for m in before], [m.control for m in after])
    if longer > 1 + STEADY:
        return None
    old, new = ([m.seconds for m in row] for row in (before, after))
    return Compared(
        # The second of four: one or two that something else has held up do not decide.
        Outcome(median(old), median_low(new)),
        Outcome(max(old), min(new) / max(1.0, longer)),
    )


def _longer(before: Sequence[float | None], after: Sequence[float | None]) -> float:
    """How many times as long a control takes as before; 1 where there is none."""
    was, now = ([seconds for seconds in row if seconds] for row in (before, after))
    return median(now) / median(was) if was and now else 1.0


def clearly_longer(outcome: Outcome) -> bool:
    """Whether iterations take longer after a change, by more than they may differ by chance."""
    return outcome.after > outcome.before * (1 + NOISE)


class Backoff:
    """For how long a kind of change that has failed is not tried again; twice as long each time.

    One that has not failed again for as long begins with the shortest pause.

    Args:
        longest: iterations.

    `until`: the iteration from which on it may be tried.
    """

    def __init__(self, longest: int = LONGEST_BLOCK) -> None:
        self.until = 0
        self._length, self._longest = 0, longest

    def failed(self, iteration: int) -> None:
        """The change has made iterations longer, as is known in `iteration`."""
        if iteration >= self.until + self._length:
            self._length = FIRST_BLOCK
        else:
            self._length = min(2 * self._length, self._longest)
        self.until = iteration + self._length

    def forget(self) -> None:
        """What has failed is not as it was: the next pause is the shortest."""
        self._length = 0

    def blocks(self, iteration: int) -> bool:
        """Whether it is not to be tried in `iteration`."""
        return iteration < self.until


class Trial:
    """A change in force, until measured iterations have shown whether it makes them longer.

    Args:
        since: the first iteration with it, which does not count.
        backoff: of this kind of change.
        slower: whether an outcome is clearly one that makes iterations longer.

    `over`: nothing more is to be judged. `failed`: what was measured of a change that is to be
    undone; None else.
    """

    def __init__(
        self, since: int, backoff: Backoff, slower: Callable[[Outcome], bool] = clearly_longer
    ) -> None:
        self.since, self.backoff, self.over = since, backoff, False
        self.failed: Outcome | None = None
        self._slower, self._left = slower, LONGER

    def judge(self, iteration: int, before: Sequence[Measured], after: Sequence[Measured]) -> None:
        """Compare iterations, as is known in this `iteration`: see `compare_iterations`."""
        if self.over:
            return
        compared = compare_iterations(before, after)
        if compared is None:
            self.over = iteration > self.since + LONGEST
        elif not self._slower(compared.typical):
            self.over = True
        elif self._slower(compared.nearest):
            self.over, self.failed = True, compared.typical
            self.backoff.failed(iteration)
        else:  # they differ by as much as they have got longer: the next ones may show why
            self.over, self._left = not self._left, self._left - 1


class Attempt:
    """An attempt is the change in force: on trial, or when it failed, its reason for another try.

    `trial`: of what is in force; None where nothing is to be judged. `again`: the iteration from
    which on to choose again although nothing has changed, and why; None for never.
    """

    def __init__(self) -> None:
        self.backoff = Backoff()
        self.trial: Trial | None = None
        self.again: tuple[int, str] | None = None

    def forget(self) -> None:
        """Judge nothing, and choose again only once something has changed."""
        self.trial = self.again = None

    def switched(self, since: int, tried: bool, again: int | None, why: str | None) -> None:
        """Begin with what is in force from iteration `since` on.

        Args:
            since: its first iteration.
            tried: it is to be judged.
            again: where it takes back what was slower, when that is tried again.
            why: the reason for what was in force before; None where that is not known.
        """
        self.trial = Trial(since, self.backoff) if tried else None
        self.again = None
        if again is not None and why is not None:
            self.again = again, why.removesuffix(RETRIED) + RETRIED

    def due(self, iteration: int) -> bool:
        """Return whether to choose again in `iteration` although nothing has changed."""
        return self.again is not None and iteration >= self.again[0]


def in_words(again: int | None, counted: str = "iteration") -> str:
    """What a sentence on a change says of when the one that it takes back is tried again.

    Args:
        again: the first iteration in which it may be; None where nothing is taken back.
        counted: what is counted, from one for people.
    """
    return "" if again is None else f"; tried again from {counted} {again + 1} on"
