"""scripts/megatron_flags.py: a model file becomes words of a command line, or one line."""

import sys
from pathlib import Path

import pytest
from launching import ROOT, refused, run

SCRIPT = ROOT / "scripts" / "megatron_flags.py"


def flags(*words: object) -> list[str]:
    result = run(sys.executable, SCRIPT, *words)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_every_form_of_value(tmp_path: Path) -> None:
    file = tmp_path / "m.yaml"
    file.write_text(
        "num_layers: 4\nlr: 1.5e-4\nswiglu: true\nbf16: false\n"
        "data-path: [0.3, a b, 0.7, c]\nsplit: 99,1,0\nseed: -1\n"
    )
    assert flags(file) == [
        "--num-layers", "4", "--lr", "0.00015", "--swiglu",
        "--data-path", "0.3", "a b", "0.7", "c", "--split", "99,1,0", "--seed=-1",
    ]  # fmt: skip
    nul = run(sys.executable, SCRIPT, file, "-0", "--set", "data-path=false")
    assert nul.stdout.split("\0")[-4:] == ["--split", "99,1,0", "--seed=-1", ""]


def test_set_wins_and_adds() -> None:
    words = flags("gpt_7b", "--set", "num_layers=10", "--set", "bf16=false", "--set", "fp16=true")
    assert words[words.index("--num-layers") + 1] == "10"
    assert "--fp16" in words
    assert "--bf16" not in words


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- a\n", "mapping"),
        ("", "mapping"),
        ("a: [1\n", "not YAML"),
        ("lr: 0x" + "f" * 9000, "line 1: "),
        ("lr: &a [*a]", "anchor"),
        ("lr: {a: 1}\n", "lr"),
        ("lr:\n", "lr"),
        ("lr: []\n", "lr"),
        ("lr: [true]\n", "lr"),
        ("lr: ''\n", "lr"),
        ('lr: "a\\nb"\n', "lr"),
        ("--lr: 1\n", "without --"),
        ("1: 1\n", "without --"),
        ("lr: 1\nlr: 2\n", "the key 'lr' stands twice"),
        ("num-layers: 1\nnum_layers: 2\n", "num-layers: set twice"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "m.yaml"
    file.write_text(text)
    line = refused(run(sys.executable, SCRIPT, file))
    assert says in line
    assert str(file) in line


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["gpt_8b"], "gpt_7b"),
        (["nowhere.yaml"], "nowhere.yaml"),
        (["gpt_7b", "--set", "lr"], "KEY=VALUE"),
        (["gpt_7b", "--set", "lr="], "lr"),
        (["gpt_7b", "--set", "lr=[1"], "YAML"),
        (["gpt_7b", "--set", "--lr=1"], "KEY=VALUE|without --|expected one argument"),
        (["gpt_7b", "--world", "6"], "multiple of 4"),
        (["gpt_30b", "--world", "80"], "global-batch-size"),
        (["gpt_7b", "--world", "4", "--set", "context-parallel-size=0"], "context-parallel-size"),
    ],
)
def test_bad_words_are_refused(words: list[str], says: str) -> None:
    result = run(sys.executable, SCRIPT, *words)
    assert result.returncode == 2
    assert any(part in result.stderr.splitlines()[-1] for part in says.split("|"))
    assert "Traceback" not in result.stderr
