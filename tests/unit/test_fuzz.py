"""Odd and changed inputs for every parser: only the package's own errors come out, in one line.

The seed is printed with a failure; --full draws others, and more.
"""

import json
import random
import runpy
from pathlib import Path

import pytest

from benchmarks.common import both_ways
from megatron_adaptra.base.errors import AdaptraError, BadInput, line_of, shown
from megatron_adaptra.base.units import parse_bytes, parse_rate, parse_seconds, parse_share
from megatron_adaptra.cli.profile import conditions_of, load_profile
from megatron_adaptra.cli.source import read_schedule
from megatron_adaptra.config import AdaptraConfig, load_yaml, parse_budget
from megatron_adaptra.emulate.rules import parse_rules
from megatron_adaptra.emulate.scenario import load_rules
from megatron_adaptra.emulate.worker_rules import parse_slowness
from megatron_adaptra.ir.check import check
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.op import Op
from megatron_adaptra.ir.program import lower
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.plan import make_plan

ROOT = Path(__file__).resolve().parents[2]
SOME, MANY = 150, 5000
MODELS = runpy.run_path(str(ROOT / "scripts" / "megatron_flags.py"), run_name="read")

JOB = Conditions(4, (9e-3,) * 3, (1e-2,) * 3, (6e-3,) * 3, both_ways([0.0, 0.06]))
PLAN = make_plan(JOB)
PROFILE = {
    "name": "a", "stages": 3, "microbatches": 4, "forward_ms": 9, "backward_ms": [16, 16, 17.5],
    "link_delay_ms": [0, 60], "link_jitter": 0.1, "link_bandwidth": 1e9, "message_bytes": 1e6,
    "activation_budget": [4, 3, 2], "recompute": True, "split": False, "optimizer_ms": 3,
}  # fmt: skip
PIECES = [
    "", " ", "\n", "\t", "\r\n", "\0", "\ufeff", "\ud800", "٣", "é", "0", "-0", "1e999", "9" * 5000,
    "nan", "-inf", ".inf", "null", "true", "~", "=", "<<", "&a", "*a", "!!int", "!", "|", ">", "%",
    "@", "`", "#", "?", ":", ": ", "- ", ",", "[", "]", "{", "}", "'", '"', "\\", "\\ud800", "/",
    "F0", "B0", "I0", "W1", "R0", "SF0", "F0.1", "F0@1", "F99999999999", "0x", "0b_", "1:60",
    "2001-13-45", "0001-01-01T00:00:00+23:59", "40ms", "1e300s", "10MB/s", "2-3", "@5..", "50%",
]  # fmt: skip
WHOLE = [
    "hello", "- 1\n- [2]", "[" * 200_000, '{"stages":' * 5000, "stages: " + "[" * 50 + "]" * 50,
    "\n".join(" " * i + "a:" for i in range(500)), "a: &a 4\nb: *a", "a: &a [*a]", "<<: {a: 4}",
    "\n".join(f"a{i}: &a{i} [{f'*a{i - 1}, ' * 9}]" for i in range(1, 12)), "!!bool x",
    "!!python/object/apply:os.system [id]", "a: !!int ''", "a: 1\na: 2", '{"a": 4, "a": 5}',
    "a: 2001-13-45", "a: =", "a: 0x" + "f" * 9000, "0x" + "f" * 9000 + ": 1", "a: " + "1:" * 90,
    "? [1, 2]\n: 3", "? \n: 3", ".nan: 1", "a: 1\n---\nb: 2", "a:\n\tb: 1", 'a: "\\ud800"',
    '{"a": "\\ud800"}', 'a: "\\0"', "x" * 300_000 + ": 1",
    "schedule", "schedule null", "schedule " + "[" * 3000, '{"stages": [[0]]}', '{"stages": "F0"}',
    "stages: 4".encode("utf-16"), b"name: caf\xe9", bytes(range(256)),
]  # fmt: skip
VALUES = [
    None, True, False, 0, -1, 1, 3, 10**9, 10**400, -0.0, 0.5, 1e308, 5e-324, float("nan"),
    float("inf"), "", "F0", "x" * 500, "\0", "\ud800", [], [[]], [None], [[[[1]]]], {}, {"a": {}},
    {"delay": None}, [1] * 300,
]  # fmt: skip


def of_file(read):
    """A parser of text, from one of files."""

    def parse(text, path):
        data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
        path.write_bytes(data)
        read(str(path))

    return parse


def plan_of(path):
    schedule = read_schedule(path)
    check(lower(schedule))


def jobs(path):
    conditions_of(load_profile(path))


def model(path):
    try:
        list(MODELS["words"](MODELS["load"](path)))
    except MODELS["BadInput"] as error:
        raise BadInput("MODEL", path, str(error)) from None


def settings(path):
    AdaptraConfig.from_mapping(load_yaml(Path(path)), path)


SCENARIO = (ROOT / "configs" / "scenarios" / "slow_link.yaml").read_text()
RULE = "2-3:40ms,jitter=4ms,bandwidth=10MB/s@10..20"
# Parser of (text, path of a file for it), texts that it takes, and how its file's name ends.
TEXTS = {
    "op": (lambda text, _: Op.parse(text), ["F3", "I12.1", "F3@2"], ""),
    "schedule": (of_file(plan_of), [PLAN.schedule.text()], ""),
    "plan": (of_file(plan_of), [json.dumps(PLAN.to_json())], ""),
    "profile in JSON": (of_file(jobs), [json.dumps(PROFILE)], ".json"),
    "profile in YAML": (of_file(jobs), [json.dumps(PROFILE, indent=1).replace('"', "")], ".yaml"),
    "settings": (of_file(settings), [(ROOT / "configs" / "minimal.yaml").read_text()], ".yaml"),
    "scenario": (of_file(lambda path: load_rules([path], 4, network=True)), [SCENARIO], ".yaml"),
    "model": (of_file(model), [(ROOT / "configs/models/gpt_345m.yaml").read_text()], ".yaml"),
    "rule": (lambda text, _: parse_rules(text, 4), [RULE, "2>3:1.5s@5s..30s"], ""),
    "slow worker": (lambda text, _: parse_slowness(text, 4, 2), ["1.2:2x@10..20,0.1:1.5x"], ""),
    "slow path": (lambda text, _: load_rules([text], 4, replicas=2), ["0.1-1.2:40ms@3.."], ""),
    "duration": (lambda text, _: parse_seconds(text), ["40ms", "1.5s", "2e-3s"], ""),
    "rate": (lambda text, _: parse_rate(text), ["10MB/s", "1Gbit/s"], ""),
    "size": (lambda text, _: parse_bytes(text), ["20GiB"], ""),
    "share": (lambda text, _: parse_share(text), ["0.1%"], ""),
    "budget": (lambda text, _: parse_budget(text), ["12", "20GiB", "auto"], ""),
}
TREES = {
    "schedule": (Schedule.from_json, PLAN.schedule.to_json()),
    "conditions": (Conditions.from_json, JOB.to_json()),
    "profile": (lambda data: isinstance(data, dict) and conditions_of(data), PROFILE),
    "settings": (lambda data: isinstance(data, dict) and AdaptraConfig.from_mapping(data, "x"), {
        "engine": "executor", "timeout": 60, "min_gain": 0.1, "emulate_link": [RULE],
        "emulate_worker": ["1.2:2x@10.."],
        "activation_budget": 12, "decision_log": "log", "record": "dir", "strict": False,
    }),
}  # fmt: skip


def changed_text(rng, text):
    for _ in range(rng.randint(1, 3)):
        at = rng.randint(0, len(text))
        end = min(len(text), at + rng.choice((0, 0, 1, 2, 9, 99)))
        piece = rng.choice(PIECES) * rng.choice((1, 1, 1, 2, 400))
        text = text[:at] + rng.choice((piece, "", text[at:end] * 2)) + text[end:]
    return text


def changed_tree(rng, data):
    """A copy with one place of it changed."""
    if isinstance(data, dict) and data and rng.random() < 0.9:
        key = rng.choice(list(data))
        if rng.random() < 0.1:
            return {k: v for k, v in data.items() if k != key}
        return {**data, key: changed_tree(rng, data[key])}
    if isinstance(data, list) and data and rng.random() < 0.8:
        at = rng.randrange(len(data))
        return [*data[:at], changed_tree(rng, data[at]), *data[at + 1 :]]
    return rng.choice(VALUES)


def refused_or_read(parse):
    try:
        parse()
    except AdaptraError as refusal:
        line = line_of(refusal)
    else:
        return 0
    assert line.isprintable()
    return len(line) <= 1000


@pytest.fixture
def rng():
    seed = random.getrandbits(32)
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.fixture
def count(request):
    return MANY if request.config.getoption("--full") else SOME


@pytest.mark.parametrize("name", TEXTS)
def test_texts(rng, count, tmp_path, name):
    parse, good, suffix = TEXTS[name]
    path = tmp_path / f"file{suffix}"
    for text in good:
        assert not refused_or_read(lambda: parse(text, path)), text  # noqa: B023
    for text in WHOLE:
        text = text if suffix or isinstance(text, str) else text.decode("latin-1")
        print(shown(text))
        # A model is any flags of Megatron's.
        assert refused_or_read(lambda: parse(text, path)) or name == "model"  # noqa: B023
    refused = 0
    for _ in range(count):
        text = changed_text(rng, rng.choice([*good, ""]))
        print(shown(text))
        refused += refused_or_read(lambda: parse(text, path))  # noqa: B023
    assert refused > count / 10, "the changes reach nothing"


@pytest.mark.parametrize("name", TREES)
def test_trees(rng, count, name):
    parse, good = TREES[name]
    assert not refused_or_read(lambda: parse(good))
    refused = 0
    for _ in range(count):
        data = changed_tree(rng, good)
        print(shown(data))
        refused += refused_or_read(lambda: parse(data))  # noqa: B023
    assert refused > count / 10, "the changes reach nothing"
