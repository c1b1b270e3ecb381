"""Slow links from a file: a YAML list of link rules, for several links or changes over time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from megatron_adaptra.config import load_yaml, refuse_unknown
from megatron_adaptra.errors import BadInput, as_text
from megatron_adaptra.transport.rules import FIELD, LinkRule, parse_rules

_KEYS = ("link", "delay", "from", "to", "jitter", "bandwidth", "loss")


def load_rules(
    rules: Sequence[str], stages: int, network: bool = False, flag: str = FIELD
) -> list[LinkRule]:
    """The rules in `rules`: text (`2-3:40ms@10..`) or names of scenario files. Raises BadInput.

    `stages`: of the pipeline. `flag`: by which the rules came. `network`: of a laboratory,
    where any two hosts have a link, packets can be lost, and rules may be in force for seconds
    instead of iterations.
    """
    out = []
    for text, field in _expand(rules, flag):
        for rule in parse_rules(text, stages, field, anywhere=network):
            if not network and (rule.loss or rule.timed):
                raise BadInput(field, text, "loss and seconds need a network: see adaptra netlab")
            out.append(rule)
    return out


def hosts_in(rules: Sequence[str]) -> int:
    """As many hosts as the links of `rules` need."""
    links = [re.findall(r"[0-9]{1,9}", text.partition(":")[0]) for text, _ in _expand(rules, "")]
    return 1 + max((int(end) for link in links for end in link), default=0)


def _expand(rules: Sequence[str], flag: str) -> list[tuple[str, str]]:
    """The rules' texts, and what errors call each."""
    out = []
    for rule in rules:
        if rule.endswith((".yaml", ".yml")):
            out += [(text, rule) for text in _scenario(Path(rule))]
        else:
            out.append((rule, flag))
    return out


def _scenario(path: Path) -> list[str]:
    data = load_yaml(path)
    refuse_unknown(data, ("links",), str(path))
    texts = []
    entries = data.get("links")
    if not isinstance(entries, list) or not entries:
        allowed = "it has to be a list of at least one, each with a link and a delay"
        raise BadInput(f"links in {path}", entries, allowed)
    for entry in entries:
        if isinstance(entry, dict):
            refuse_unknown(entry, _KEYS, str(path))
        if not isinstance(entry, dict) or not {"link", "delay"} <= entry.keys():
            raise BadInput(f"links in {path}", entry, "each has to have a link and a delay")
        given = {key: as_text(value) for key, value in entry.items() if value is not None}
        text = f"{given.get('link')}:{given.get('delay')}"
        for key in ("jitter", "bandwidth", "loss"):
            text += f",{key}={given[key]}" if key in given else ""
        texts.append(f"{text}@{given.get('from', 0)}..{given.get('to', '')}")
    return texts
