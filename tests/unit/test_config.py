"""Settings: flags over YAML over defaults, and what is refused."""

import argparse
import math
import runpy
from dataclasses import fields
from pathlib import Path

import pytest

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.config import AdaptraConfig, Budget, add_flags, load_yaml

GOLDEN = Path(__file__).parent / "golden" / "flags.txt"


def parser() -> argparse.ArgumentParser:
    return add_flags(argparse.ArgumentParser(prog="train", allow_abbrev=False, add_help=False))


def config(*flags: str) -> AdaptraConfig:
    return AdaptraConfig.from_args(parser().parse_args(list(flags)))


def refusal(call, *args) -> str:
    with pytest.raises(BadInput) as bad:
        call(*args)
    return str(bad.value)


@pytest.fixture
def file(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "adaptra.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_defaults():
    assert config() == AdaptraConfig()
    assert AdaptraConfig().budget == Budget(math.inf, math.inf, auto=False)


def test_flags_beat_the_file_and_the_file_beats_defaults(file):
    path = file("timeout: 30\nmin_gain: 0.3\nemulate_link: [0-1:1ms]\nactivation_budget: .inf\n")
    got = config("--adaptra-config", path, "--adaptra-min-gain", "0.2")
    assert got == AdaptraConfig(timeout=30, min_gain=0.2, emulate_link=["0-1:1ms"])
    rules = ["--adaptra-emulate-link", "1-2:2ms", "--adaptra-emulate-link", "x.yaml"]
    assert config("--adaptra-config", path, *rules).emulate_link == ["1-2:2ms", "x.yaml"]


def test_flag_equal_to_the_default_beats_the_file(file):
    path = file("engine: executor\n")
    assert config("--adaptra-config", path).engine == "executor"
    assert config("--adaptra-config", path, "--adaptra-engine", "native").engine == "native"


def test_act_sets_what_is_not_given(file):
    exact = config("--adaptra-act", "exact")
    assert (exact.engine, exact.reroute, exact.allreduce, exact.sync, exact.small_collectives) == (
        "executor", "auto", "auto", "auto", "fixed",
    )  # fmt: skip
    assert config("--adaptra-act", "bits") == AdaptraConfig()
    kept = config("--adaptra-act", "exact", "--adaptra-sync", "full", "--adaptra-engine", "native")
    assert (kept.engine, kept.sync, kept.reroute) == ("native", "full", "auto")
    path = file("act: exact\nallreduce: native\n")
    assert config("--adaptra-config", path).allreduce == "native"
    assert config("--adaptra-config", path, "--adaptra-act", "bits") == AdaptraConfig()
    observe = config("--adaptra-act", "observe")
    assert observe.observes
    assert (observe.engine, observe.reroute, observe.sync) == ("native", "auto", "auto")
    assert config("--adaptra-act", "observe", "--adaptra-reroute", "off").reroute == "off"
    assert not exact.observes


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("engine", "executor", "native"), ("engine", "stock", "native"),
        ("allreduce", "direct", "native or auto"), ("sync", "share", "full or auto"),
        ("small-collectives", "on", "off or auto"), ("act-file", "/tmp/act", "none"),
    ],
)  # fmt: skip
def test_a_job_that_observes_changes_nothing(flag, value, words):
    text = refusal(config, "--adaptra-act", "observe", f"--adaptra-{flag}", value)
    assert text == f"--adaptra-{flag} {value!r}: with --adaptra-act observe it has to be {words}"


@pytest.mark.parametrize("word", ["on", "off", "auto"])
def test_yaml_means_words_by_on_and_off(file, word):
    assert (
        config("--adaptra-config", file(f"small_collectives: {word}\n")).small_collectives == word
    )


def test_every_setting_has_a_flag():
    flags = {f.name: f"--adaptra-{f.name.replace('_', '-')}" for f in fields(AdaptraConfig)}
    for name, flag in flags.items():
        needed = {
            "recompute": ["--adaptra-engine", "executor"],
            "late_ranks": ["--adaptra-allreduce", "direct"],
            "sync_counts": ["--adaptra-sync", "share"],
        }
        with_it = needed.get(name, [])
        if isinstance(getattr(AdaptraConfig(), name), bool):
            assert getattr(config(flag, *with_it), name)
            continue
        others = {
            "engine": "executor", "allreduce": "direct", "emulate_link": "0-1:1ms", "log": "a",
            "emulate_worker": "0.1:2x", "reroute": "swap", "sync": "share",
            "small_collectives": "off",
            "act": "exact", "post_receives": "on-demand", "policy": "1f1b", "transport": "gloo",
        }  # fmt: skip
        assert getattr(config(flag, others.get(name, "7"), *with_it), name) != getattr(
            AdaptraConfig(), name
        )


@pytest.mark.parametrize(("text", "late"), [("", ()), ("3", (3,)), ("2, 0,5", (0, 2, 5))])
def test_late_ranks(text, late):
    assert config("--adaptra-allreduce", "direct", "--adaptra-late-ranks", text).late == late


@pytest.mark.parametrize(("text", "counts"), [("", ()), ("4", (4,)), ("9, 9,09 ,5", (9, 9, 9, 5))])
def test_counts(text, counts):
    assert config("--adaptra-sync", "share", "--adaptra-sync-counts", text).counts == counts


LATE, RANKS = "--adaptra-late-ranks", "it has to be ranks of"
COUNTS = "--adaptra-sync-counts"
EACH = "it has to be a number of microbatches for each replica, such as 9,9,9,5, and at least 1"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        *((f"direct {LATE}={text}", f"{LATE} '{text}': {RANKS}") for text in (
            "a", "1,", ",", "-1", "1,1", "1;2", "1234567"
        )),
        (f"stragglar {LATE}=", "stragglar needs the one rank that is late"),
        (f"stragglar {LATE}=1,2", "stragglar needs the one rank that is late"),
        (f"plan.txt {LATE} 1", f"{LATE} '1': the plan in plan.txt says who does what"),
        (f"native {LATE} 2", "native waits for all; use --adaptra-allreduce direct"),
        *((f"native --adaptra-sync share {COUNTS}={text}", f"{COUNTS} '{text}': {EACH}")
          for text in ("a", "9,", ",", "-1,9", "0,8", "8,00", "9;5", "1234567890")),
        *((f"native --adaptra-sync {sync} {COUNTS} 9,7", f"'9,7': sync is {sync}; use --adaptra-sy")
          for sync in ("full", "auto")),
    ],
)  # fmt: skip
def test_late_ranks_and_counts_that_are_none(flags, words):
    assert words in refusal(config, "--adaptra-allreduce", *flags.split())


def test_lists_of_numbers_in_yaml(file):
    def read(text):
        return config("--adaptra-config", file(text))

    assert read("sync: share\nsync_counts: 9,7\n").counts == (9, 7)
    assert read("sync: share\nsync_counts: 4\n").counts == (4,)
    assert read("allreduce: direct\nlate_ranks: 2\n").late == (2,)
    assert f"sync_counts [9, 7]: {EACH}" in refusal(read, "sync: share\nsync_counts: [9, 7]\n")
    assert "allreduce 5: it has to" in refusal(read, "allreduce: 5")


def test_gloo_cannot_encrypt():
    text = refusal(config, "--adaptra-encrypt", "--adaptra-transport", "gloo")
    assert "encrypt True: --adaptra-transport gloo cannot" in text


def test_help_can_be_shown():
    """A bare % in a help text breaks argparse only when help is asked for."""
    text = parser().format_help()
    assert "--adaptra-engine {native,executor,stock}" in text


def test_shipped_file_loads(request):
    path = request.config.rootpath / "configs" / "minimal.yaml"
    assert config("--adaptra-config", str(path)).decision_log == "adaptra-decisions.jsonl"


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("time_out", "did you mean 'timeout'?"),
        ("activation-budget", "did you mean 'activation_budget'?"),
        ("zzz", "known are act, act_file, engine"),
        ("5", "known are"),
    ],
)
def test_unknown_key_names_the_nearest(file, key, words):
    text = refusal(config, "--adaptra-config", file(f"{key}: 1\n"))
    assert "unknown key in" in text
    assert "adaptra.yaml" in text
    assert words in text


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("engine: fast", "it has to be one of native, executor, stock"),
        ("timeout: 0", "it has to be a number of at least 1"),
        ("timeout: 10s", ""),
        ("timeout: yes", "timeout True: "),
        ("timeout: .inf", "at most 1e+09"),
        ("timeout: .nan", "timeout nan: "),
        ("min_gain: -0.1", "it has to be a number of at least 0"),
        ("activation_budget: 0.5", "it has to be microbatches"),
        ("activation_budget: null", "activation_budget 'None': "),
        ("activation_budget: 0GiB", ""),
        ("activation_budget: 5 apples", "bytes such as 20GiB, auto or none"),
        ("policy: zb", "it has to be one of adaptive, 1f1b, zb-h1"),
        ("policy: zb-h1", "it needs --adaptra-engine executor"),
        ("recompute: true", "recompute True: it needs --adaptra-engine executor"),
        ("recompute: 1", "it has to be true or false"),
        ("emulate_link: 2-3:40ms", "it has to be a list such as"),
        ("emulate_link: [3]", "it has to be a list such as"),
        ("emulate_worker: [1.2]", "it has to be a list such as [1.2:2x@10..]"),
        ("decision_log: 5", ""),
    ],
)
def test_bad_value_is_refused(file, line, words):
    text = refusal(config, "--adaptra-config", file(line + "\n"))
    assert words in text
    assert f"{line.partition(':')[0]} " in text


@pytest.mark.parametrize("flag", ["timeout inf", "min-gain -1.0", "activation-budget '0'"])
def test_bad_flag_is_refused(flag):
    words = f"--adaptra-{flag}".replace("'", "").split()
    assert f"--adaptra-{flag}: " in refusal(config, *words)


@pytest.mark.parametrize("content", [b"", b"- 1\n", b"[", b"\xff\xfe\x00", b"a: 2024-99-99\n"])
def test_file_that_is_no_mapping_is_refused(tmp_path, content):
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    assert "bad.yaml" in refusal(load_yaml, path)


def test_missing_file_is_refused(tmp_path):
    assert "it cannot be read: No such file" in refusal(load_yaml, tmp_path / "none.yaml")
    assert "it cannot be read: Is a directory" in refusal(load_yaml, tmp_path)


def test_flags_are_the_reviewed_ones():
    """Adding a flag is a reviewed act: it changes tests/unit/golden/flags.txt too."""
    lines = []
    for action in parser()._actions:
        choices = f" {{{','.join(action.choices)}}}" if action.choices else ""
        kind = getattr(action.type, "__name__", type(action).__name__.strip("_"))
        lines.append(f"{action.option_strings[0]} {kind}{choices}")
    assert "\n".join(lines) + "\n" == GOLDEN.read_text()


def test_the_pages_are_made_from_flags_and_patches(request):
    root = request.config.rootpath
    names = runpy.run_path(str(root / "scripts" / "write_docs.py"))
    for path, text in names["pages"]().items():
        assert path.read_text() == text, "run scripts/write_docs.py"
