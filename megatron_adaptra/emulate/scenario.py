"""Slow links from a file: a YAML list of link rules, for several links or changes over time.

The same file may have a list of slow workers, which emulate/worker_rules.py reads.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_adaptra.base.errors import BadInput, as_text
from megatron_adaptra.config import load_yaml, refuse_unknown
from megatron_adaptra.emulate.rules import FIELD, LinkRule, parse_rules

_LISTS = ("links", "workers")  # that a scenario may have
_KEYS = ("link", "delay", "from", "to", "jitter", "bandwidth", "loss")


def load_rules(
    rules: Sequence[str],
    stages: int,
    network: bool = False,
    flag: str = FIELD,
    replicas: int = 1,
) -> list[LinkRule]:
    """The rules in `rules`: text (`2-3:40ms@10..`) or names of scenario files. Raises BadInput.

    `stages`: of each of so many `replicas`; a rule for a link of stages becomes one for the workers
    of each replica. `flag`: by which the rules came. `network`: of a laboratory, where any two
    hosts have a link, packets can be lost, and rules may be in force for seconds instead of
    iterations.
    """
    out = []
    for text, field in _expand(rules, flag):
        for rule in parse_rules(text, stages, field, anywhere=network, replicas=replicas):
            if not network and (rule.loss or rule.timed):
                raise BadInput(field, text, "loss and seconds need a network: see adaptra netlab")
            out.append(rule)
    return out


def check_rules(rules: Sequence[str]) -> None:
    """Raise BadInput for the first of `rules` that suits no job, of any size."""
    for text, field in _expand(rules, FIELD):
        # Only a path names replicas; a link of stages would become as many rules.
        replicas = _ends(text) if "." in text.partition(":")[0] else 1
        load_rules([text], _ends(text), flag=field, replicas=replicas)


def hosts_in(rules: Sequence[str]) -> int:
    """Return how many hosts the links of `rules` need."""
    return max((_ends(text) for text, _ in _expand(rules, "")), default=1)


def _ends(text: str) -> int:
    """Return one more than the greatest number that names a link in the rule `text`."""
    numbers = re.findall(r"[0-9]{1,9}", text.partition(":")[0])
    return 1 + max(map(int, numbers), default=0)


def _expand(rules: Sequence[str], flag: str) -> list[tuple[str, str]]:
    """Return the rules' texts, each with its name in errors."""
    out = []
    for rule in rules:
        if rule.endswith((".yaml", ".yml")):
            out += [(text, rule) for text in _scenario(Path(rule))]
        else:
            out.append((rule, flag))
    return out


def entries_of(path: Path, of: str, keys: Sequence[str], needed: Sequence[str]) -> list[Any]:
    """Read the list called `of` in the scenario at `path`: mappings from keys to texts.

    Each has the `needed` ones of `keys`, and no others. Raises BadInput, BadFile.
    """
    data = load_yaml(path)
    refuse_unknown(data, _LISTS, str(path))
    entries, both = data.get(of), " and ".join(f"a {key}" for key in needed)
    if not isinstance(entries, list) or not entries:
        allowed = f"it has to be a list of at least one, each with {both}"
        raise BadInput(f"{of} in {path}", entries, allowed)
    for entry in entries:
        if isinstance(entry, dict):
            refuse_unknown(entry, keys, str(path))
        if not isinstance(entry, dict) or not set(needed) <= entry.keys():
            raise BadInput(f"{of} in {path}", entry, f"each has to have {both}")
    return [
        {key: as_text(value) for key, value in entry.items() if value is not None}
        for entry in entries
    ]


def _scenario(path: Path) -> list[str]:
    texts = []
    for given in entries_of(path, "links", _KEYS, ("link", "delay")):
        text = f"{given.get('link')}:{given.get('delay')}"
        for key in ("jitter", "bandwidth", "loss"):
            text += f",{key}={given[key]}" if key in given else ""
        texts.append(f"{text}@{given.get('from', 0)}..{given.get('to', '')}")
    return texts
