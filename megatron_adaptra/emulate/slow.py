"""Rules of what is slow: `SUBJECT:HOW[@FROM..[TO]]`, one form for commands and trainings.

2-3:40ms          a link of the pipeline, both ways, in every replica; 2>3 is one way
2-3:10MB/s        what it carries; both: 2-3:40ms,jitter=4ms,bandwidth=10MB/s
0.1-1.2:40ms      a path between two workers, named by replica and stage
1.2:2x            a worker: its ops take twice as long
1.2:10MB/s        what a worker receives, and sends, over all its links; all:10MB/s: each one
1.2:dead          a worker that is gone
2:2x              a replica: all its workers
2:30ms            a replica whose ranks come late to the reduction of gradients
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.emulate.rules import LONGEST_RULE, PERIOD, parts_of
from megatron_adaptra.emulate.scenario import is_file, texts_of

LINK, WORKER, PORT, DEAD, REPLICA, LATE = "link", "worker", "port", "dead", "replica", "late"
KINDS = (LINK, WORKER, PORT, DEAD, REPLICA, LATE)
SYNTAX = (
    "it has to be a rule: 2-3:40ms or 2-3:10MB/s (a link), 0.1-1.2:40ms (a path), 1.2:2x (a "
    "worker), 2:2x (a replica)"
)
_RULE = re.compile(r"([^:@]+):([^:@]+)(@[^:@]*)?")
_TIMED = re.compile(rf"([^:@]+):([^:@]+){PERIOD}", re.ASCII)
_ANOTHER = re.compile(r",(?=[^,=]*:)")  # a comma before another rule, not before an option of one


def sorted_rules(rules: Sequence[str], field: str) -> dict[str, list[str]]:
    """Return the `rules` by kind, each as a text; one for each of KINDS, of which some are empty.

    A rule may be several with commas between, or the name of a scenario file. `field`: for errors.
    Raises BadInput for a text that is no rule, BadFile for a file that has none.
    """
    out: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for given in rules:
        if is_file(given):
            for kind, texts in _of_file(given, field).items():
                out[kind] += texts
            continue
        for text in rules_in(given):
            out[_kind(text, field)].append(text.strip())
    return out


def rules_in(given: str) -> list[str]:
    """Return the rules of the text `given`, where several have commas between."""
    return [given] if is_file(given) else _ANOTHER.split(given)


def _of_file(name: str, field: str) -> dict[str, list[str]]:
    from megatron_adaptra.config import load_yaml  # YAML is for files only

    lists = {"links": LINK, "workers": WORKER}
    there = [one for one in lists if one in load_yaml(Path(name))] or ["links"]
    return {lists[one]: [text for text, _ in texts_of([name], field, one)] for one in there}


def _kind(text: str, field: str) -> str:
    match = _RULE.fullmatch(text.strip()) if len(text) <= LONGEST_RULE else None
    if match is None:
        raise BadInput(field, text, SYNTAX)
    about, how = match[1], match[2]
    if "-" in about or ">" in about:
        return LINK
    if how == "dead":
        return DEAD
    if how.endswith("/s"):
        return PORT
    if "." in about:
        return WORKER
    return REPLICA if how.endswith("x") else LATE


def period_of(text: str, field: str) -> tuple[float, float]:
    """Return the iterations in which the rule `text` holds: the first, and the one after the last.

    `field`: for errors. Raises BadInput.
    """
    _, _, first, end, timed = parts_of(_TIMED, text, field, SYNTAX)
    if timed:
        raise BadInput(field, text, "its period has to be iterations, such as @10..20")
    return first, end
