"""Old flags of the demo: accepted for one more release, with a line that has the new ones.

Words are replaced before they are parsed, so that no parser knows an old flag.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from megatron_adaptra.cli.output import note
from megatron_adaptra.emulate.scenario import is_file
from megatron_adaptra.emulate.slow import rules_in

# Flags that take one value, those that take rules without a period, and with one.
_ONE = ("--delay", "--bandwidth", "--from-iteration", "--to-iteration")
_RULE_LISTS = ("--slow-worker", "--slow-path", "--late-rank", "--slow-replica")
_WHOLE_RUN = ("--emulate-link", "--emulate-worker", "--host")


def renewed(words: Sequence[str]) -> list[str]:
    """Return the `words` of a demo with one `--slow` for each thing that gets slow; say so."""
    kept: list[str] = []
    old: dict[str, list[str]] = {}
    rest = list(words)
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        if flag not in (*_ONE, "--slow-link", *_RULE_LISTS, *_WHOLE_RUN, "--data-parallel"):
            kept.append(flag + equals + value)
            continue
        value = value if equals or not rest else rest.pop(0)
        if flag == "--data-parallel":
            note("--data-parallel goes with the next release: write --replicas")
            kept += ["--replicas", value]
        else:
            old.setdefault(flag, []).append(value)
    if not old:
        return kept
    one = {flag: old[flag][-1] for flag in _ONE if flag in old}
    span = ""
    if "--from-iteration" in one or "--to-iteration" in one:
        count = _value(kept, "--iterations", 60)
        first = one.get("--from-iteration", str(count // 3))
        span = f"@{first}..{one.get('--to-iteration', str(2 * count // 3))}"
    links = [link for text in old.get("--slow-link", []) for link in text.split(",")]
    rules = [rule for flag in _RULE_LISTS for text in old.get(flag, []) for rule in rules_in(text)]
    stages = _value(kept, "--stages", 4)
    if not links and not rules and not any(flag in old for flag in _WHOLE_RUN):
        links = [f"{stages - 2}-{stages - 1}"]
    how = one.get("--delay") or one.get("--bandwidth") or "40ms"
    if "--delay" in one and "--bandwidth" in one:
        how += f",bandwidth={one['--bandwidth']}"
    late = "--late-rank" in old
    new = [f"{rule}{span}" for rule in (*(f"{link}:{how}" for link in links), *rules)]
    new += [rule if late else f"{rule}{span}" for rule in old.get("--host", [])]
    for text in (*old.get("--emulate-link", []), *old.get("--emulate-worker", [])):
        new += [rule if "@" in rule or is_file(rule) else f"{rule}@0.." for rule in rules_in(text)]
    slow = [word for rule in new for word in ("--slow", rule)]
    note(f"{', '.join(old)} go with the next release: write {' '.join(slow)}")
    return [*kept, *slow]


def _value(words: Sequence[str], flag: str, default: int) -> int:
    """Return the number that `words` have for `flag`."""
    texts = [after for word, after in pairwise((*words, "")) if word == flag]
    texts += [word.partition("=")[2] for word in words if word.startswith(f"{flag}=")]
    return int(texts[-1]) if texts and texts[-1].isdecimal() else default
