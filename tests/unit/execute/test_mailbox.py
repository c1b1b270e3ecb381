"""Mailbox and execute: any schedule that can run gives the gradients of no pipeline at all."""

import random
import re

import pytest
import torch
from agree.pipeline import (
    PATIENCE,
    SHAPE,
    Stage,
    depths,
    gradients,
    on_threads,
    reference,
    schedule,
)
from seeding import new_seed
from transport.loopback import LoopbackNetwork
from transport.ranks import until

from megatron_adaptra.base.errors import PeerLost, ScheduleError
from megatron_adaptra.execute.executor import execute
from megatron_adaptra.execute.mailbox import Mailbox
from megatron_adaptra.execute.watchdog import Watchdog
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.program import Neighbours, first_posts, lower, unused_posts
from megatron_adaptra.ir.routes import Routes
from megatron_adaptra.ir.schedule import parse_line
from megatron_adaptra.measure.iteration_record import merge
from megatron_adaptra.measure.probe import Probe

STAGES, COUNT = 3, 5


def train(network, programs):
    """Per stage the gradients after one iteration of each program, and the last records."""

    def body(stage):
        transport = network.open(stage)
        one = Stage(stage, STAGES, transport)
        records = [one.run(program) for program in programs]
        one.mailbox.close()
        transport.close()
        return [p.grad for p in one.layer.parameters()], records

    results = on_threads(STAGES, body)
    return [grads for grads, _ in results], [records for _, records in results]


@pytest.mark.parametrize("rendezvous", [True, False])
def test_every_schedule_gives_the_same_gradients(rendezvous):
    """Bit for bit, for all warmup depths; gradients are summed in the same order."""
    wanted = reference(STAGES, COUNT)
    network = LoopbackNetwork(rendezvous)
    for warmup in depths(STAGES, COUNT):
        got, _ = train(network, [lower(schedule(warmup, COUNT))])
        for stage in range(STAGES):
            assert all(map(torch.equal, got[stage], wanted[stage])), (warmup, stage)
    network.close()


def test_iterations_with_changing_schedules_and_delays():
    """Messages of two iterations do not mix, whatever the links do."""
    rng = random.Random(new_seed())
    ways = [(a, b) for a in range(STAGES) for b in range(STAGES) if abs(a - b) == 1]
    network = LoopbackNetwork(True, {way: rng.choice([0, 0.001, 0.003]) for way in ways})
    warmups = rng.sample(depths(STAGES, COUNT), 6)
    programs = [lower(schedule(w, COUNT), rng.choice([None, 0, 1, 2])) for w in warmups]
    got, records = train(network, programs)
    wanted = reference(STAGES, COUNT, len(programs))
    for stage in range(STAGES):
        assert all(map(torch.equal, got[stage], wanted[stage])), stage
    network.close()
    for i, warmup in enumerate(warmups):
        timeline = merge([own[i] for own in records], str(warmup))
        assert timeline.peak_in_flight() == warmup
        assert len(timeline.messages) == 2 * (STAGES - 1) * COUNT
        assert all(m.sent <= m.arrived for m in timeline.messages)


def test_records_show_the_slow_direction():
    network = LoopbackNetwork(False, {(0, 1): 2.0})
    _, records = train(network, [lower(schedule((5, 4, 1), COUNT))])
    network.close()
    reports = [r[0].report() for r in records]
    delay = {(s, one.worker): link.delay for one in reports for s, link in one.links.items()}
    assert delay.keys() == {(0, 1), (1, 0), (1, 2), (2, 1)}
    slow = delay.pop((0, 1))
    assert slow > 1.0  # it counts from the post where that is later
    assert max(delay.values()) < slow / 2


def test_kind_without_handler_is_refused():
    done = []
    with pytest.raises(ScheduleError, match="W0: this executor runs F"):
        execute(parse_line(["F0", "W0", "F1"]), {Kind.F: done.append})
    assert done == [Op(Kind.F, 0)]


def mailbox(transport, stage=1, timeout=0.05):
    watchdog = Watchdog(stage, [4, 5, 6])
    made = Mailbox(Neighbours(stage, Routes(3)), transport, Probe(stage), watchdog, timeout)
    made.begin(0, lambda: torch.empty(2))
    return made


def test_missing_message_names_stage_rank_op_and_peer():
    network = LoopbackNetwork()
    box = mailbox(network.open(1))
    for post, take, peer in (("PF3", "F3", "stage 0 (rank 4)"), ("PB2", "I2", "stage 2 (rank 6)")):
        box.post(Op.parse(post))
        with pytest.raises(PeerLost) as lost:
            box.take(Op.parse(take))
        words = re.escape(f"s for {take} from {peer}")
        waited = re.match(rf"stage 1 \(rank 5\) waited ([\d.]+) {words}", str(lost.value))
        assert waited, str(lost.value)
    network.close()


def test_send_that_is_never_received_names_its_target():
    """Sends are waited for one iteration late."""
    network = LoopbackNetwork(rendezvous=True)
    box = mailbox(network.open(1))
    box.send(Op.parse("SF3"), torch.ones(2))
    box.finish()
    box.begin(1, lambda: torch.empty(2))
    with pytest.raises(PeerLost, match=r"for SF3 to stage 2 \(rank 6\)"):
        box.finish()
    network.close()


def test_close_waits_for_the_last_sends():
    network = LoopbackNetwork(rendezvous=True, delay={(1, 2): 0.05})
    box = mailbox(network.open(1), timeout=PATIENCE)
    box.send(Op.parse("SF0"), torch.ones(2))
    other = mailbox(network.open(2), stage=2, timeout=PATIENCE)
    other.post(Op.parse("PF0"))
    box.finish()
    box.close()
    assert other.take(Op.parse("F0")).tolist() == [1.0, 1.0]
    network.close()


@pytest.mark.parametrize("rendezvous", [False, True])
def test_an_iteration_of_which_only_receives_were_posted_leaves_no_trace(rendezvous):
    """All stages post, each in its own time, clear their links and run something else."""
    rng = random.Random(new_seed())
    network = LoopbackNetwork(rendezvous, {(0, 1): 0.01, (2, 1): 0.01})
    programs = [lower(schedule(rng.choice(depths(STAGES, COUNT)), COUNT)) for _ in range(6)]
    dropped = [rng.random() < 0.7 for _ in programs]

    def body(rank):
        stage = Stage(rank, STAGES, network.open(rank))
        for program, drop in zip(programs, dropped, strict=True):
            stage.mailbox.begin(stage.iteration + 1, lambda: torch.full(SHAPE, float("nan")))
            for op in first_posts(program, rank):  # as a session does at an iteration's end
                stage.mailbox.post(op)
            if drop:
                stage.mailbox.discard(unused_posts(program, rank))
            record = stage.run(program)
            assert len(record.ops) == 2 * COUNT
        stage.mailbox.close()
        return gradients(stage.layer)

    got = on_threads(STAGES, body)
    wanted = reference(STAGES, COUNT, len(programs))
    for stage in range(STAGES):
        assert all(map(torch.equal, got[stage], wanted[stage])), stage
    network.close()


def test_no_two_messages_under_way_have_one_tag():
    """Of three iterations in a row, of many chunks and microbatches, both ways."""
    transport, watchdog = LoopbackNetwork().open(0), Watchdog(0, range(2))
    mailbox = Mailbox(Neighbours(0, Routes(2)), transport, Probe(0), watchdog, PATIENCE)
    tags = set()
    for iteration in (14, 15, 16):
        mailbox.begin(iteration, lambda: torch.empty(1))
        for chunk in (0, 1, 15, 16, 31, 32, 254):
            for microbatch in (0, 1, 2**18 - 1):
                for kind in (Kind.F, Kind.B):
                    tags.add(mailbox._tag(Op(kind, microbatch, chunk)))
    assert len(tags) == 3 * 7 * 3 * 2
    assert max(tags) < 2**31 - 1  # that one says that a side is gone
    for chunk, microbatch in ((255, 0), (0, 2**18)):
        with pytest.raises(ScheduleError, match="262144 microbatches and 255 chunks"):
            mailbox._tag(Op(Kind.F, microbatch, chunk))


def test_a_message_that_is_late_is_reported_and_taken(capfd):
    network = LoopbackNetwork()
    box = mailbox(network.open(1), timeout=PATIENCE)
    box.watchdog.late = 0.05
    other = mailbox(network.open(0), stage=0)
    box.post(Op.parse("PF3"))
    printed = []

    def body(stage):
        if stage:
            return box.take(Op.parse("F3")).tolist()
        until(
            lambda: printed.append(capfd.readouterr().err) or "F3" in printed[-1], "it is printed"
        )
        other.send(Op.parse("SF3"), torch.ones(2))
        other.finish()

    assert on_threads(2, body)[1] == [1.0, 1.0]
    (line,) = filter(None, "".join(printed).splitlines())
    words = r"s for F3 from stage 0 \(rank 4\); training goes on if it comes within"
    assert re.search(words, line), line
    network.close()
