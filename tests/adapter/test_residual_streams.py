"""Hidden states of several residual streams (mHC): their messages are wider than hidden_size."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from patience import decided
from running import zygote
from trainings import (
    FLAGS,
    ITERATIONS,
    ROOT,
    SLOW,
    Done,
    execute,
    needs_training,
    stock,
    words_of,
)

sys.path.insert(0, str(ROOT / "scripts"))

from megatron_lm_process import build_helpers, environment

pytestmark = [needs_training, pytest.mark.timeout(600)]
SCRIPT = Path(__file__).with_name("streams_pretrain.py")
NAME = "ADAPTRA_MEGATRON_LM"
CHECKOUTS = [folder for folder in os.environ.get(NAME, "").split(":") if folder]


def train(folder: Path, kind: str, ranks: int, *flags: str) -> Done:
    words = [str(SCRIPT), kind, *words_of(folder, ranks, *flags, iterations=ITERATIONS)]
    ours = "--adaptra" in flags
    done = zygote(ours).run(folder, words, ranks=ranks, ends=ours)
    assert done.status == 0, done.text[-4000:]
    return Done(0, done.text)


@pytest.mark.long
@pytest.mark.timing
def test_wide_messages_train_as_stock(tmp_path: Path) -> None:
    expected = train(tmp_path / "stock", "wide", 4)
    for engine in ("native", "executor"):
        ours = train(tmp_path / engine, "wide", 4, *SLOW, "--adaptra-engine", engine)
        assert ours.printed == expected.printed
        assert "stock schedule" not in ours.text
        decided("a plan that hides the slow link", ours.plans[-1] != [4, 3, 2, 1])


def test_streams_of_unknown_width_train_as_stock_with_one_line(tmp_path: Path) -> None:
    ours = train(tmp_path, "flag", 2, "--adaptra")
    assert ours.printed == stock(2).done.printed
    (line,) = re.findall(r"adaptra: stock schedule: (.*)", ours.text)
    assert line == (
        "--enable-mhc-connections: Megatron's get_tensor_shapes gives messages of 64 values, "
        "not 64 for each of 3 residual streams"
    )


@pytest.mark.cold
@pytest.mark.skipif(not CHECKOUTS, reason=f"{NAME} names no Megatron-LM checkouts (FOLDER:FOLDER)")
@pytest.mark.parametrize("checkout", CHECKOUTS or [""], ids=lambda folder: Path(folder).name)
def test_a_checkout_with_streams_ends_as_stock(checkout: str, tmp_path: Path) -> None:
    """Main of 2026-08-22 refuses mHC with several stages; branch dev trains."""
    fields = (Path(checkout) / "megatron/core/transformer/transformer_config.py").read_text()
    flags = re.findall(r"^    (enable_(?:mhc|hyper)_connections):", fields, re.MULTILINE)
    if not flags:
        pytest.skip("this Megatron-LM has no mHC")
    where = {**environment(sys.executable, tmp_path), "PYTHONPATH": f"{checkout}:{ROOT}"}
    assert not build_helpers(Path(checkout), where, tmp_path)

    def end(kind: str, *ours: str) -> tuple[list[tuple[str, str]], set[str]]:
        words = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            "-m", "megatron_adaptra.run", f"{checkout}/pretrain_gpt.py", *FLAGS, "--num-layers",
            "4", "--pipeline-model-parallel-size", "2", "--global-batch-size", "12",
            "--train-iters", "8", f"--{flags[0].replace('_', '-')}", *ours,
        ]  # fmt: skip
        status = execute(words, tmp_path / kind, tmp_path, 250, where)
        done = Done(status, (tmp_path / kind).read_text(errors="replace"))
        refusal = set(re.findall(r"NotImplementedError: enable_mhc.*", done.text))
        assert refusal if status else len(done.printed) == 8, done.text[-3000:]
        assert "stock schedule" not in done.text
        return done.printed, refusal

    assert end("ours", "--adaptra") == end("stock")
