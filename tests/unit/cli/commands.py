"""A small job for the command line, and how tests run commands on it."""

import json
import subprocess
import sys

from megatron_adaptra.cli.main import main

JOB = {
    "stages": 4,
    "microbatches": 12,
    "forward_ms": 9,
    "backward_input_ms": 10,
    "backward_weight_ms": [6, 6, 6, 6],
    "link_delay_ms": [0, 0, 60],
}
FLAGS = [
    *(
        "--stages",
        "4",
        "--microbatches",
        "12",
        "--forward-ms",
        "9",
        "--set",
        "backward_input_ms=10",
    ),
    *("--set", "backward_weight_ms=6,6,6,6", "--set", "link_delay_ms=0,0,60"),
]
SMALL = [
    *("--stages", "3", "--microbatches", "6", "--forward-ms", "9", "--set", "backward_input_ms=10"),
    *("--set", "backward_weight_ms=6", "--set", "link_delay_ms=0,20"),
]


def over(*words):
    """The words without flags and settings that come again: of FLAGS a test changes some."""
    words, out = [str(word) for word in words], []
    names = [word.partition("=")[0] for word in words]
    for i, name in enumerate(names):  # a setting goes by its key
        if name == "--set":
            names[i] = "--set=" + words[i].partition("=")[2].partition("=")[0]
            names[i] += names[i + 1] if words[i] == "--set" and names[i + 1 :] else ""
    i = 0
    while i < len(words):
        alone = "=" in words[i] or i + 1 == len(words) or words[i + 1].startswith("--")
        again = words[i].startswith("--") and names[i] in names[i + 1 :] and names[i] != "--slow"
        end = i + 1 if alone or not words[i].startswith("--") else i + 2
        out += [] if again else words[i:end]
        i = end
    return out


def process(*words, expect=0):
    """The command as its user starts it."""
    done = subprocess.run(
        [sys.executable, "-m", "megatron_adaptra", *over(*words)], capture_output=True, text=True
    )
    assert done.returncode == expect, done.stderr
    return done


class Here:
    """Commands run in this process, which saves their start."""

    def __init__(self, capsys):
        self.capsys = capsys

    def __call__(self, *words, expect=0):
        status = main(over(*words))
        out, err = self.capsys.readouterr()
        assert status == expect, err
        return out, err

    def json(self, *words):
        return strict(self(*words, "--json")[0])

    def refused(self, *words):
        """The one line on standard error."""
        return self._failed(2, *words)

    def failed(self, *words):
        return self._failed(1, *words)

    def _failed(self, status, *words):
        out, err = self(*words, expect=status)
        assert out == ""
        (line,) = err.splitlines()
        assert line.startswith("adaptra: error: ")
        return line.removeprefix("adaptra: error: ")


def strict(text):
    """JSON as the standard has it: neither NaN nor Infinity."""

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)
