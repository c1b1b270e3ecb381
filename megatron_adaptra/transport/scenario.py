"""Slow links from a file: a YAML list of link rules, for several links or changes over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_adaptra.config import load_yaml, refuse_unknown
from megatron_adaptra.errors import BadInput
from megatron_adaptra.transport.emulate import LinkRule, parse_rules

_KEYS = ("link", "delay", "from", "to", "jitter", "bandwidth")


def load_rules(rules: Sequence[str], stages: int) -> list[LinkRule]:
    """Rules as text (`2-3:40ms@10..`) or as names of scenario files. Raises BadInput."""
    out: list[LinkRule] = []
    for rule in rules:
        if rule.endswith((".yaml", ".yml")):
            for text in _scenario(Path(rule)):
                out += parse_rules(text, stages, rule)
        else:
            out += parse_rules(rule, stages)
    return out


def _scenario(path: Path) -> list[str]:
    data = load_yaml(path)
    refuse_unknown(data, ("links",), str(path))
    texts = []
    entries = data.get("links") or []
    if not isinstance(entries, list):
        raise BadInput(f"links in {path}", entries, "a list; each has a link and a delay")
    for entry in entries:
        if isinstance(entry, dict):
            refuse_unknown(entry, _KEYS, str(path))
        if not isinstance(entry, dict) or not {"link", "delay"} <= entry.keys():
            raise BadInput(f"links in {path}", entry, "each has a link and a delay")
        text = f"{entry['link']}:{entry['delay']}"
        for key in ("jitter", "bandwidth"):
            text += f",{key}={entry[key]}" if entry.get(key) is not None else ""
        first, end = (entry.get(key) for key in ("from", "to"))
        texts.append(f"{text}@{first or 0}..{'' if end is None else end}")
    return texts
