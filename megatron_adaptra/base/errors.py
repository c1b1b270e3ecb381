"""The package's errors: each says what happened, the value, what is allowed, and what to do."""

from __future__ import annotations

import difflib
import reprlib
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

_VALUE, _LINE = 240, 1000  # characters that are shown: of a value, and of a whole line


class _Shown(reprlib.Repr):
    """`repr` of what a user may have given: of any size, nested in any depth."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother, self.maxlong = 4, _VALUE, _VALUE, 60
        self.maxlist = self.maxtuple = self.maxdict = 16

    def repr_int(self, x: int, level: int) -> str:
        """Python itself refuses to write a number of more than some thousand digits."""
        if x.bit_length() > 4000:
            return f"a number of {int(x.bit_length() * 0.30103)} digits"
        return super().repr_int(x, level)


def shown(value: object) -> str:
    """`value` as Python writes it, cut in the middle to a readable length."""
    return _cut(_Shown().repr(value), _VALUE)


def as_text(value: object) -> str:
    """A text as it is; any other `value`, such as a number in YAML, as it is `shown`."""
    return value if isinstance(value, str) else shown(value)


def line_of(error: object) -> str:
    """The first line of an `error`, or of any text: printable, and of readable length."""
    line = next(iter(str(error).splitlines()), "") or type(error).__name__
    return _cut("".join(c if c.isprintable() else repr(c)[1:-1] for c in line[: 4 * _LINE]), _LINE)


def _cut(text: str, most: int) -> str:
    """At most `most` characters: the beginning and the end."""
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-(most // 2 - 3) :]}"


class AdaptraError(Exception):
    """Base of every error this package raises on purpose."""


class BadInput(AdaptraError):
    """A value given by the user is not usable; the command line exits with status 2.

    `field`: the flag or key as the user wrote it; `value`: what was given, None for nothing;
    `allowed`: what may be given, or why this may not.
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field} {'is missing' if value is None else shown(value)}: {allowed}")
        self.field, self.value, self.allowed = field, value, allowed


class BadFile(BadInput):
    """A file named by the user cannot be read, understood or written.

    `field`: the flag or key that names the file `path`; `fault`: what is wrong
    with it, as a sentence.
    """

    def __init__(self, field: str, path: object, fault: str) -> None:
        super().__init__(field, path, fault)
        self.args = (f"{field} {shown(str(path))}: {fault}",)


class MissingPackage(AdaptraError):
    """Packages that something needs are not installed; the command line exits with status 2.

    `what` needs the `packages`. `install`: what pip has to be given, such as
    "'megatron-adaptra[demo]'".
    """

    def __init__(self, what: str, packages: Sequence[str], install: str) -> None:
        names = " and ".join([", ".join(packages[:-1]), packages[-1]] if packages[1:] else packages)
        are = "are" if packages[1:] else "is"
        super().__init__(f"{what} needs {names}, which {are} not installed: pip install {install}")
        self.packages = tuple(packages)


class Interrupted(AdaptraError):
    """The signal `signum` has ended a command, whose exit status is 128 and that number.

    `what`: what has become of it, as a sentence.
    """

    def __init__(self, signum: int, what: str) -> None:
        super().__init__(f"interrupted by {signal.Signals(signum).name}; {what}")
        self.signum = signum


class ScheduleError(AdaptraError):
    """A schedule or program that cannot run: a deadlock, a missing op, too many activations."""


class UnsupportedMegatron(AdaptraError):
    """The installed megatron-core is not one this package knows how to drive."""


class UnsupportedBackend(AdaptraError):
    """The pipeline's messages use a backend of torch's that this package has no transport for."""


class NoConnections(AdaptraError):
    """The connections that adapting needs cannot be opened, or are too many, on some rank."""


class PlanningFailed(AdaptraError):
    """A process that plans beside a training gives no answer, an error, or a malformed answer."""


class PeerLost(AdaptraError):
    """Nothing came from a rank: it died, its connection closed, or a timeout ran out."""


class DeviceFailed(AdaptraError):
    """No GPU can be used, or a call into its driver failed."""


class BadMessage(AdaptraError):
    """A control message from another rank is malformed or impossible."""


class BadBundle(AdaptraError):
    """A proposed bundle must not come into force: damaged, of another shape or unknown kind."""


class Disagreement(AdaptraError):
    """A rank has not learned before the deadline whether a proposed plan was accepted."""


@contextmanager
def reading(what: str, data: object) -> Iterator[None]:
    """A context for code that reads `data`: an error of its form becomes a BadInput of `what`."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
        raise BadInput(what, data, "it has to be in the form that to_json() writes") from None


def reason_of(error: BaseException | str) -> str:
    """A backend's `error` in a few words, without its addresses if the peer has closed.

    The caller adds which rank it is about.
    """
    text = str(error).strip()
    if "closed by peer" in text or "reset by peer" in text or "Broken pipe" in text:
        return "its connection closed"
    return text.splitlines()[0] if text else "it failed"


def refuse_unknown(data: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Raise BadInput for the first key of `data` that is not `known`, with the nearest known one.

    `where`: what the message calls the source of `data`.
    """
    for key in data:
        if key not in known:
            near = difflib.get_close_matches(as_text(key)[:99], known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise BadInput(f"unknown key in {where}", key, hint)
