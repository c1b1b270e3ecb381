"""Commands of README and getting started run as they stand there, or have options that are known.

Those that set up, install, patch and train run; what takes minutes gets small sizes by its own
flags, and placeholders are filled in (documented.py). Of `adaptra` others are read by its parser:
tests/unit/cli runs them.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from documented import Clone, blocks, commands, filled, make_clone
from launching import ROOT

from megatron_adaptra.cli.main import _parser
from megatron_adaptra.transport.engine.bindings import missing

PAGES = ("README.md", "docs/getting-started.md")
TEXTS = [(ROOT / page).read_text() for page in PAGES]
COMMANDS = list(dict.fromkeys(command for text in TEXTS for command in commands(text)))
NOT_RUN = ("scripts/test.sh",)  # would run this test
# What a command needs, by what stands in it, beside the clone.
TRAINS = re.compile(r"torchrun|--smoke")  # with Megatron's own program
READ = re.compile(r"quickstart\S* -|adaptra (?!demo --help|bench p2p|netlab run)")
COLD = re.compile(r"quickstart|pip |bench")
# Other trainings over a laboratory, of a checkout, and that observe run in CI.
LARGE = re.compile(r"netlab run|nproc-per-node 8 ~|act observe")
STARTS = re.compile(r"^\s*(?:\$ )?(?:\.venv/bin/|scripts/|adaptra |torchrun |pip |git |python )")


def cases(trains: bool) -> list[object]:
    marks = {COLD: pytest.mark.cold, LARGE: pytest.mark.large}

    def marks_of(command: str) -> list[pytest.MarkDecorator]:
        return [mark for kind, mark in marks.items() if kind.search(command)]

    return [
        pytest.param(command, id=command, marks=marks_of(command))
        for command in COMMANDS
        if command not in NOT_RUN and not READ.search(command)
        if bool(TRAINS.search(command)) is trains
    ]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    return make_clone(tmp_path_factory.mktemp("documented").resolve())


def run(clone: Clone, command: str) -> None:
    """Run it, where this machine can, after what the page does before it."""
    checkout = clone.home / "Megatron-LM"
    if "adaptra bench" in command and missing():
        pytest.skip(missing())
    if "netlab" in command:
        lab = "adaptra netlab run --link '0>1:1ms' --no-measure -- true"
        if (done := clone.run(lab)).returncode:
            pytest.skip(f"no laboratory here: {done.stderr}")
    elif command.startswith("git clone"):
        clone.run(f"rm -r {checkout}")
    elif command.startswith("torchrun") and "~/Megatron-LM" in command:
        clone.run(f"scripts/apply_patches.sh {checkout}")
    # "pretrain_gpt.py" alone is in the folder of the checkout.
    inside = re.search(r"(?<!/)\bpretrain_gpt\.py", command)
    done = clone.run(filled(command), checkout if inside else None)
    assert done.returncode == 0, f"{filled(command)}\n{(done.stdout + done.stderr)[-4000:]}"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", cases(trains=False))
def test_it_runs(command: str, clone: Clone) -> None:
    run(clone, command)


@pytest.mark.parametrize("command", [one for one in COMMANDS if READ.search(one)])
def test_its_options_are_known(command: str) -> None:
    script, *words = shlex.split(command)
    words = ["demo", *words] if "quickstart" in script else words
    _parser(words[:1])[0].parse_args(words)


@pytest.mark.cold
@pytest.mark.trains
@pytest.mark.parametrize("command", cases(trains=True))
def test_it_trains(command: str, clone: Clone) -> None:
    if not (clone.home / "Megatron-LM" / "megatron" / "training").is_dir():
        pytest.skip("the installed megatron-core has no megatron.training: wheels from 0.17 have")
    run(clone, command)


def test_all_commands_are_found() -> None:
    """None stands where this test does not look: in other blocks, or indented."""
    for page, text in zip(PAGES, TEXTS, strict=True):
        assert {language for language, _ in blocks(text)} <= {"bash", "python"}, page
        for _, content in blocks(text):
            text = text.replace(content, "")
        assert [line for line in text.splitlines() if STARTS.match(line)] == []
    assert len(COMMANDS) > len(NOT_RUN) + 15


@pytest.mark.parametrize("line", ["adaptra plam", "no-command"])
def test_one_that_cannot_run_fails(line: str, clone: Clone) -> None:
    (command,) = commands(f"text\n\n```bash\n{line}    # a comment\n```\n")
    assert command == line
    assert clone.run(filled(command)).returncode != 0


def test_lines_that_go_on_are_one_command(tmp_path: Path) -> None:
    assert commands("```bash\na \\\n  b  # c\n\n# d\ne 'f#g'\n```\n") == ["a    b", "e 'f#g'"]
