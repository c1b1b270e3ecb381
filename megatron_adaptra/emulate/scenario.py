"""Slow links from a file: a YAML list of link rules, for several links or changes over time.

The same file may have a list of slow workers, which emulate/worker_rules.py reads.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from megatron_adaptra.base.errors import BadInput, as_text, refuse_unknown
from megatron_adaptra.emulate.rules import FIELD, LinkRule, parse_rules

# By the lists that a scenario may have. The first two of an entry's keys are needed; from the fifth
# on they are options of the rule.
_KEYS = {
    "links": ("link", "delay", "from", "to", "jitter", "bandwidth", "loss"),
    "workers": ("worker", "times", "from", "to"),
}


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
    for text, field in texts_of(rules, flag):
        for rule in parse_rules(text, stages, field, anywhere=network, replicas=replicas):
            if not network and (rule.loss or rule.timed):
                raise BadInput(field, text, "loss and seconds need a network: see adaptra netlab")
            out.append(rule)
    return out


def check_rules(rules: Sequence[str]) -> None:
    """Raise BadInput for the first of `rules` that suits no job, of any size."""
    for text, field in texts_of(rules, FIELD):
        # Only a path names replicas; a link of stages would become as many rules.
        replicas = _ends(text) if "." in text.partition(":")[0] else 1
        load_rules([text], _ends(text), flag=field, replicas=replicas)


def hosts_in(rules: Sequence[str]) -> int:
    """Return how many hosts the links of `rules` need."""
    return max((_ends(text) for text, _ in texts_of(rules, "")), default=1)


def _ends(text: str) -> int:
    """Return one more than the greatest number that names a link in the rule `text`."""
    numbers = re.findall(r"[0-9]{1,9}", text.partition(":")[0])
    return 1 + max(map(int, numbers), default=0)


def is_file(rule: str) -> bool:
    """Return whether `rule` is the name of a scenario file."""
    return rule.endswith((".yaml", ".yml"))


def texts_of(rules: Sequence[str], flag: str, of: str = "links") -> list[tuple[str, str]]:
    """Return the texts of `rules`, each with its name in errors, which is `flag` outside of files.

    `of`: the list to read in a file, links or workers. Raises BadInput, BadFile.
    """
    out = []
    for rule in rules:
        if is_file(rule):
            out += [(text, rule) for text in _scenario(Path(rule), of)]
        else:
            out.append((rule, flag))
    return out


def _scenario(path: Path, of: str) -> list[str]:
    """Return the rules of the list called `of`, as texts."""
    from megatron_adaptra.config import load_yaml  # YAML is for files only

    data, keys = load_yaml(path), _KEYS[of]
    refuse_unknown(data, tuple(_KEYS), str(path))
    name, value, _, _, *options = keys
    entries, both = data.get(of), f"a {name} and a {value}"
    if not isinstance(entries, list) or not entries:
        allowed = f"it has to be a list of at least one, each with {both}"
        raise BadInput(f"{of} in {path}", entries, allowed)
    texts = []
    for entry in entries:
        if isinstance(entry, dict):
            refuse_unknown(entry, keys, str(path))
        if not isinstance(entry, dict) or not {name, value} <= entry.keys():
            raise BadInput(f"{of} in {path}", entry, f"each has to have {both}")
        given = {key: as_text(text) for key, text in entry.items() if text is not None}
        extra = "".join(f",{key}={given[key]}" for key in options if key in given)
        period = f"{given.get('from', 0)}..{given.get('to', '')}"
        texts.append(f"{given.get(name)}:{given.get(value)}{extra}@{period}")
    return texts
