"""--smoke for real, on checkouts of Megatron-LM: ADAPTRA_MEGATRON_LM=CHECKOUT:CHECKOUT..."""

import re
import subprocess
from pathlib import Path

import pytest
from launching import REAL, ROOT, run, too_new

WITHOUT = pytest.mark.skip(
    reason="set ADAPTRA_MEGATRON_LM=CHECKOUT:CHECKOUT... to run --smoke on them"
)
CHECKOUTS = REAL or [pytest.param(Path("none"), marks=WITHOUT)]


def losses(script: str, checkout: Path, *words: str) -> list[str]:
    result = run(
        ROOT / "scripts" / script, "--smoke", "--megatron-lm", checkout, *words,
        "--", "--train-iters", "3", timeout=280,
    )  # fmt: skip
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    found = re.findall(r"iteration +\d+/ +3 .*lm loss: (\S+)", result.stdout)
    assert len(found) == 3
    return found


@pytest.mark.trains
@pytest.mark.cold
@pytest.mark.parametrize("checkout", CHECKOUTS, ids=lambda path: path.name)
@pytest.mark.parametrize("script", ["pretrain_gpt.sh", "pretrain_llama.sh"])
def test_smoke_trains_as_stock_does(script: str, checkout: Path) -> None:
    if too_new(checkout):
        pytest.skip(too_new(checkout))
    assert losses(script, checkout) == losses(script, checkout, "--stock")
    two = losses(script, checkout, "--gpus-per-node", "2")
    assert two[0] != two[2]
    status = subprocess.run(
        ["git", "-C", checkout, "status", "--short"], capture_output=True, text=True
    )
    assert status.stdout == "", "the checkout has to stay as it was"
