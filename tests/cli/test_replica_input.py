"""Whatever a user gets wrong of several replicas: exit status 2 and one line that names it."""

import pytest

SHAPE = ("--stages", 3, "--microbatches", 4, "--forward-ms", 9, "--backward-ms", 18)
JOB = (*SHAPE, "--replicas", 3)
ENDS = "replicas are 0 to 2, stages 0 to 2"
WORKER = f"it has to be replica and stage, such as 1.2; {ENDS}"
PATH = "it has to be two workers of adjacent stages, such as 1.1-0.2"
AT_LEAST = "it has to be a whole number of at least 2"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--failed 3.0", f"--failed '3.0': {WORKER}"),
        ("--failed 0.3", f"--failed '0.3': {WORKER}"),
        ("--failed 1", f"--failed '1': {WORKER}"),
        ("--failed ١.1", f"--failed '١.1': {WORKER}"),
        ("--failed 1.2,1.2", "--failed '1.2': it is given twice"),
        ("--failed 1.2,01.2", "--failed '01.2': it is given twice"),
        ("--failed 1.2:2x", "--failed '1.2:2x': it has to be of the form W, where W is replica"),
        ("--failed 0.1,1.1,2.1", "--failed '0.1, 1.1, 2.1': nobody is left for stage 1"),
        ("--slow 0.1:2y", "--slow '2y': it has to be how many times as long, such as 2x, from"),
        ("--slow 0.1:x", "--slow 'x': it has to be how many times as long"),
        ("--slow 0.1:0x", "--slow '0x': it has to be how many times as long"),
        ("--slow 0.1:-2x", "--slow '-2x': it has to be how many times as long"),
        ("--slow 0.1:infx", "--slow 'infx': it has to be how many times as long"),
        ("--slow 0.1:nan", "--slow 'nan': it has to be how many times as long"),
        ("--slow 0.1", "--slow '0.1': it has to be of the form W:Nx, where W is replica and"),
        ("--slow 4.1:2x", f"--slow '4.1': {WORKER}"),
        ("--slow 0.1:2x,0.1:3x", "--slow '0.1': it is given twice"),
        ("--slow-path 1.1-0.1:10MB/s", f"--slow-path '1.1-0.1': {PATH}"),
        ("--slow-path 0.0-1.2:10MB/s", f"--slow-path '0.0-1.2': {PATH}"),
        ("--slow-path 0.0-3.1:10MB/s", f"--slow-path '3.1': {WORKER}"),
        ("--slow-path 1.1-0.2", f"--slow-path '1.1-0.2': {PATH}, with :10MB/s or :40ms after it"),
        ("--slow-path 1.1:10MB/s", f"--slow-path '1.1:10MB/s': {PATH}, with :10MB/s"),
        ("--slow-path 1.1-0.2:fast", "--slow-path 'fast': it has to be a rate such as 10MB/s, a"),
        ("--slow-path 1.1-0.2:0MB/s", "--slow-path '0MB/s': it has to be a rate such as 10MB/s"),
        ("--slow-path 1.1-0.2:1ms+2ms", "--slow-path '1ms+2ms': it has to be one rate, one delay"),
        ("--slow-path 1.1-0.2:1ms,0.2-1.1:2ms", "--slow-path '0.2-1.1': it is given twice"),
        ("--slow-port 0.1:10ms", "--slow-port '10ms': it has to be a rate such as 10MB/s or"),
        ("--slow-port 0.1", "--slow-port '0.1': it has to be of the form W:V, where W is"),
        ("--slow-port 0.1:1MB/s,0.1:1MB/s", "--slow-port '0.1': it is given twice"),
        ("--worker-budget 0.1:0", "--worker-budget '0': it has to be microbatches, at least 1"),
        ("--worker-budget 0.1:x", "--worker-budget 'x': give --activation-bytes, what one"),
        ("--worker-budget 0.1:1GB", "--worker-budget '1GB': give --activation-bytes, what one"),
        (
            "--activation-bytes 2GB --worker-budget 0.1:1GB",
            "--worker-budget '1GB': it has to be at least 2GB, what one microbatch takes",
        ),
        ("--worker-budget 0.1:nan", "--worker-budget 'nan': it has to be microbatches, at"),
        ("--chunks 2", "--chunks 2: it is not planned across replicas yet"),
        ("--recompute", "--recompute True: it is not planned across replicas yet"),
        (
            "--link-delay-ms 5 --link-jitter 0.1",
            "--link-jitter 0.1: it is not planned across replicas yet",
        ),
        ("--time-limit x", "--time-limit 'x': it has to be a number of seconds above 0"),
    ],
)
def test_flags(here, words, line):
    assert here.refused("plan", *JOB, *words.split()).startswith(line)


@pytest.mark.parametrize("words", ["--failed 1.2", "--slow 0.1:2x", "--worker-budget 0.1:3"])
def test_one_replica_has_no_others(here, words):
    for count in ((), ("--replicas", 1), ("--replicas", 0), ("--replicas", "two")):
        line = here.refused("plan", *SHAPE, *words.split(), *count)
        value = {0: "0", 1: "1", "two": "'two'"}[count[1]] if count else "is missing"
        assert line.startswith(f"--replicas {value}: {AT_LEAST}")


def test_one_replica_alone(here):
    assert here.refused("plan", *SHAPE, "--replicas", 1).startswith(f"--replicas 1: {AT_LEAST}")
    line = here.refused("plan", *SHAPE, "--replicas", 10**9)
    assert line.startswith("--replicas 1000000000: replicas x stages x microbatches may be ")


@pytest.mark.parametrize("command", ["plan", "compare", "simulate", "draw"])
def test_every_command_that_takes_a_job_refuses_the_same(here, command):
    line = here.refused(command, *JOB, "--failed", "0.9")
    assert line.startswith("--failed '0.9': it has to be replica and stage")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"replicas": True}, f"replicas True: {AT_LEAST}"),
        ({"replicas": "3"}, f"replicas '3': {AT_LEAST}"),
        ({"failed": 1}, f"failed 1: {WORKER}"),
        ({"failed": [[1]]}, f"failed [1]: {WORKER}"),
        ({"failed": {"1.2": 3}}, "failed '1.2:3': it has to be of the form W, where"),
        ({"slow": {"0.1": [2]}}, "slow [2]: it has to be how many times as long"),
        ({"slow": {"0.1": None}}, "slow '0.1': it has to be of the form W:Nx"),
        ({"slow": {"0.1": True}}, "slow True: it has to be how many times as long"),
        ({"slow_path": {"1.1-0.2": 5}}, f"slow_path '1.1-0.2:5': {PATH}, with"),
        ({"slow_path": 7}, f"slow_path 7: {PATH}, with"),
        ({"slow_port": {"0.1": 5}}, "slow_port 5: it has to be a rate such as 10MB/s"),
        ({"worker_budget": {"0.1": True}}, "worker_budget True: it has to be microbatches"),
        ({"stages": 11, "failed": [0.1]}, "failed 0.1: it has to be a text in a file, '0.1'"),
    ],
)
def test_profiles(here, profile, change, line):
    job = {"stages": 3, "microbatches": 4, "forward_ms": 9, "backward_ms": 18, "replicas": 3}
    assert here.refused("plan", "--profile", profile({**job, **change})).startswith(line)


def test_a_rate_without_a_size_of_messages_is_noted(here):
    _, err = here("plan", *JOB, "--slow-port", "0.1:1MB/s")
    assert err == (
        "adaptra: --slow-port changes nothing without --message-bytes, the size of a message\n"
    )
    assert "--slow-path changes" in here("plan", *JOB, "--slow-path", "0.0-0.1:1MB/s")[1]


@pytest.mark.parametrize("command", ["plan", "compare"])
def test_a_plan_that_takes_minutes_is_refused_unless_asked_for(here, command):
    words = (*JOB, "--microbatches", 30_000)
    line = here.refused(command, *words)
    assert line.startswith("--time-limit is missing: more than 100000 replicas x stages x micro")


def test_nothing_is_sampled(here):
    line = here.refused("simulate", *JOB, "--samples", 5)
    assert line.startswith("--samples 5: there is nothing to sample, as no path of several")
