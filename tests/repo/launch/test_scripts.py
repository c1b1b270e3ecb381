"""pretrain_gpt.sh, pretrain_llama.sh: the command they would run, and what they refuse."""

import re
import shlex
from pathlib import Path

import pytest
from launching import ROOT, refused, run

GPT = ROOT / "scripts" / "pretrain_gpt.sh"
LLAMA = ROOT / "scripts" / "pretrain_llama.sh"
SHELL = [*(ROOT / "scripts").rglob("*.sh"), *(ROOT / "scripts").rglob("*.sbatch")]


def command(script: Path, *words: object, **env: str) -> list[str]:
    at = words.index("--") if "--" in words else len(words)
    result = run(script, *words[:at], "--dry-run", *words[at:], **env)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == 1
    return shlex.split(result.stdout)


def after(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


@pytest.mark.parametrize("script", SHELL, ids=lambda path: path.name)
def test_bash_can_read_it(script: Path) -> None:
    result = run("bash", "-n", script)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("script", "layers", "stages"), [(GPT, "24", "4"), (LLAMA, "32", "4")], ids=["gpt", "llama"]
)
def test_one_node(script: Path, layers: str, stages: str, checkout: Path) -> None:
    words = command(script, MEGATRON_LM=str(checkout))
    assert "--standalone" in words
    assert after(words, "--nproc-per-node") == "8"
    at = words.index("megatron_adaptra.run")
    assert words[at - 1 : at + 2] == [
        "-m",
        "megatron_adaptra.run",
        str(checkout / "pretrain_gpt.py"),
    ]
    assert after(words, "--num-layers") == layers
    assert after(words, "--pipeline-model-parallel-size") == stages
    assert "--mock-data" in words
    assert words[-1] == "--adaptra"
    assert next(w for w in words if w.startswith("PYTHONPATH=")).startswith(
        f"PYTHONPATH={checkout}:{ROOT}"
    )


@pytest.mark.parametrize(
    ("script", "model"), [(GPT, "gpt_60b"), (LLAMA, "llama3_70b")], ids=["gpt", "llama"]
)
def test_many_nodes(script: Path, model: str, checkout: Path) -> None:
    words = command(
        script, "--model", model, "--rdzv-id", "job7", "--max-restarts", "2",
        MEGATRON_LM=str(checkout), NNODES="8", NODE_RANK="3", MASTER_ADDR="n0", MASTER_PORT="2345",
    )  # fmt: skip
    assert after(words, "--nnodes") == "8"
    assert after(words, "--rdzv-backend") == "c10d"
    assert after(words, "--rdzv-id") == "job7"
    assert after(words, "--rdzv-endpoint") == "n0:2345"
    assert after(words, "--rdzv-conf") == "is_host=0"
    assert after(words, "--max-restarts") == "2"
    first = command(
        script, "--megatron-lm", checkout, "--model", model,
        "--nnodes", 8, "--node-rank", 0, "--master-addr", "n0",
    )  # fmt: skip
    assert after(first, "--rdzv-conf") == "is_host=1"
    assert after(first, "--rdzv-endpoint") == "n0:29500"


def test_flags_after_the_dashes_come_last(checkout: Path) -> None:
    words = command(GPT, "--megatron-lm", checkout, "--", "--train-iters", "5", "--title", "a b; c")
    assert words[-5:] == ["--adaptra", "--train-iters", "5", "--title", "a b; c"]


def test_stock_leaves_the_plugin_off(checkout: Path) -> None:
    assert "--adaptra" not in command(GPT, "--stock", MEGATRON_LM=str(checkout))


def test_data_with_its_tokenizer(checkout: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "text_document"
    prefix.with_suffix(".bin").touch()
    prefix.with_suffix(".idx").touch()
    words = command(
        GPT,
        "--megatron-lm",
        checkout,
        "--data",
        prefix,
        "--",
        "--tokenizer-type",
        "GPT2BPETokenizer",
    )
    assert after(words, "--data-path") == str(prefix)
    assert words.count("--tokenizer-type") == 1
    assert "--mock-data" not in words
    own = command(GPT, "--megatron-lm", checkout, "--", "--data-path", "1", "x")
    assert "--mock-data" not in own


@pytest.mark.parametrize("processes", ["2", "4"])
@pytest.mark.parametrize("script", [GPT, LLAMA], ids=["gpt", "llama"])
def test_smoke(script: Path, processes: str, checkout: Path) -> None:
    words = command(script, "--smoke", "--gpus-per-node", processes, MEGATRON_LM=str(checkout))
    assert after(words, "--pipeline-model-parallel-size") == processes
    assert after(words, "--distributed-backend") == "gloo"
    assert after(words, "--vocab-size") == "4095"
    assert "CUDA_VISIBLE_DEVICES=" in words
    assert ("--swiglu" in words) == (script == LLAMA)


@pytest.mark.parametrize(
    ("words", "env", "says"),
    [
        (["--modle", "x"], {}, "--modle"),
        (["--train-iters", "5"], {}, "after --"),
        (["--model"], {}, "--model needs a value"),
        (["--model", "gpt_8b"], {}, "gpt_7b"),
        (["--set", "lr"], {}, "KEY=VALUE"),
        (["--megatron-lm", "/nowhere"], {}, "/nowhere"),
        (["--data", "/nowhere/x"], {}, "/nowhere/x.bin"),
        (["--nnodes", "1:4"], {}, "--nnodes: 1:4"),
        (["--gpus-per-node", "0"], {}, "--gpus-per-node: 0"),
        ([], {"MASTER_PORT": "x"}, "--master-port: x"),
        (["--nnodes", "2"], {}, "--master-addr"),
        (["--nnodes", "2", "--master-addr", "a", "--node-rank", "2"], {}, "below --nnodes"),
        (["--gpus-per-node", "6"], {}, "multiple of 4"),
        (["--smoke", "--gpus-per-node", "3"], {}, "2 or 4"),
        (["--smoke", "--model", "gpt_7b"], {}, "its own model"),
        (["--smoke", "--set", "pipeline-model-parallel-size=2"], {}, "set --gpus-per-node to 2"),
        ([], {"ADAPTRA_PYTHON": "/nowhere/python"}, "python"),
    ],
)
def test_refusals(words: list[str], env: dict[str, str], says: str, checkout: Path) -> None:
    line = refused(run(GPT, "--dry-run", *words, **{"MEGATRON_LM": str(checkout), **env}))
    assert says in line


def test_data_without_tokenizer_is_refused(checkout: Path, tmp_path: Path) -> None:
    for end in (".bin", ".idx"):
        (tmp_path / f"t{end}").touch()
    line = refused(run(GPT, "--megatron-lm", checkout, "--data", tmp_path / "t", "--dry-run"))
    assert "--tokenizer-type" in line


@pytest.mark.parametrize("words", [["--smoke"], []])
def test_no_checkout_says_how_to_get_one(words: list[str]) -> None:
    assert "git clone" in refused(run(GPT, *words))


def test_checkout_without_the_script_or_for_a_newer_python(checkout: Path) -> None:
    (checkout / "pyproject.toml").write_text('requires-python = ">=3.99"\n')
    assert "3.99" in refused(run(GPT, "--megatron-lm", checkout))
    (checkout / "pretrain_gpt.py").unlink()
    assert "pretrain_gpt.py" in refused(run(GPT, "--megatron-lm", checkout))


def test_help_names_every_option() -> None:
    text = run(LLAMA, "--help").stdout
    for option in (
        "--model",
        "--data",
        "--smoke",
        "--stock",
        "--dry-run",
        "--rdzv-id",
        "llama3_8b",
    ):
        assert option in text


@pytest.mark.parametrize(
    ("heading", "tags", "says"),
    [
        ("0.2.0 (unreleased)", (), "the first section of CHANGELOG.md is '0.2.0 (unreleased)'"),
        ("0.1.0", ("v0.1.0 HEAD^",), "tag v0.1.0 is of another commit"),
        ("0.1.0", ("v0.1.0", "v0.2.0"), "this commit has tag v0.2.0, the version is 0.1.0"),
    ],
)
def test_a_release_has_one_version(heading, tags, says, tmp_path: Path) -> None:
    for name in ("scripts/release.sh", "scripts/lib.sh", "megatron_adaptra/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        text = (ROOT / name).read_text()
        (tmp_path / name).write_text(
            re.sub(r"(?m)^__version__ = .*", '__version__ = "0.1.0"', text)
        )
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## {heading}\n")
    commit = "-c user.name=x -c user.email=x commit -qm x --allow-empty"
    for words in ("init -q", "add .", commit, commit, *(f"tag {tag}" for tag in tags)):
        assert run("git", *words.split(), cwd=tmp_path).returncode == 0
    line = refused(run("bash", tmp_path / "scripts/release.sh", "--out", tmp_path.parent / "out"))
    assert says in line
