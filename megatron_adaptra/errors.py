"""The package's errors: each says what happened, the value, what is allowed, and what to do."""

from __future__ import annotations

from collections.abc import Sequence


class AdaptraError(Exception):
    """Base of every error this package raises on purpose."""


class BadInput(AdaptraError):
    """A value given by the user is not usable; the command line exits with status 2.

    `field`: the flag or key as the user wrote it; `value`: what was given, None for nothing;
    `allowed`: what may be given.
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        wrong = " is missing" if value is None else f": {value!r} is not allowed"
        super().__init__(f"{field}{wrong}; {allowed}")
        self.field, self.value, self.allowed = field, value, allowed


class BadFile(BadInput):
    """A file named by the user cannot be read, understood or written.

    `field`: the flag or key that names the file `path`; `fault`: what is wrong
    with it, as a sentence.
    """

    def __init__(self, field: str, path: object, fault: str) -> None:
        super().__init__(field, path, fault)
        self.args = (f"{field} {str(path)!r}: {fault}",)


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


class ScheduleError(AdaptraError):
    """A schedule or program that cannot run: a deadlock, a missing op, too many activations."""


class UnsupportedMegatron(AdaptraError):
    """The installed megatron-core is not one this package knows how to drive."""


class UnsupportedBackend(AdaptraError):
    """The pipeline's messages go by a backend that this package has no transport for yet."""


class TooFewDescriptors(AdaptraError):
    """The control plane's connections do not fit into some rank's limit of open files."""


class PeerLost(AdaptraError):
    """A rank did not deliver: it died, its connection closed, or its time ran out."""


class BadMessage(AdaptraError):
    """What another rank said on a control lane is no message, or is none that can be."""


class Disagreement(AdaptraError):
    """What was decided on a plan could not be found out, by any way, in time."""


def reason_of(error: BaseException | str) -> str:
    """A backend's complaint in few words; it names addresses, the caller names ranks."""
    text = str(error).strip()
    if "closed by peer" in text or "reset by peer" in text or "Broken pipe" in text:
        return "its connection closed"
    return text.splitlines()[0] if text else "it failed"
