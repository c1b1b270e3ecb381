"""Our flags beside anybody's parser: what is taken, what is refused, and how early."""

from __future__ import annotations

import argparse
import subprocess
import sys
from types import SimpleNamespace

import pytest
from patience import PATIENCE
from running import ENVIRONMENT

from megatron_adaptra.adapter.entry import flags
from megatron_adaptra.adapter.entry.plugin import Plugin
from megatron_adaptra.base.errors import AdaptraError, BadInput, UnsupportedMegatron
from megatron_adaptra.config import AdaptraConfig


def test_without_adaptra_there_are_no_settings():
    assert flags.read(["--lr", "1e-3"]) == (None, ["--lr", "1e-3"])
    assert flags.read(["--adaptra-engine", "executor", "--lr", "1e-3"])[0] is None


def test_settings_are_read_among_other_flags():
    words = ["--lr", "1e-3", "--adaptra", "--adaptra-engine=executor", "--train-iters", "7"]
    assert flags.read(words)[0] == AdaptraConfig(engine="executor")


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (["--adaptra-engin", "native"], "unknown flag --adaptra-engin; did you mean --adaptra-eng"),
        (["--adaptra-zzz"], "unknown flag --adaptra-zzz"),
        (["--adaptra", "--adaptra-engine", "fast"], "invalid choice: 'fast'"),
        (["--adaptra", "--adaptra-timeout", "soon"], "invalid float value: 'soon'"),
        (["--adaptra", "--adaptra-timeout", "0"], "--adaptra-timeout 0.0: "),
        (["--adaptra-engine", "fast"], "invalid choice: 'fast'"),
        (["--adaptra-decision-log"], "--adaptra-decision-log: expected one argument"),
    ],
)
def test_what_is_misspelt_is_refused_in_one_line(words, printed):
    with pytest.raises(AdaptraError) as error:
        flags.read(words)
    assert printed in str(error.value)
    assert "\n" not in str(error.value)


def test_the_users_own_flags_and_ours_stand_in_one_parser():
    def users(parser):
        parser.add_argument("--mine", type=int)
        return parser

    for provider in (users, None):
        parser = flags.with_ours(provider)(argparse.ArgumentParser())
        args = parser.parse_args(["--adaptra", *(["--mine", "3"] if provider else [])])
        assert args.adaptra
        assert getattr(args, "mine", 3) == 3


def test_settings_of_megatron_that_do_not_go_with_us_are_refused():
    flags.refuse(SimpleNamespace(adaptra=True, inprocess_restart=False))
    with pytest.raises(BadInput, match=r"--inprocess-restart.*leave out --adaptra"):
        flags.refuse(SimpleNamespace(adaptra=True, inprocess_restart=True))
    with pytest.raises(BadInput, match="--yaml-cfg"):
        flags.refuse(SimpleNamespace(yaml_cfg="job.yaml"))


def test_register_loads_neither_torch_nor_megatron_and_comes_first():
    code = """
import sys, types, megatron_adaptra
megatron_adaptra.register(); megatron_adaptra.register()
late = {"torch", "megatron", "megatron_adaptra.adapt.leader"} & set(sys.modules)
assert not late, late
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE, env=ENVIRONMENT)
    code = """
import sys, types, megatron_adaptra
sys.modules["megatron.training.training"] = types.ModuleType("megatron.training.training")
megatron_adaptra.register()
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=ENVIRONMENT,
    )
    assert "before anything imports megatron.training.training" in done.stderr


def test_who_trains_as_stock_knows_at_its_end_why(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "megatron_adaptra.adapter.entry.activate", raising=False)
    plugin = Plugin()
    assert "has not called Megatron's training program" in plugin.had_no_effect()
    plugin.config = AdaptraConfig()
    plugin._train_as_stock(UnsupportedMegatron("it has no schedule"))
    assert plugin.had_no_effect() == "Megatron has trained as stock: it has no schedule"
    assert "training goes on as stock Megatron: it has no schedule" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("flag", "rule", "changed", "allowed"),
    [
        ("emulate_worker", "1.1:2x", {"distributed_backend": "nccl"}, "not on GPUs"),
        ("emulate_worker", "1.1:2x", {"pipeline_model_parallel_size": 1}, "they are 0.0 to 1.0"),
        ("emulate_worker", "2.1:2x", {}, "no such worker; they are 0.0 to 1.1"),
        ("emulate_link", "0.1-2.0:4ms", {}, "no such path; the workers are 0.0 to 1.1"),
    ],
)
def test_what_cannot_be_slow_in_this_job_ends_it_before_it_starts(flag, rule, changed, allowed):
    args = {
        "adaptra": True, "adaptra_dry_run": False, "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": None, "data_parallel_size": 2, "clip_grad": 1.0,
        "distributed_backend": "gloo", **changed,
    }  # fmt: skip
    plugin = Plugin()
    plugin.config = AdaptraConfig(**{flag: [rule]})
    with pytest.raises(BadInput) as bad:
        plugin._check(SimpleNamespace(**args))
    assert bad.value.field == f"--adaptra-{flag.replace('_', '-')}"
    assert bad.value.value in rule
    assert allowed in str(bad.value)
    assert "\n" not in str(bad.value)


@pytest.mark.parametrize(
    ("transport", "disabled"), [("auto", ""), ("gloo", ""), ("auto", "1"), ("auto", "2")]
)
def test_a_value_that_no_fabric_has_ends_it_before_it_starts(transport, disabled, monkeypatch):
    monkeypatch.setenv("NCCL_IB_SL", "16")
    monkeypatch.setenv("NCCL_IB_DISABLE", disabled)
    plugin = Plugin()
    plugin.config = AdaptraConfig(transport=transport)
    used = transport == "auto" and not disabled
    # What comes behind it needs more of a job than there is here.
    with pytest.raises(BadInput if used else AttributeError) as bad:
        plugin._check(SimpleNamespace(adaptra=True))
    if used:
        assert str(bad.value) == "NCCL_IB_SL '16': it has to be a whole number from 0 to 15"
