"""What is not installed is named, with the command that installs it."""

import subprocess
import sys
from importlib.metadata import requires

import pytest

from megatron_adaptra.demo import launch


def demo_without(modules: list[str]) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.modules.update(dict.fromkeys({modules}))\n"
    code += "from megatron_adaptra.cli.main import main; sys.exit(main(['demo']))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("modules", "says"),
    [
        (["torch"], "torch, which is not installed: pip install torch"),
        (["megatron.core"], "megatron-core, which is not installed: pip install megatron-core"),
        (["einops"], "einops, which is not installed: pip install 'megatron-adaptra[demo]'"),
        (
            ["torch", "megatron", "einops", "six"],
            "torch, megatron-core, einops and six, which are not installed: "
            "pip install torch megatron-core 'megatron-adaptra[demo]'",
        ),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else "",
)
def test_the_demo_names_all_that_it_lacks(modules: list[str], says: str) -> None:
    done = demo_without(modules)
    assert done.returncode == 2
    assert done.stderr == f"adaptra: error: adaptra demo needs {says}\n"


def test_the_extra_installs_what_the_demo_asks_for() -> None:
    offered = [r for r in requires("megatron-adaptra") or () if 'extra == "demo"' in r]
    for module in launch._EXTRA:
        assert any(r.startswith(module) for r in offered), module
