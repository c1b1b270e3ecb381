"""Inputs that nobody should give, for every command: words of a command line, and files."""

import json
import os
import socket

from commands import FLAGS, JOB

JOBS = ("plan", "compare", "simulate", "draw")
LONG, DEEP = "9" * 6000, 3000
HEAD = '{"microbatches": 1, "chunks": 1, "policy": "", "why": ""}'
BOMB = "\n".join(["a0: &a0 [1]", *(f"a{i}: &a{i} [{f'*a{i - 1}, ' * 9}]" for i in range(1, 12))])

# What is no number, of a flag that takes one; and what no number of a job is.
WORDS = [
    "", " ", "x", "-", "--", "1,,2", ",", "1_000", "٤", "0x10", "1e", "٣.٥", "½", "１２",
    "nan", "-nan", "-inf", "-1", "-1e-300", "1e400", LONG, "1e" + LONG, "1\n2", "1\r", "\x1b[31m",
    "\udcff", "1\0", "[1]", "{}", "null", "true", "'1'", "1;2", "1 2", "$HOME", "%s", "1/2",
]  # fmt: skip
NUMBERS = [
    "--forward-ms", "--backward-ms", "--link-delay-ms", "--link-jitter", "--link-bandwidth",
    "--port-bandwidth",
    "--message-bytes", "--activation-budget", "--optimizer-ms", "--return-delay-ms",
]  # fmt: skip
REPLICAS = [
    "--failed", "--slow", "--slow-path", "--slow-port", "--slow-replica", "--worker-budget",
    "--counts",
]  # fmt: skip
WHOLE = ["0", "-0", "1.0", "1e3", "inf", "100000000", "9" * 30, "+-1"]


def flag_cases():
    """Command lines; of a flag that comes twice the last value is taken."""
    for i, word in enumerate(WORDS):
        yield [JOBS[i % 4], *FLAGS, f"{NUMBERS[i % 9]}={word}"]
        yield [JOBS[i % 3], *FLAGS, f"--microbatches={word}"]
    for flag in NUMBERS:
        yield ["plan", *FLAGS, flag, "1e308"]
        yield ["simulate", *FLAGS, flag, "1e-308"]
        yield ["draw", *FLAGS, flag, "1e308", "--json"]
    for word in WHOLE:
        for flag in ("--stages", "--microbatches", "--chunks"):
            yield ["plan", *FLAGS, f"{flag}={word}"]
    for flag, words in {
        "--policy": ["", "x", LONG, "\udcff", "../x", "1F1B"],
        "--sends": ["", "x", "eager,rendezvous"],
        "--time-limit": ["0", "-1", "nan", "inf", "1e400", "x", "", "٤"],
        "--profile": ["", "/nowhere", "/dev/zero", "/dev/tty0", "/proc/self/mem", "a" * 5000,
                      "\udcff", "a\0b", ".", "/dev/stdin", "/proc/self/pagemap"],
        "--name": ["x", "", "\0"],
        "--replicas": ["", "-1", "1e9", LONG, "2.0", "٢"],
        "--failed": ["x", LONG, "1." + LONG, "1.2\n", "\udcff", "-1.0", "0x1.0"],
        "--slow": [":", "::", "1.2:", "0.1:1e400x", f"0.1:{LONG}x", f"{LONG}:2x"],
        "--slow-path": ["-", "1.1-0.2", "1.1--0.2:1ms", f"1.1-0.2:{LONG}", "1.1-0.2:1ms+", ">:"],
        "--slow-port": ["0.1:inf", "0.1:nanB/s", f"0.1:{LONG}B/s", "0.1:1e400B/s"],
        "--slow-replica": [":", "::", "1:", "0:1e400x", f"0:{LONG}x", f"{LONG}:2x", "0.1:2x"],
        "--counts": ["", "x", LONG, "1", "1," * 9999 + "1", "12,12.0", "9" * 30 + ",1", "٢,٢"],
        "--worker-budget": ["0.1:-inf", f"0.1:{LONG}", "0.1:1e400B", "0.1:1\r"],
        "--schedule": ["", "/nowhere", "/dev/zero", "/dev/null", ".", "a" * 5000],
    }.items():  # fmt: skip
        for word in words:
            several = ["--replicas", "2"] if flag in REPLICAS else []
            command = "simulate" if flag == "--schedule" else "plan"
            yield [command, *FLAGS, *several, flag, word]
    for words in (
        ["compare", "--budgets", ""], ["compare", "--budgets", "1,"], ["compare", "--budgets", "0"],
        ["compare", "--budgets", ",".join(map(str, range(1, 200)))],
        ["compare", "--budgets", "nan"], ["compare", "--max-slowdown", "nan"],
        ["compare", "--max-slowdown", "1e308"], ["compare", "--max-slowdown", "-0.1"],
        ["simulate", "--samples", "5"], ["simulate", "--samples", "-1"],
        ["simulate", "--link-jitter", "0.1", "--samples", "100000000"],
        ["simulate", "--samples", "1.5"], ["simulate", "--seed", "x"], ["simulate", "--seed", ""],
        ["draw", "--width", "100000000"], ["draw", "--width", "-1"], ["draw", "--width", "0"],
        ["draw", "--width", "x"], ["draw", "--format", "gif"], ["draw", "--format", ""],
        ["draw", "--format", "png"], ["draw", "--format", "svg,html"], ["draw", "--out", ""],
        ["draw", "--out", "/dev/null/x.svg"], ["draw", "--out", "x.gif"],
        ["draw", "--out", "a" * 300 + ".svg"], ["draw", "--format", ","],
    ):  # fmt: skip
        yield [words[0], *FLAGS, *words[1:]]
    for words in (
        ["--stages", "1"],
        ["--stages", "100000000"],
        ["--microbatches", "0"],
        ["--stages", "x"],
        ["--microbatches", "1000000000"],
        ["--data-parallel", "0"],
        ["--hidden-size", "6"],
        ["--data-parallel", "100000"],
        ["--hidden-size", "1000000000"],
        ["--seq-length", "1"],
        ["--seq-length", "10000000000"],
        ["--iterations", "1"],
        ["--iterations", "1" + "0" * 12],
        ["--seed", "-1"],
        ["--seed", "9" * 25],
        ["--num-layers", "3"],
        ["--dropout", "nan"],
        ["--dropout", "1"],
        ["--dropout", "-0.1"],
        ["--dropout", "x"],
        ["--precision", "fp8"],
        ["--text", "/nowhere"],
        ["--text", ""],
        ["--text", "a" * 5000],
        ["--text", "/dev/zero"],
        ["--text", "/dev/null"],
        ["--delay", "40"],
        ["--delay", "1e300s"],
        ["--delay", "-1ms"],
        ["--delay", ""],
        ["--delay", LONG + "ms"],
        ["--delay", "nan"],
        ["--slow-link", "2"],
        ["--slow-link", "0-3"],
        ["--slow-link", "٢-٣"],
        ["--slow-link", f"{LONG}-1"],
        ["--slow-link", ","],
        ["--emulate-link", "2-3"],
        ["--emulate-link", "2-3:1ms@" + "." * 9000],
        ["--emulate-link", "2-3:1ms@5..1"],
        ["--emulate-link", "2-3:1ms,loss=1%"],
        ["--emulate-link", "/nowhere.yaml"],
        ["--emulate-link", f"{LONG}-1:1ms"],
        ["--emulate-link", "2-3:1ms,bandwidth=1e-300B/s"],
        ["--emulate-link", "0.1-1.2:1ms"],
        ["--emulate-link", f"{LONG}.1-0.2:1ms"],
        ["--slow-worker", "1.1:2x"],
        ["--emulate-worker", "1.1:2x"],
        ["--emulate-worker", "0.1:2x@5..1"],
        ["--emulate-worker", "0.1:2x@5s..9s"],
        ["--emulate-worker", "/nowhere.yaml"],
        ["--slow-worker", "0.1:2"],
        ["--slow-worker", "0.1:0.5x"],
        ["--slow-worker", "0.1:" + "9" * 400 + "x"],
        ["--slow-worker", "0.1:2x,"],
        ["--slow-worker", "0.1:2x@3..5"],
        ["--slow-worker", "0.1:2x", "--delay", "3ms"],
        ["--slow-path", "0.1-0.2"],
        ["--slow-path", "0-1:1ms"],
        ["--slow-path", "0.0-0.2:1ms"],
        ["--slow-path", "0.1-0.2:1ms,loss=1%"],
        ["--slow-path", "0.1-0.2:1ms@9.."],
        ["--from-iteration", "90"],
        ["--to-iteration", "-5", "--from-iteration", "70"],
        ["--engine", "stock"],
        ["--policy", "x"],
        ["--chunks", "-1"],
        ["--chunks", "5", "--microbatches", "7"],
        ["--policy", "zb-h1", "--engine", "native"],
        ["--activation-budget", "0"],
        ["--activation-budget", "nan"],
        ["--activation-budget", "1" * 5000],
        ["--config", "/nowhere"],
        ["--config", "/dev/zero"],
        ["--config", "."],
        ["--timeout", "nan"],
        ["--timeout", "1"],
        ["--timeout", "1e308"],
        ["--timeout", "inf"],
        ["--rank-from-env"],
    ):
        yield ["demo", *words]
    for words in (
        ["run"],
        ["go"],
        ["measure", "/nowhere.yaml"],
        ["measure", "x"],
        ["measure", "--hosts", "x"],
        ["measure", "--hosts", "100000000"],
        ["measure", "--hosts", "-1"],
        ["measure", "--hosts", "1"],
        ["measure", "--link", "0-1"],
        ["measure", "--link", f"{LONG}-1:1ms"],
        ["measure", "--link", ""],
        ["measure", "--link", "0-1:1ms,loss=100%"],
        ["measure", "--link", "0-0:1ms"],
        ["measure", "--link", "0-1:1ms@" + "." * 9000],
        ["measure", "--timeout", "x"],
        ["measure", "--shaper", "x"],
        ["measure", "--seed", "x"],
        ["measure", "/dev/zero.yaml"],
        ["measure", "--link", "0-99999999:1ms"],
    ):
        yield ["netlab", *words]
    for words in (
        ["x"],
        ["/nowhere.py"],
        ["a" * 5000 + ".py"],
        ["--master-port", "99999", "x.py"],
        ["--master-port=x", "x.py"],
        ["--nproc-per-node", "abc", "x.py"],
        ["."],
        ["/dev/zero"],
        ["--nproc-per-node", "0", "x.py"],
        ["--nnodes", "-1", "x.py"],
        ["", "x.py"],
        ["--rdzv-endpoint", "host:99999", "x.py"],
        ["--node_rank=x", "x.py"],
        ["--master-addr", "", "x.py"],
    ):
        yield ["run", *words]
    for words in ([], ["plam"], [""], ["-"], ["--"], ["plan", "x"], ["\udcff"], ["--no-such"]):
        yield words


def changed(**change):
    return json.dumps({**JOB, **change})


PROFILES = {
    "empty.yaml": "",
    "null.yaml": "null",
    "nul.yaml": "stages: \0",
    "text.yaml": "hello",
    "list.yaml": "- 1\n- [2]\n- {name: []}",
    "bomb.yaml": BOMB,
    "alias.yaml": "stages: &a 4\nmicrobatches: *a",
    "self.yaml": "stages: &a [*a]",
    "tag.yaml": "!!python/object/apply:os.system [id]",
    "int.yaml": "stages: !!int ''",
    "bool.yaml": "!!bool x",
    "deep.yaml": "[" * DEEP,
    "deeper.yaml": "stages: " + "[" * 50 + "]" * 50,
    "indent.yaml": "\n".join(" " * i + "a:" for i in range(500)),
    "twice.yaml": "stages: 4\nstages: 5\n",
    "twice_flow.yaml": "{stages: 4, 'stages': 5}",
    "merge.yaml": "<<: {stages: 4}\nmicrobatches: 4",
    "date.yaml": "stages: 0001-01-01T00:00:00+23:59",
    "month.yaml": "stages: 2001-13-45",
    "value.yaml": "stages: =",
    "hex.yaml": "stages: 0x" + "f" * 9000,
    "hexkey.yaml": "0x" + "f" * 9000 + ": 1",
    "digits.yaml": "stages: " + LONG,
    "underscore.yaml": "stages: 1_0",
    "hex_stages.yaml": "stages: 0x4",
    "octal.yaml": "stages: 04",
    "base_60.yaml": "stages: 1:30",
    "hours.yaml": "stages: " + "1:" * 90 + "1",
    "key.yaml": "? [1, 2]\n: 3",
    "nokey.yaml": "? \n: 3",
    "nan.yaml": ".nan: 1",
    "two.yaml": "a: 1\n---\nb: 2",
    "tab.yaml": "a:\n\tb: 1",
    "surrogate.yaml": 'stages: "\\ud800"',
    "escape.yaml": 'name: "\\0"',
    "utf16.yaml": "stages: 4".encode("utf-16"),
    "latin.yaml": b"name: caf\xe9",
    "wide.yaml": "a: " + "x" * 300_000,
    "deep.json": "[" * 200_000,
    "object.json": '{"stages":' * 5000,
    "twice.json": '{"stages": 4, "stages": 5}',
    "digits.json": f'{{"stages": {LONG}}}',
    "float.json": '{"stages": 1e999}',
    "surrogate.json": changed(name="\ud800"),
    "comma.json": '{"stages": 4,}',
    "cut.json": changed()[:-5],
    "nan.json": '{"stages": NaN}',
    "latin.json": b'{"name": "\xe9"}',
    "binary.json": bytes(range(256)),
    "true.json": changed(stages=True),
    "negative.json": changed(stages=-0.0),
    "text.json": changed(stages="4"),
    "null.json": changed(stages=None),
    "list.json": changed(stages=[4]),
    "large.json": changed(microbatches=10**8),
    "longest.json": changed(microbatches=10**300),
    "nested.json": changed(forward_ms=[[[[9]]]]),
    "object2.json": changed(forward_ms={"a": {"b": 1}}),
    "far.json": changed(forward_ms=1e308),
    "near.json": changed(forward_ms=5e-324),
    "mixed.json": changed(forward_ms=[1, "2", 3, 4]),
    "empty.json": changed(forward_ms=[]),
    "many.json": changed(forward_ms=[1] * 100_000),
    "bytes.json": changed(message_bytes=1e308, link_bandwidth=1e-308),
    "jitter.json": changed(link_jitter=1e308),
    "recompute.json": changed(recompute="no"),
    "split.json": changed(split=0),
    "budget.json": changed(activation_budget="auto"),
    "key.json": changed(**{"x" * 100_000: 1}),
    "empty_key.json": changed(**{"": 1}),
    "name.json": json.dumps([{"name": {"a": 1}}, {"name": 7}, 3]),
}

SCHEDULES = {
    "empty": "",
    "space": " \n \n",
    "word": "hello",
    "head": "schedule",
    "deep": "schedule " + "[" * DEEP,
    "null": "schedule null",
    "twice": f'schedule {HEAD[:-1]}, "chunks": 2}}\n0: F0 B0',
    "none": f"schedule {HEAD}",
    "stage": f"schedule {HEAD}\n1: F0 B0",
    "op": f"schedule {HEAD}\n0: X0",
    "digit": f"schedule {HEAD}\n0: F٣ B0",
    "send": f"schedule {HEAD}\n0: F0 SF0 B0",
    "order": f"schedule {HEAD}\n0: B0 F0",
    "more": f"schedule {HEAD}\n0: F0 B0 F1 B1",
    "less": f"schedule {HEAD}\n0: F0",
    "again": f"schedule {HEAD}\n0: F0 B0 B0",
    "chunk": f"schedule {HEAD}\n0: F0.7 B0.7",
    "recompute": f"schedule {HEAD}\n0: F0 B0 R0",
    "weight": f"schedule {HEAD}\n0: F0 W0 I0",
    "far": f"schedule {HEAD}\n0: F{LONG} B0",
    "nul": f"schedule {HEAD}\n0: F0 B0\0",
    "zero": f"schedule {HEAD.replace('1', '0')}\n0: F0 B0",
    "true": f"schedule {HEAD.replace('1', 'true')}\n0: F0 B0",
    "float": f"schedule {HEAD.replace('1', '1.0')}\n0: F0 B0",
    "many": f"schedule {HEAD.replace('1', '100000000')}\n0: F0 B0",
    "policy": f"schedule {HEAD}\n0: F0 B0".replace('"policy": ""', '"policy": []'),
    "surrogate": f"schedule {HEAD}\n0: F0 B0".replace('"why": ""', '"why": "\\ud800"'),
    "utf16": f"schedule {HEAD}\n0: F0 B0".encode("utf-16"),
    "json": "{",
    "json_deep": '{"stages":' * 9000,
    "json_empty": "{}",
    "json_none": '{"stages": []}',
    "json_null": '{"stages": null}',
    "json_text": '{"stages": "F0"}',
    "json_number": '{"stages": [[0]]}',
    "json_hang": '{"stages": [["B0", "F0"], ["F0", "B0"]]}',
    "json_far": '{"stages": [["F99999999999", "B0"]]}',
    "json_twice": '{"stages": [["F0", "B0"]], "stages": []}',
    "json_chunks": '{"stages": [["F0", "B0"]], "chunks": "1"}',
    "json_count": '{"stages": [["F0", "B0"]], "microbatches": null}',
    "json_why": '{"stages": [["F0", "B0"]], "why": 3}',
    "json_uneven": '{"stages": [["F0", "B0"], []]}',
}

# Settings of the plugin, as of `demo --config`; and scenarios, as of `netlab`.
SETTINGS = {
    "timeout": "timeout: nan",
    "far": "timeout: 1" + "0" * 400,
    "near": "timeout: 1e-300",
    "engine": "engine: [native]",
    "budget": "activation_budget: {a: 1}",
    "hex": "activation_budget: [0x" + "f" * 9000 + "]",
    "link": "emulate_link: 2-3:40ms",
    "links": "emulate_link: [1, 2]",
    "worker": "emulate_worker: [0.1]",
    "log": "decision_log: 7",
    "record": "record: [a]",
    "nul": 'decision_log: "a\\0b"',
    "strict": "strict: 1",
    "twice": "timeout: 60\ntimeout: 70",
    "unknown": "time: 60",
    "alias": "timeout: &a 60",
    "list": "- timeout: 60",
}
SCENARIOS = {
    "empty": "",
    "no_links": "links: []",
    "null_links": "links:",
    "base_60": "links: [{link: 0:1, delay: 40ms}]",
    "links": "links: 7",
    "entry": "links: [7]",
    "delay": "links: [{link: 0-1}]",
    "null": "links: [{link: 0-1, delay: null}]",
    "number": "links: [{link: 0-1, delay: 40}]",
    "text": "links: [{link: hello, delay: 40ms}]",
    "far": f"links: [{{link: 0-{LONG}, delay: 40ms}}]",
    "hex": "links: [{link: 0-1, delay: 0x" + "f" * 9000 + "}]",
    "list": "links: [{link: [0, 1], delay: {a: 1}}]",
    "from": "links: [{link: 0-1, delay: 40ms, from: x}]",
    "ends": "links: [{link: 0-1, delay: 40ms, from: 9, to: 3}]",
    "jitter": "links: [{link: 0-1, delay: 40ms, jitter: yes}]",
    "rate": "links: [{link: 0-1, delay: 40ms, bandwidth: 1e-300B/s}]",
    "unknown": "links: [{link: 0-1, delay: 40ms, colour: red}]",
    "twice": "links: [{link: 0-1, delay: 40ms, delay: 50ms}]",
    "deep": "links: " + "[" * DEEP,
    "bomb": BOMB,
}


def odd_files(folder):
    """What is no file that can be read, each with a name that ends in .yaml and one in .json."""
    (folder / "file").write_text(json.dumps(JOB))
    for end in (".yaml", ".json"):
        os.mkfifo(folder / f"fifo{end}")
        (folder / f"folder{end}").mkdir()
        (folder / f"loop{end}").symlink_to(f"loop{end}")
        (folder / f"dangling{end}").symlink_to("nothing")
        (folder / f"zero{end}").symlink_to("/dev/zero")
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(folder / f"socket{end}"))
        with open(folder / f"huge{end}", "wb") as file:
            file.truncate(2**40)  # takes no room
        for kind in ("fifo", "folder", "loop", "dangling", "zero", "socket", "huge", "file/x"):
            yield folder / f"{kind}{end}"
