"""Whatever a user gets wrong of a job: exit status 2 and one line that names it."""

import pytest
from commands import JOB, process

MINIMAL = ["--stages", "2", "--microbatches", "4", "--forward-ms", "1", "--backward-ms", "2"]
LEAST = "it has to be a finite number of at least 0"


def test_a_process_says_it_in_one_line():
    done = process("plan", *MINIMAL, "--forward-ms", "nan", expect=2)
    assert done.stdout == ""
    line = f"adaptra: error: --forward-ms nan: {LEAST}\n"
    assert done.stderr == line


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--stages 0", "--stages 0: it has to be a whole number of at least 1"),
        ("--stages two", "--stages 'two': it has to be a whole number of at least 1"),
        ("--microbatches 1.5", "--microbatches '1.5': it has to be a whole number of at least"),
        ("--microbatches -3", "--microbatches -3: it has to be a whole number of at least 1"),
        ("--microbatches 99999999", "--microbatches 99999999: stages x microbatch"),
        ("--stages 1000000000", "--stages 1000000000: stages x microbatch"),
        ("--chunks 99999999", "--chunks 99999999: stages x microbatch"),
        ("--chunks 0", "--chunks 0: it has to be a whole number of at least 1"),
        ("--forward-ms -1", f"--forward-ms -1.0: {LEAST}"),
        ("--forward-ms 1,nan", f"--forward-ms nan: {LEAST}"),
        ("--forward-ms inf", f"--forward-ms inf: {LEAST}"),
        ("--forward-ms 1ms", "--forward-ms '1ms': it has to be a number, or several"),
        ("--backward-ms 1,2,3", "--backward-ms [1.0, 2.0, 3.0]: it has to be one number, or a"),
        ("--backward-ms -2", f"--backward-ms -2.0: {LEAST}"),
        ("--backward-input-ms 1", "--backward-input-ms 1.0: it has no place beside --backw"),
        ("--link-delay-ms nan", f"--link-delay-ms nan: {LEAST}"),
        ("--link-delay-ms -5", f"--link-delay-ms -5.0: {LEAST}"),
        ("--link-delay-ms 1,2", "--link-delay-ms [1.0, 2.0]: it has to be one number, or a li"),
        ("--return-delay-ms 1,", "--return-delay-ms '1,': it has to be a number, or several"),
        ("--return-delay-ms 1,2", "--return-delay-ms [1.0, 2.0]: it has to be one number, or"),
        ("--link-jitter -0.1", f"--link-jitter -0.1: {LEAST}"),
        ("--link-jitter nan", f"--link-jitter nan: {LEAST}"),
        (
            "--link-jitter 0.1,0.2",
            "--link-jitter [0.1, 0.2]: it has to be one number, or a list of 1",
        ),
        ("--link-bandwidth 0", "--link-bandwidth 0.0: it has to be bytes per second, above 0"),
        ("--link-bandwidth nan", "--link-bandwidth nan: it has to be a number of at least 0"),
        ("--message-bytes inf", f"--message-bytes inf: {LEAST}"),
        ("--optimizer-ms -1", f"--optimizer-ms -1.0: {LEAST}"),
        ("--optimizer-ms 1,2", f"--optimizer-ms [1.0, 2.0]: {LEAST}"),
        ("--activation-budget 0", "--activation-budget 0.0: it has to be a number of at least"),
        ("--activation-budget 0.5", "--activation-budget 0.5: it has to be a number of at lea"),
        ("--activation-budget -4", "--activation-budget -4.0: it has to be a number of at le"),
        ("--activation-budget 4,0.9", "--activation-budget 0.9: it has to be a number of at "),
        ("--activation-budget nan", "--activation-budget nan: it has to be a number of at lea"),
        ("--activation-budget 1,2,3", "--activation-budget [1.0, 2.0, 3.0]: it has to be one"),
        ("--policy fastest", "--policy 'fastest': it has to be one of 1f1b, adaptive"),
        ("--time-limit 0", "--time-limit '0': it has to be a number of seconds above 0"),
        ("--time-limit nan", "--time-limit 'nan': it has to be a number of seconds above 0"),
        ("--time-limit 3s", "--time-limit '3s': it has to be a number of seconds above 0"),
    ],
)
def test_flags(here, words, line):
    assert here.refused("plan", *MINIMAL, *words.split()).startswith(line)


@pytest.mark.parametrize("command", ["plan", "compare", "simulate", "draw"])
def test_every_command_that_takes_a_job_refuses_the_same(here, command):
    line = here.refused(command, *MINIMAL, "--activation-budget", "0.5")
    assert line.startswith("--activation-budget 0.5: it has to be a number of at least 1")


@pytest.mark.parametrize("flag", ["--stages", "--microbatches", "--forward-ms", "--backward-ms"])
def test_a_missing_flag(here, flag):
    i = MINIMAL.index(flag)
    line = here.refused("plan", *MINIMAL[:i], *MINIMAL[i + 2 :])
    assert line.startswith(f"{flag} is missing: ")


def test_lists_with_chunks_may_hold_the_way_back_and_no_more(here):
    words = ["--stages", "3", "--chunks", "2", "--link-delay-ms", "1,2,3,4"]
    line = here.refused("plan", *MINIMAL, *words)
    assert line.endswith("it has to be one number, or a list of 3, one per link")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"foward_ms": 9}, "'foward_ms': did you mean 'forward_ms'?"),
        ({"zzz": 9}, "'zzz': known are stages, "),
        ({"stages": True}, "stages True: it has to be a whole number of at least 1"),
        ({"stages": "4"}, "stages '4': it has to be a whole number of at least 1"),
        ({"microbatches": 2.0}, "microbatches 2.0: it has to be a whole number of at least 1"),
        ({"forward_ms": "9"}, f"forward_ms '9': {LEAST}"),
        ({"forward_ms": {}}, f"forward_ms {{}}: {LEAST}"),
        ({"forward_ms": [9, 9, 9, [9]]}, f"forward_ms [9]: {LEAST}"),
        ({"forward_ms": [9] * 3}, "forward_ms [9, 9, 9]: it has to be one number, or a list"),
        ({"forward_ms": 10**400}, f": {LEAST}"),
        ({"forward_ms": None}, "forward_ms is missing: it has to be one number, or a list of 4"),
        ({"link_delay_ms": [1]}, "link_delay_ms [1]: it has to be one number, or a list of 3"),
        ({"link_delay_ms": [1] * 4}, ": it has to be one number, or a list of 3, one per link"),
        ({"link_jitter": [0.1]}, "link_jitter [0.1]: it has to be one number, or a list of 3"),
        ({"link_jitter": "much"}, f"link_jitter 'much': {LEAST}"),
        ({"link_bandwidth": 0}, "link_bandwidth 0.0: it has to be bytes per second, above 0"),
        ({"message_bytes": -1}, f"message_bytes -1: {LEAST}"),
        ({"optimizer_ms": [1]}, f"optimizer_ms [1]: {LEAST}"),
        ({"recompute": 1}, "recompute 1: it has to be true or false"),
        ({"split": "yes"}, "split 'yes': it has to be true or false"),
        ({"chunks": 1.0}, "chunks 1.0: it has to be a whole number of at least 1"),
        ({"activation_budget": [4, 3, 2, 0]}, "activation_budget 0: it has to be a number of"),
        ({"activation_budget": True}, "activation_budget True: it has to be a number of at l"),
    ],
)
def test_profiles(here, profile, change, line):
    assert line in here.refused("plan", "--profile", profile({**JOB, **change}))


def test_numbers_that_json_does_not_have(here, profile):
    text = '{"stages": 2, "microbatches": 4, "forward_ms": NaN, "backward_ms": 1}'
    line = here.refused("plan", "--profile", profile(text))
    assert line == f"forward_ms nan: {LEAST}"


def test_files_that_are_no_profile(here, profile, tmp_path):
    def refused(path):
        return here.refused("plan", "--profile", path)

    assert "it cannot be read: No such file" in refused(tmp_path / "none.yaml")
    assert "it cannot be read: Is a directory" in refused(tmp_path)
    assert "it has to hold keys and values" in refused(profile("7"))
    assert "it has to hold keys and values" in refused(profile("[1]"))
    assert "it is not JSON: Expecting property name" in refused(profile("{", "a.json"))
    assert "it is not YAML: " in refused(profile("a: [", "a.yaml"))
    assert refused(profile("[]")).endswith("has no job with a name")
    assert refused(profile("[1, 2]")).endswith("has no job with a name")
    binary = tmp_path / "b.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "it is no UTF-8 text" in refused(binary)
