"""Reasons why ranks have ended: left by them for torchrun, or found in their output.

When one rank ends, the others fail over its connections: they are consequences, not reasons.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from megatron_adaptra.base.errors import line_of
from megatron_adaptra.base.log import GOES_ON

_FILE = "TORCHELASTIC_ERROR_FILE"  # which torchrun gives each rank
_OURS = "adaptra: "
# Beginnings of lines that say how a training is doing, which is no reason why it has ended.
_NEWS = re.compile(
    r"(replica \d+: )?(slow |thin |busy |data loader: |garbage collection: |late rank: |"
    r"recovered: |from (iteration|reduction) |the plan of |(link|worker) \S+ takes |would be done|"
    r"a hang is named|hangs are not named|warmup: |gradients of )"
)
_CONSEQUENCES = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection closed|timed out|lost rank|"
    r"SIGTERM|^status 143$",  # torchrun ends the others
    re.IGNORECASE,
)
_EXCEPTION = re.compile(r"(\[\w+\]:? ?)?([A-Za-z_][\w.]*(Error|Exception|Exit|Lost)): ")
_ENDED = re.compile(r"rank \d+ has ended: (status )?")


@contextlib.contextmanager
def recorded() -> Iterator[None]:
    """Leave an exception that ends this rank where torchrun looks for it."""
    try:
        yield
    except Exception as error:
        file = os.environ.get(_FILE)
        if file and not Path(file).exists():
            words = line_of(f"{type(error).__name__}: {error}")
            now = time.time()
            with contextlib.suppress(OSError):
                Path(file).write_text(json.dumps({"message": words, "timestamp": now, "at": now}))
        raise


def ended_by(rank: int, why: str) -> str:
    """Describe that `rank` has ended first; `why`: a signal, an exception or a status."""
    return f"rank {rank} has ended: {why}"


def consequence(why: str) -> bool:
    """Return whether a rank ended because another one has, by the reason `why`."""
    return _CONSEQUENCES.search(why) is not None


def reason(lines: Iterable[str], status: int) -> str:
    """Find why ranks that have printed these `lines` have ended with `status`."""
    ended: list[str] = []
    ours: list[str] = []
    others: list[str] = []
    vague: list[str] = []  # a status alone
    for line in lines:
        text = line.strip()
        if text.startswith(_OURS) and GOES_ON not in text:
            text = text.removeprefix(_OURS)
            if _NEWS.match(text):
                continue
            how = _ENDED.match(text)
            (ours if how is None else vague if how[1] else ended).append(text)
        elif _EXCEPTION.match(text):
            others.append(text)
    found = [*ours, *reversed(others)]
    causes = [text for text in found if not consequence(text)]
    first = next(iter([*causes, *found, *vague]), "")
    if ended and not consequence(ended[0]):  # what the others say to it names the op
        first = "; ".join([ended[0], *ours[:1]])
    if status < 0:
        return first or f"torchrun's agent has ended: {signal.Signals(-status).name}"
    return first or f"the ranks ended with status {status}"
