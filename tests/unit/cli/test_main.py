"""The command line as a whole: help, misuse, and that it starts at once."""

import subprocess
import sys

import pytest
from commands import FLAGS, process

from megatron_adaptra.cli.main import COMMANDS, main


@pytest.mark.parametrize("words", [(), ("plam",), ("plan", "--stage", "4"), ("plan", "x")])
def test_misuse_is_status_2(words):
    assert "adaptra" in process(*words, expect=2).stderr


def test_help_and_version():
    out = process("--help").stdout
    at = [out.index(f"\n    {name} ") for name in COMMANDS]
    assert at == sorted(at)
    assert process("--version").stdout.startswith("adaptra ")


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "run"])
def test_every_command_has_help_and_json(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    assert f"usage: adaptra {command}" in out
    assert "--json" in out


def test_main_returns_the_status():
    assert main(["plan", *FLAGS, "--json"]) == 0
    assert main(["plan"]) == 2


def test_a_reader_that_stops_early_sees_no_traceback():
    command = [sys.executable, "-m", "megatron_adaptra", "draw", *FLAGS, "--format", "html"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        child.stdout.close()
        assert child.stderr.read() == b""
        assert child.wait(timeout=300) == 1


HEAVY = ("torch", "megatron", "matplotlib")
SLOW = ("rich", "yaml", "megatron_adaptra.config")


def loaded_by(program, names=HEAVY):
    code = f"{program}\nimport sys; print([m for m in {names} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


@pytest.mark.long
@pytest.mark.parametrize("command", ["plan", "simulate", "compare", "draw"])
def test_json_needs_nothing_that_starts_slowly(command):
    words = [command, *FLAGS, "--json"]
    program = f"from megatron_adaptra.cli.main import main; main({words})"
    assert loaded_by(program, HEAVY + SLOW) == "[]"


def test_layers_0_to_2_import_nothing_heavy():
    program = """
import importlib, pkgutil, megatron_adaptra
for layer in ("base", "config", "ir", "model", "sim", "plan", "view", "cli"):
    package = importlib.import_module(f"megatron_adaptra.{layer}")
    for module in pkgutil.iter_modules(getattr(package, "__path__", ())):
        importlib.import_module(f"megatron_adaptra.{layer}.{module.name}")
import sys
assert "megatron_adaptra.plan.pipeline.depths" in sys.modules
assert "megatron_adaptra.cli.compare" in sys.modules
"""
    assert loaded_by(program) == "[]"
