"""Old names: accepted for one more release, with a line that has the new ones.

Words are replaced before they are parsed, so that no parser knows an old flag.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from megatron_adaptra.cli.output import note
from megatron_adaptra.emulate.scenario import is_file
from megatron_adaptra.emulate.slow import rules_in

# Of a key of a profile, or of the flag of that name: one of its entries, `1.2` or `1.2:2x`, as a
# rule of `slow`.
_RULES: dict[str, Callable[[str, str], str]] = {
    "failed": lambda about, how: f"{about}:dead",
    "slow_replica": lambda about, how: f"{about}:{_times(how)}",
    "slow_path": lambda about, how: f"{about}:{_both(how)}",
    "slow_port": lambda about, how: f"{about}:{how}",
}
_SET = (
    "backward_input_ms", "backward_weight_ms", "link_delay_ms", "return_delay_ms", "link_jitter",
    "link_bandwidth", "port_bandwidth", "optimizer_ms", "worker_budget",
)  # fmt: skip
_SWITCHES = {
    "--split": "split=yes", "--no-split": "split=no", "--no-recompute": "recompute=no",
}  # fmt: skip
_JOB = ("plan", "compare", "simulate", "draw")


def _times(how: Any) -> str:
    return how if str(how).endswith("x") else f"{how}x"


def _both(how: str) -> str:
    """Write a rate and a delay, `10MB/s+40ms`, as options of a rule."""
    rate, plus, delay = how.partition("+")
    if not plus:
        return how
    rate, delay = (rate, delay) if rate.strip().endswith("/s") else (delay, rate)
    return f"{delay.strip()},bandwidth={rate.strip()}"


def renewed_keys(data: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the profile `data` with the keys of today; `path`: of its file, for the line."""
    out = {key: value for key, value in data.items() if key not in _RULES}
    slow = out.get("slow", [])
    if isinstance(slow, Mapping):
        slow = [f"{about}:{_times(how)}" for about, how in slow.items()]
        note(f"{path}: slow is a list of rules now: [{', '.join(slow)}]")
    slow = [slow] if isinstance(slow, str) else slow
    for key in (one for one in _RULES if one in data):
        rules = _rules_of(key, data[key])
        note(f"{path}: {key} is now slow: [{', '.join(rules)}]")
        slow = [*slow, *rules]
    return {**out, "slow": slow} if "slow" in data or slow else out


def _rules_of(key: str, value: Any) -> list[str]:
    if isinstance(value, Mapping):
        pairs = [(str(about), str(how)) for about, how in value.items()]
    else:
        texts = value.split(",") if isinstance(value, str) else value
        texts = texts if isinstance(texts, (list, tuple)) else [texts]
        pairs = [(about, how) for about, _, how in (str(one).partition(":") for one in texts)]
    return [_RULES[key](about.strip(), how.strip()) for about, how in pairs]


def renewed(words: Sequence[str], command: str | None) -> list[str]:
    """Return the `words` of a `command` line with the flags of today; print each replacement."""
    if command == "demo":
        return _renewed_demo(words)
    out: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        key = flag[2:].replace("-", "_")
        if command not in _JOB or not flag.startswith("--"):
            out.append(word)
        elif flag in _SWITCHES:
            out += _with_a_line(flag, ["--set", _SWITCHES[flag]])
        elif key in _RULES or key in _SET:
            if not equals:
                value = rest.pop(0) if rest else ""
            new = ["--set", f"{key}={value}"]
            if key in _RULES:
                new = [word for rule in _rules_of(key, value) for word in ("--slow", rule)]
            out += _with_a_line(flag, new)
        else:
            out.append(word)
    return out


# Of the demo: flags that take one value, those that take rules without a period, and with one.
_ONE = ("--delay", "--bandwidth", "--from-iteration", "--to-iteration")
_RULE_LISTS = ("--slow-worker", "--slow-path", "--late-rank", "--slow-replica")
_WHOLE_RUN = ("--emulate-link", "--emulate-worker", "--host")


def _renewed_demo(words: Sequence[str]) -> list[str]:
    """Return the `words` of a demo with one `--slow` for each thing that gets slow."""
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


def _with_a_line(flag: str, new: list[str]) -> list[str]:
    link = ", or --slow 2-3:40ms for a link" if flag == "--link-delay-ms" else ""
    note(f"{flag} goes with the next release: write {' '.join(new)}{link}")
    return new
