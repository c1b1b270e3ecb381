from pathlib import Path

import pytest


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What the scripts look for in a checkout of Megatron-LM; nothing of it gets run."""
    folder = tmp_path / "Megatron-LM"
    (folder / "megatron" / "core").mkdir(parents=True)
    (folder / "pretrain_gpt.py").touch()
    return folder
