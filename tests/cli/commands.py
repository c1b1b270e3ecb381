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
    *("--stages", "4", "--microbatches", "12", "--forward-ms", "9", "--backward-input-ms", "10"),
    *("--backward-weight-ms", "6,6,6,6", "--link-delay-ms", "0,0,60"),
]
SMALL = [
    *("--stages", "3", "--microbatches", "6", "--forward-ms", "9", "--backward-input-ms", "10"),
    *("--backward-weight-ms", "6", "--link-delay-ms", "0,20"),
]


def process(*words, expect=0):
    """The command as its user starts it."""
    done = subprocess.run(
        [sys.executable, "-m", "megatron_adaptra", *map(str, words)], capture_output=True, text=True
    )
    assert done.returncode == expect, done.stderr
    return done


class Here:
    """Commands run in this process, which saves their start."""

    def __init__(self, capsys):
        self.capsys = capsys

    def __call__(self, *words, expect=0):
        status = main(list(map(str, words)))
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
