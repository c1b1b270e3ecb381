"""What a plan of several replicas does, in a sentence."""

from __future__ import annotations

from megatron_adaptra.cli.replicas.figures import between_replicas
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.plan.routes.words import Load, loads, loads_in_words

STAGES, COUNT = 3, 4


def schedule(moved: dict[tuple[int, int, int], int], replicas: int = 3) -> Schedule:
    """All forwards, at home but for those `moved`: stage, home and microbatch to replica."""
    order: list[list[Op]] = [[] for _ in range(replicas * STAGES)]
    for home in range(replicas):
        for stage in range(STAGES):
            for microbatch in range(COUNT):
                replica = moved.get((stage, home, microbatch), home)
                order[replica * STAGES + stage].append(Op(Kind.F, microbatch, 0, home))
    return Schedule(tuple(map(tuple, order)), COUNT, replicas=replicas)


def at(
    stages: range, home: int, microbatches: range, replica: int
) -> dict[tuple[int, int, int], int]:
    return {(stage, home, m): replica for stage in stages for m in microbatches}


ONE, ALL, EVERY = range(1, 2), range(STAGES), range(COUNT)


def test_nothing_moves() -> None:
    assert loads_in_words(schedule({})) == ""
    assert between_replicas(schedule({})) == 0


def test_some_of_a_workers_microbatches() -> None:
    made = schedule({**at(ONE, 0, range(1), 1), **at(ONE, 0, range(2, 4), 2)})
    assert loads(made) == [Load(0, 1, 1, 1, (0,)), Load(0, 2, 1, 1, (2, 3))]
    assert loads_in_words(made) == (
        "of the 4 microbatches of worker 0.1, 3 run elsewhere, 1 on worker 1.1, 2 on 2.1"
    )
    assert between_replicas(made) == 3 * 2 * 2  # to stage 1 and from there, and back


def test_all_of_them() -> None:
    made = schedule(at(ONE, 0, EVERY, 2))
    assert loads_in_words(made) == "all 4 microbatches of worker 0.1 run on worker 2.1"


def test_whole_microbatches() -> None:
    made = schedule(at(ALL, 1, range(2), 0))
    assert loads_in_words(made) == "of the 4 microbatches of replica 1, 2 run on replica 0"
    assert between_replicas(made) == 0


def test_replicas_that_exchange_partners() -> None:
    made = schedule({**at(range(1, 3), 0, EVERY, 1), **at(range(1, 3), 1, EVERY, 0)})
    assert loads_in_words(made) == (
        "stages 1 to 2 of replica 0 and stages 1 to 2 of replica 1 run each other's microbatches"
    )
    assert between_replicas(made) == 2 * COUNT * 2


def test_many_peers_are_counted() -> None:
    moved = {(2, 0, i): 1 + i for i in range(COUNT)} | {(0, 5, i): i for i in range(COUNT)}
    made = schedule({**moved, (2, 1, 0): 5}, 6)
    assert loads_in_words(made) == (
        "all 4 microbatches of worker 0.2 run elsewhere, 1 on worker 1.2, 1 on 2.2, 1 on 3.2, "
        "1 on 4.2; all 4 microbatches of worker 5.0 run elsewhere, 1 on worker 0.0, 1 on 1.0, "
        "1 on 2.0, 1 on 3.0; of the 4 microbatches of worker 1.2, 1 runs on worker 5.2"
    )


def test_a_sentence_is_of_a_readable_length() -> None:
    moved = {(s, h, s): (h + 1) % 9 for s in range(STAGES) for h in range(9)}
    words = loads_in_words(schedule(moved, 9))
    assert words.count(";") == 6
    assert words.endswith("; and 21 more such moves")


def test_stages_at_which_others_move_are_a_load_of_their_own() -> None:
    made = schedule({**at(range(1), 0, range(2), 1), **at(ONE, 0, range(2, 4), 1)})
    assert loads(made) == [Load(0, 1, 0, 0, (0, 1)), Load(0, 1, 1, 1, (2, 3))]
