"""Whatever a user gets wrong of a job: exit status 2 and one line that names it."""

import pytest
from commands import JOB, process

MINIMAL = ["--stages", "2", "--microbatches", "4", "--forward-ms", "1", "--backward-ms", "2"]
LEAST = "it has to be a finite number of at least 0"
WHOLE = "it has to be a whole number of at least"


def test_a_process_says_it_in_one_line():
    done = process("plan", *MINIMAL, "--forward-ms", "nan", expect=2)
    assert (done.stdout, done.stderr) == ("", f"adaptra: error: --forward-ms nan: {LEAST}\n")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--stages two", f"'two': {WHOLE} 1"),
        ("--microbatches 1.5", f"'1.5': {WHOLE} 1"),
        ("--microbatches 99999999", "99999999: stages x microbatch"),
        ("--chunks 0", f"0: {WHOLE} 1"),
        ("--forward-ms 1,nan", f"nan: {LEAST}"),
        ("--forward-ms 1ms", "'1ms': it has to be a number, or several"),
        ("--backward-ms 1,2,3", "[1.0, 2.0, 3.0]: it has to be one number, or a list of 2"),
        ("--set backward_input_ms=1", "1.0: it has no place beside --backward-ms"),
        ("--set link_delay_ms=-5", f"-5.0: {LEAST}"),
        ("--set return_delay_ms=1,2", "[1.0, 2.0]: it has to be one number, or a list of 1"),
        ("--set link_jitter=-0.1", f"-0.1: {LEAST}"),
        ("--set link_bandwidth=0", "0.0: it has to be bytes per second, above 0"),
        ("--set link_bandwidth=nan", "nan: it has to be a number of at least 0"),
        ("--message-bytes inf", f"inf: {LEAST}"),
        ("--set optimizer_ms=1,2", f"[1.0, 2.0]: {LEAST}"),
        ("--activation-budget 4,0.9", "0.9: it has to be a number of at least 1"),
        ("--policy fastest", "'fastest': it has to be one of 1f1b, adaptive"),
        ("--time-limit 3s", "'3s': it has to be a number of seconds above 0"),
    ],
)
def test_flags(here, words, line):
    assert here.refused("plan", *MINIMAL, *words.split()).startswith(f"{name_in(words)} {line}")


def name_in(words):
    """The name that messages have for the first of the flags in `words`, or for its setting."""
    return words.partition("=")[0] if words.startswith("--set") else words.split()[0]


@pytest.mark.parametrize("command", ["plan", "compare", "simulate", "draw"])
def test_every_command_that_takes_a_job_refuses_the_same(here, command):
    line = here.refused(command, *MINIMAL, "--activation-budget", "0.5")
    assert line.startswith("--activation-budget 0.5: it has to be a number of at least 1")
    line = here.refused(command, *REPLICAS, "--slow", "0.9:dead")
    assert line.startswith("--slow '0.9:dead': no such worker; workers are 0.0 to 2.2")


@pytest.mark.parametrize("flag", ["--stages", "--microbatches", "--forward-ms", "--backward-ms"])
def test_a_missing_flag(here, flag):
    i = MINIMAL.index(flag)
    line = here.refused("plan", *MINIMAL[:i], *MINIMAL[i + 2 :])
    assert line.startswith(f"{flag} is missing: ")


def test_lists_with_chunks_may_hold_the_way_back_and_no_more(here):
    words = ["--stages", "3", "--chunks", "2", "--set", "link_delay_ms=1,2,3,4"]
    line = here.refused("plan", *MINIMAL, *words)
    assert line.endswith("it has to be one number, or a list of 3, one per link")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"foward_ms": 9}, "'foward_ms': did you mean 'forward_ms'?"),
        ({"zzz": 9}, "'zzz': known are stages, "),
        ({"stages": True}, f"stages True: {WHOLE} 1"),
        ({"microbatches": 2.0}, f"microbatches 2.0: {WHOLE} 1"),
        ({"forward_ms": "9"}, f"forward_ms '9': {LEAST}"),
        ({"forward_ms": [9, 9, 9, [9]]}, f"forward_ms [9]: {LEAST}"),
        ({"forward_ms": 10**400}, f": {LEAST}"),
        ({"forward_ms": None}, "forward_ms is missing: it has to be one number, or a list of 4"),
        ({"link_delay_ms": [1]}, "link_delay_ms [1]: it has to be one number, or a list of 3"),
        ({"recompute": 1}, "recompute 1: it has to be true or false"),
        ({"activation_budget": [4, 3, 2, 0]}, "activation_budget 0: it has to be a number of"),
        ({"activation_budget": True}, "activation_budget True: it has to be a number of at l"),
    ],
)
def test_profiles(here, profile, change, line):
    assert line in here.refused("plan", "--profile", profile({**JOB, **change}))


def test_files_that_are_no_profile(here, profile, tmp_path):
    def refused(path):
        return here.refused("plan", "--profile", path)

    assert "it cannot be read: No such file" in refused(tmp_path / "none.yaml")
    assert "it cannot be read: Is a directory" in refused(tmp_path)
    assert "it has to hold keys and values" in refused(profile("7"))
    assert "it is not JSON: Expecting property name" in refused(profile("{", "a.json"))
    assert "it is not YAML: " in refused(profile("a: [", "a.yaml"))
    assert refused(profile("[1, 2]")).endswith("has no job with a name")
    binary = tmp_path / "b.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "it is no UTF-8 text" in refused(binary)


# --- of several replicas -------------------------------------------------------------------------

SHAPE = ("--stages", 3, "--microbatches", 4, "--forward-ms", 9, "--backward-ms", 18)
REPLICAS = (*SHAPE, "--replicas", 3)
WORKER = "no such worker; workers are 0.0 to 2.2, replica.stage"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--slow 3.0:dead", f"'3.0:dead': {WORKER}"),
        ("--slow 1:dead", f"'1:dead': {WORKER}"),
        ("--slow 1.2:dead,01.2:dead", "'01.2:dead': it is given twice"),
        ("--slow 1.2:gone", "'1.2:gone': a rule such as 1.2:2x"),
        ("--slow 0.1:dead,1.1:dead,2.1:dead", "'0.1, 1.1, 2.1': nobody is left for stage 1"),
        ("--slow 0.1:2y", "'0.1:2y': a rule such as 1.2:2x"),
        ("--slow 0.1:0x", "'0.1:0x': it has to take from 1x to 1000x as long"),
        ("--slow 0.1:infx", "'0.1:infx': a rule such as 1.2:2x"),
        ("--slow 0.1", "'0.1': it has to be a rule: 2-3:40ms or 2-3:10MB/s (a link), "),
        ("--slow 4.1:2x", "'4.1:2x': no such worker; they are 0.0 to 2.2"),
        ("--slow 1.1-0.1:10MB/s", "'1.1-0.1': no such path; workers have paths to those of the"),
        ("--slow 0.0-3.1:10MB/s", "'0.0-3.1': no such path; the workers are 0.0 to 2.2"),
        ("--slow 1.1-0.2", "'1.1-0.2': it has to be a rule: "),
        ("--slow 1.1-0.2:fast", "'fast': it has to be a duration such as 40ms"),
        ("--slow 1.1-0.2:1ms,0.2-1.1:2ms", "'0.2-1.1:2ms': it is given twice"),
        ("--slow 1-2:1ms,jitter=1ms", "'jitter': it is not planned across replicas yet"),
        ("--slow 1-2:1ms,loss=1%", "'1-2:1ms,loss=1%': loss needs a network"),
        ("--slow 1:10ms", "'1:10ms': no plan of pipelines knows late ranks"),
        ("--slow 0.1:10ms", "'0.1:10ms': a rule such as 1.2:2x"),
        ("--slow 1:10MB/s", f"'1:10MB/s': {WORKER}"),
        ("--set slow", "'slow': it has to be of the form KEY=VALUE"),
        ("--set worker_budget=0.1", "'0.1': it has to be of the form 1.2:6"),
        ("--set worker_budget=0.1:0", "'0': it has to be microbatches, at least 1"),
        ("--set worker_budget=0.1:1GB", "'1GB': give --activation-bytes, what one"),
        (
            "--set worker_budget=0.1:1GB --activation-bytes 2GB",
            "'1GB': it has to be at least 2GB, wh",
        ),
        ("--chunks 2", "2: it is not planned across replicas yet"),
        ("--recompute", "True: it is not planned across replicas yet"),
        (
            "--set link_jitter=0.1 --set link_delay_ms=5",
            "0.1: it is not planned across replicas yet",
        ),
    ],
)
def test_flags_of_replicas(here, words, line):
    name = "--set" if words == "--set slow" else name_in(words)
    assert here.refused("plan", *REPLICAS, *words.split()).startswith(f"{name} {line}")


def test_one_replica_has_no_others(here):
    several = "it needs several replicas: give --replicas"
    for words in ("--slow 0.2:dead", "--slow 0:2x", "--set worker_budget=0.1:3"):
        line = here.refused("plan", *SHAPE, *words.split(), "--replicas", 1)
        assert line == here.refused("plan", *SHAPE, *words.split())
        assert line.endswith(f": {several}")
    line = here.refused("plan", *SHAPE, "--replicas", 0)
    assert line.startswith("--replicas 0: it has to be a whole number of at least 1")
    line = here.refused("plan", *SHAPE, "--replicas", 10**9)
    assert line.startswith("--replicas 1000000000: replicas x stages x microbatches may be ")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"replicas": True}, f"replicas True: {WHOLE} 1"),
        ({"slow": 1}, "slow 1: it has to be a list of rules such as 2-3:40ms"),
        ({"slow": [[1]]}, "slow [[1]]: it has to be a list of rules such as 2-3:40ms"),
        ({"slow": ["1.2:3"]}, "slow '1.2:3': a rule such as 1.2:2x"),
        ({"worker_budget": {"0.1": True}}, "worker_budget True: it has to be microbatches"),
    ],
)
def test_profiles_of_replicas(here, profile, change, line):
    job = {"stages": 3, "microbatches": 4, "forward_ms": 9, "backward_ms": 18, "replicas": 3}
    assert here.refused("plan", "--profile", profile({**job, **change})).startswith(line)


def test_a_rate_without_a_size_of_messages_is_noted(here):
    _, err = here("plan", *REPLICAS, "--slow", "0.1:1MB/s")
    assert err == (
        "adaptra: --slow changes nothing without --message-bytes, the size of a message\n"
    )


@pytest.mark.parametrize("command", ["plan", "compare"])
def test_a_plan_that_takes_minutes_is_refused_unless_asked_for(here, command):
    line = here.refused(command, *REPLICAS, "--microbatches", 30_000)
    assert line.startswith("--time-limit is missing: more than 100000 replicas x stages x micro")


def test_nothing_is_sampled(here):
    line = here.refused("simulate", *REPLICAS, "--samples", 5)
    assert line.startswith("--samples 5: there is nothing to sample, as no path of several")
