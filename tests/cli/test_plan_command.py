"""`adaptra plan` as its user sees it: a process, its output and its exit status."""

import json
import subprocess
import sys

import pytest

from megatron_adaptra.cli.main import COMMANDS, main

JOB = {
    "stages": 4,
    "microbatches": 12,
    "forward_ms": 9,
    "backward_input_ms": 10,
    "backward_weight_ms": [6, 6, 6, 6],
    "link_delay_ms": [0, 0, 60],
}
FLAGS = [
    *("--stages", "4", "--microbatches", "12", "--forward-ms", "9", "--backward-input-ms", "10"),
    *("--backward-weight-ms", "6,6,6,6", "--link-delay-ms", "0,0,60"),
]


def adaptra(*words, expect=0):
    done = subprocess.run(
        [sys.executable, "-m", "megatron_adaptra", *map(str, words)], capture_output=True, text=True
    )
    assert done.returncode == expect, done.stderr
    return done


def planned(*words):
    return json.loads(adaptra("plan", *words, "--json").stdout)


def refused(*words):
    """The one line on standard error."""
    done = adaptra("plan", *words, expect=2)
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("adaptra: error: ")
    return line.removeprefix("adaptra: error: ")


@pytest.fixture
def profile(tmp_path):
    def write(data, name="job.json"):
        path = tmp_path / name
        path.write_text(data if isinstance(data, str) else json.dumps(data))
        return path

    return write


def without_clock(plan):
    assert plan.pop("planning_ms") >= 0
    return plan


def test_json_has_what_is_promised():
    plan = without_clock(planned(*FLAGS))
    assert set(plan) == {
        "policy", "why", "warmup", "stages", "predicted_ms", "lower_bound_ms", "stock_ms",
        "peak_in_flight",
    }  # fmt: skip
    assert plan["policy"] == "adaptive"
    assert plan["warmup"] == plan["peak_in_flight"] == [9, 8, 7, 1]
    assert plan["predicted_ms"] == pytest.approx(495)
    assert plan["lower_bound_ms"] == pytest.approx(495)
    # A period of 1F1B is two periods of a stage here and a round trip of 120 ms.
    assert plan["stock_ms"] == pytest.approx(1095)
    assert plan["stages"][0][:9] == [f"F{i}" for i in range(9)]
    assert [len(line) for line in plan["stages"]] == [24] * 4


def test_the_table():
    out = adaptra("plan", *FLAGS).stdout
    assert "495.0" in out
    assert "2.21 x" in out
    assert "9,8,7,1" in out
    assert "2->3 60 ms" in out


def test_flags_json_and_yaml_say_the_same(profile):
    yaml = "\n".join(f"{key}: {value}" for key, value in JOB.items())
    plans = [
        without_clock(planned(*FLAGS)),
        without_clock(planned("--profile", profile(JOB))),
        without_clock(planned("--profile", profile(yaml, "job.yaml"))),
    ]
    assert plans[0] == plans[1] == plans[2]


def test_flags_win_over_the_file(profile):
    path = profile({**JOB, "activation_budget": 5})
    assert planned("--profile", path)["warmup"][0] == 5
    assert planned("--profile", path, "--activation-budget", "6,5,4,3")["warmup"][0] == 6
    whole = planned("--profile", path, "--backward-ms", "16", "--activation-budget", "12")
    assert whole["warmup"] == [9, 8, 7, 1]


def test_one_of_several(profile):
    path = profile([{**JOB, "name": "slow"}, {**JOB, "name": "healthy", "link_delay_ms": 0}])
    assert planned("--profile", path, "--name", "healthy")["warmup"] == [4, 3, 2, 1]
    assert refused("--profile", path) == f"--name: None is not allowed; {path} has slow, healthy"
    assert "did you mean 'healthy'?" in refused("--profile", path, "--name", "heathy")
    assert "holds the one job" in refused("--profile", profile(JOB), "--name", "slow")
    assert "only together with --profile" in refused(*FLAGS, "--name", "slow")


def test_every_key_of_a_profile_counts(profile):
    def predicted(**more):
        return planned("--profile", profile({**JOB, **more}))["predicted_ms"]

    base = predicted()
    assert predicted(optimizer_ms=30) == pytest.approx(base + 30)
    assert predicted(return_delay_ms=0) < base
    assert predicted(message_bytes=1000, link_bandwidth=[1e9, 1e9, 2e4]) > base
    assert predicted(message_bytes=1000) == base
    assert predicted(chunks=1, recompute=False, name="x", published_plan_ms=3) == base


def test_policies():
    stock = planned(*FLAGS, "--policy", "1f1b")
    assert stock["policy"] == "1f1b"
    assert stock["predicted_ms"] == stock["stock_ms"]
    assert planned(*FLAGS, "--policy", "adaptive") | {"planning_ms": 0} == planned(*FLAGS) | {
        "planning_ms": 0
    }


def test_a_return_delay_of_its_own():
    both, down = planned(*FLAGS), planned(*FLAGS, "--return-delay-ms", "0")
    assert down["predicted_ms"] == pytest.approx(both["predicted_ms"] - 60)
    assert "3->2" not in down["why"]


MINIMAL = ["--stages", "2", "--microbatches", "4", "--forward-ms", "1", "--backward-ms", "2"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--stages 0", "--stages: 0 is not allowed; a whole number of at least 1"),
        ("--stages two", "--stages: 'two' is not allowed; a whole number of at least 1"),
        ("--microbatches 1.5", "--microbatches: '1.5' is not allowed; a whole number of at least"),
        ("--microbatches 99999999", "--microbatches: 99999999 is not allowed; at most 500000"),
        ("--forward-ms -1", "--forward-ms: -1.0 is not allowed; a finite number of at least 0"),
        ("--forward-ms 1,nan", "--forward-ms: nan is not allowed; a finite number of at least 0"),
        ("--forward-ms inf", "--forward-ms: inf is not allowed; a finite number of at least 0"),
        ("--forward-ms 1ms", "--forward-ms: '1ms' is not allowed; a number, or several"),
        ("--backward-ms 1,2,3", "--backward-ms: [1.0, 2.0, 3.0] is not allowed; one number, or a"),
        ("--backward-input-ms 1", "--backward-input-ms: 1.0 is not allowed; not beside --backw"),
        ("--link-delay-ms nan", "--link-delay-ms: nan is not allowed; a finite number of at least"),
        ("--link-delay-ms 1,2", "--link-delay-ms: [1.0, 2.0] is not allowed; one number, or a li"),
        ("--return-delay-ms 1,", "--return-delay-ms: '1,' is not allowed; a number, or several"),
        ("--activation-budget 0", "--activation-budget: 0.0 is not allowed; a number of at least"),
        ("--activation-budget nan", "--activation-budget: nan is not allowed; a number of at lea"),
        ("--policy fastest", "policy: 'fastest' is not allowed; one of 1f1b, adaptive"),
    ],
)
def test_bad_flags(words, line):
    assert refused(*MINIMAL, *words.split()).startswith(line)


@pytest.mark.parametrize("flag", ["--stages", "--microbatches", "--forward-ms", "--backward-ms"])
def test_a_missing_flag(flag):
    i = MINIMAL.index(flag)
    line = refused(*MINIMAL[:i], *MINIMAL[i + 2 :])
    assert line.startswith(f"{flag}: None is not allowed; it has to be given: ")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"foward_ms": 9}, "'foward_ms' is not allowed; did you mean 'forward_ms'?"),
        ({"zzz": 9}, "'zzz' is not allowed; known are stages, "),
        ({"stages": True}, "stages: True is not allowed; a whole number of at least 1"),
        ({"forward_ms": "9"}, "forward_ms: '9' is not allowed; a finite number of at least 0"),
        ({"forward_ms": 10**400}, "is not allowed; a finite number of at least 0"),
        ({"forward_ms": None}, "forward_ms: None is not allowed; one number, or a list of 4"),
        ({"link_delay_ms": [1]}, "link_delay_ms: [1] is not allowed; one number, or a list of 3"),
        ({"link_bandwidth": 0}, "link_bandwidth: 0.0 is not allowed; bytes per second, above 0"),
        ({"message_bytes": -1}, "message_bytes: -1 is not allowed; a finite number of at least 0"),
        ({"optimizer_ms": [1]}, "optimizer_ms: [1] is not allowed; a finite number of at least 0"),
        ({"recompute": 1}, "recompute: 1 is not allowed; true or false"),
        ({"chunks": 2}, "chunks: 2 is not allowed; 1, as no policy interleaves yet"),
    ],
)
def test_bad_profiles(profile, change, line):
    assert line in refused("--profile", profile({**JOB, **change}))


def test_files_that_are_no_profile(profile, tmp_path):
    assert "it cannot be read: No such file" in refused("--profile", tmp_path / "none.yaml")
    assert "it cannot be read: Is a directory" in refused("--profile", tmp_path)
    assert "it has to hold keys and values" in refused("--profile", profile("7"))
    assert "it is neither JSON nor YAML" in refused("--profile", profile("{", "a.json"))
    assert "it is neither JSON nor YAML" in refused("--profile", profile("a: [", "a.yaml"))
    binary = tmp_path / "b.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "it is neither JSON nor YAML" in refused("--profile", binary)
    assert refused("--profile", profile("[1]")).startswith("--name: None")


def test_what_cannot_run_is_one_line_and_status_1():
    done = adaptra("plan", *FLAGS, "--policy", "1f1b", "--activation-budget", 2, expect=1)
    assert done.stdout == ""
    line = "stage 0 holds 4 microbatches' activations, its budget is 2"
    assert done.stderr == f"adaptra: error: {line}\n"


@pytest.mark.parametrize("words", [(), ("plam",), ("plan", "--stage", "4"), ("plan", "x")])
def test_misuse_is_status_2(words):
    assert "adaptra" in adaptra(*words, expect=2).stderr


def test_help_and_version():
    out = adaptra("--help").stdout
    for name in COMMANDS:
        assert f"\n    {name} " in out
    assert "--link-delay-ms" in adaptra("plan", "--help").stdout
    assert adaptra("--version").stdout.startswith("adaptra ")


def test_main_returns_the_status(capsys):
    assert main(["plan", *FLAGS, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warmup"] == [9, 8, 7, 1]
    assert main(["plan"]) == 2


HEAVY = ("torch", "megatron", "matplotlib")


def loaded_by(program):
    code = f"{program}\nimport sys; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


def test_plan_imports_nothing_heavy():
    words = ["plan", *FLAGS, "--json"]
    assert loaded_by(f"from megatron_adaptra.cli.main import main; main({words})") == "[]"


def test_layers_0_to_2_import_nothing_heavy():
    program = """
import importlib, pkgutil, megatron_adaptra
for layer in ("errors", "config", "ir", "model", "sim", "plan", "view"):
    package = importlib.import_module(f"megatron_adaptra.{layer}")
    for module in pkgutil.iter_modules(getattr(package, "__path__", ())):
        importlib.import_module(f"megatron_adaptra.{layer}.{module.name}")
import sys
assert "megatron_adaptra.plan.search" in sys.modules
"""
    assert loaded_by(program) == "[]"
