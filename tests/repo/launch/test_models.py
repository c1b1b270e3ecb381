"""The model files: what they say, and that Megatron takes it."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import yaml
from launching import REAL, ROOT, run, too_new

FILES = sorted((ROOT / "configs" / "models").glob("*.yaml"))
MODELS = {file.stem: yaml.safe_load(file.read_text()) for file in FILES}
# Data-parallel replicas of the published experiments; the others are ours, with one.
REPLICAS = {"gpt_30b": 4, "gpt_60b": 2}


def world(name: str) -> int:
    flags = MODELS[name]
    stages = flags["pipeline-model-parallel-size"]
    return flags["tensor-model-parallel-size"] * stages * REPLICAS.get(name, 1)


def parameters(flags: dict) -> float:
    hidden, layers = flags["hidden-size"], flags["num-layers"]
    ffn = flags.get("ffn-hidden-size", 4 * hidden)
    heads = flags["num-attention-heads"]
    shared = flags.get("num-query-groups", heads) / heads  # keys and values, of one query's size
    layer = hidden * hidden * (2 + 2 * shared) + hidden * ffn * (3 if flags.get("swiglu") else 2)
    tables = 2 if flags.get("untie-embeddings-and-output-weights") else 1
    learned = flags.get("position-embedding-type") != "rope"
    rows = tables * flags["vocab-size"] + (flags["max-position-embeddings"] if learned else 0)
    return layers * layer + rows * hidden


@pytest.mark.parametrize("name", MODELS)
def test_the_name_says_the_size(name: str) -> None:
    number, unit = re.fullmatch(r".*_(\d+)([mb])", name).groups()
    size = int(number) * {"m": 1e6, "b": 1e9}[unit]
    assert parameters(MODELS[name]) == pytest.approx(size, rel=0.10)


@pytest.mark.parametrize("name", MODELS)
def test_sizes_divide(name: str) -> None:
    flags = MODELS[name]
    tensor, stages = flags["tensor-model-parallel-size"], flags["pipeline-model-parallel-size"]
    counted = sum(
        flags.get(f"account-for-{part}-in-pipeline-split", False) for part in ("embedding", "loss")
    )
    assert (flags["num-layers"] + counted) % stages == 0
    assert flags["hidden-size"] % flags["num-attention-heads"] == 0
    assert flags.get("num-query-groups", flags["num-attention-heads"]) % tensor == 0
    microbatches = flags["global-batch-size"] / (flags["micro-batch-size"] * REPLICAS.get(name, 1))
    assert microbatches == 3 * stages or not name.startswith("gpt")  # as published
    assert microbatches >= stages


@pytest.mark.parametrize("name", MODELS)
def test_each_file_names_its_source(name: str) -> None:
    head = (ROOT / "configs" / "models" / f"{name}.yaml").read_text().partition("\n\n")[0]
    assert re.search(r"arXiv:\d{4}\.\d{5}", head)
    assert f"--model {name}" in head


@pytest.mark.parametrize(
    "checkout", [None, *REAL], ids=lambda path: path.name if path else "installed"
)
def test_megatron_accepts_every_model(checkout: Path | None) -> None:
    """Its own parser and validate_args, of the installed release or of a checkout."""
    if checkout is None and importlib.util.find_spec("megatron.training") is None:
        pytest.skip("this megatron-core has no megatron.training; wheels have it from 0.17 on")
    if checkout is not None and too_new(checkout):
        pytest.skip(too_new(checkout))
    script = Path(__file__).parent / "validate_script.py"
    first = [str(checkout)] if checkout is not None else []
    result = run(
        sys.executable, script, *(f"{name}={world(name)}" for name in MODELS),
        PYTHONPATH=":".join([*first, str(ROOT)]), CUDA_DEVICE_MAX_CONNECTIONS="1",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    line = next(line for line in result.stdout.splitlines() if line.startswith("RESULT "))
    answer = json.loads(line.removeprefix("RESULT "))
    assert checkout is None or Path(answer["from"]).is_relative_to(checkout)
    assert answer["found"] == {
        name: {
            "layers": flags["num-layers"],
            "stages": flags["pipeline-model-parallel-size"],
            "replicas": REPLICAS.get(name, 1),
            "bf16": True,
        }
        for name, flags in MODELS.items()
    }
