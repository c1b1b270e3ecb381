"""What every transport promises, on loopback (threads) and on gloo (processes)."""

import random
import time

import pytest
import torch
from patience import PATIENCE, longer_and_longer
from seeding import new_seed
from transport.loopback import LoopbackNetwork
from transport.ranks import KINDS, PROCESSES, full, run

from megatron_adaptra.base.errors import PeerLost
from megatron_adaptra.transport.wire import GlooWire

every_kind = pytest.mark.parametrize("kind", KINDS)
LATE = 0.5  # seconds


def out_of_order(rank_fixture):
    """Sent as 0 to 4; posted and awaited in another order."""
    order = [3, 0, 4, 1, 2]
    if rank_fixture.rank == 0:
        works = [rank_fixture.transport.isend(full(tag), 1, tag) for tag in range(5)]
        for work in works:
            work.wait(PATIENCE)
        return None
    buffers = {tag: full(-1) for tag in order}
    works = [rank_fixture.transport.irecv(buffers[tag], 0, tag) for tag in order]
    for work in reversed(works):
        work.wait(PATIENCE)
    return {tag: buffer.unique().tolist() for tag, buffer in buffers.items()}


@every_kind
def test_tags_match_messages(kind):
    assert run(kind, out_of_order)[1] == {tag: [float(tag)] for tag in range(5)}


def tensors(seed):
    rng = torch.Generator().manual_seed(seed)
    shapes = [(), (0,), (1,), (3,), (7, 5), (1000,), (2, 3, 4), (65_537,)]
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.int64):
        for shape in shapes:
            yield torch.randint(0, 256, shape, generator=rng).to(dtype)
    square = torch.randn((6, 6), generator=rng)
    yield from (square.t(), square[:, ::2], square[1:4, 2], square[:1].expand(5, 6))


def all_sorts(rank_fixture, seed):
    wanted = list(tensors(seed))
    if rank_fixture.rank == 0:
        works = [rank_fixture.transport.isend(t, 1, tag) for tag, t in enumerate(wanted)]
        for work in works:
            work.wait(PATIENCE)
        return True
    got = [torch.zeros(t.shape, dtype=t.dtype) for t in wanted]
    works = [rank_fixture.transport.irecv(buffer, 0, tag) for tag, buffer in enumerate(got)]
    for work in works:
        work.wait(PATIENCE)
    return all(map(torch.equal, got, wanted))


@every_kind
def test_bytes_are_equal(kind):
    assert run(kind, all_sorts, 5) == [True, True]


def strided_receive(rank_fixture):
    with pytest.raises(ValueError, match="contiguous"):
        rank_fixture.transport.irecv(torch.zeros(4, 4).t(), 1 - rank_fixture.rank, 1)


@every_kind
def test_strided_receive_is_refused(kind):
    run(kind, strided_receive)


def reused_buffer(rank_fixture):
    """The receiver posts only after the sender has overwritten everything."""
    count, size = 6, 50_000
    if rank_fixture.rank == 0:
        buffer, works = full(0, size), []
        for tag in range(count):
            buffer.fill_(tag)
            works.append(rank_fixture.transport.isend(buffer, 1, tag))
        buffer.fill_(-1)
        rank_fixture.meet()
        for work in works:
            work.wait(PATIENCE)
        return None
    rank_fixture.meet()
    got = [full(-2, size) for _ in range(count)]
    works = [rank_fixture.transport.irecv(buffer, 0, tag) for tag, buffer in enumerate(got)]
    for work in works:
        work.wait(PATIENCE)
    return [buffer.unique().tolist() for buffer in got]


@every_kind
def test_sent_buffer_may_be_overwritten(kind):
    assert run(kind, reused_buffer)[1] == [[float(tag)] for tag in range(6)]


def chatter(rank_fixture, seed, ranks):
    """Messages between all pairs: random sizes, contents known from link and tag."""
    rng = random.Random(seed)
    jobs = [
        (source, target, tag, rng.choice([1, 9, 4096, 30_000]))
        for source in range(ranks)
        for target in range(ranks)
        for tag in rng.sample(range(10**6), 20)
        if source != target
    ]
    own = random.Random(seed + rank_fixture.rank)
    receives = [job for job in jobs if job[1] == rank_fixture.rank]
    buffers = {job: full(-1, job[3]) for job in receives}
    works = []
    mine = [("send", job) for job in jobs if job[0] == rank_fixture.rank]
    mine += [("receive", job) for job in receives]
    own.shuffle(mine)
    for what, job in mine:
        source, target, tag, size = job
        if what == "send":
            works.append(rank_fixture.transport.isend(full(tag + source, size), target, tag))
        else:
            works.append(rank_fixture.transport.irecv(buffers[job], source, tag))
    for work in works:
        work.wait(PATIENCE)
    return [job for job, b in buffers.items() if b.unique().tolist() != [float(job[2] + job[0])]]


@every_kind
def test_random_messages_among_three(kind):
    assert run(kind, chatter, new_seed(), 3, ranks=3) == [[], [], []]


def stamps_of(rank_fixture, late, seconds, count=5):
    """The receiver's stamps when one side is late by so many seconds."""
    if rank_fixture.rank == 0:
        rank_fixture.meet()
        if late == "sender":
            time.sleep(seconds)
        works = [rank_fixture.transport.isend(full(1), 1, tag) for tag in range(count)]
        if late != "sender":
            rank_fixture.meet()
        for work in works:
            stamps = work.wait(PATIENCE)
            assert 0 < stamps.sent <= stamps.completed
        return None
    posted = []
    if late == "sender":
        posted = [rank_fixture.transport.irecv(full(0), 0, tag) for tag in range(count)]
    rank_fixture.meet()
    if late != "sender":
        rank_fixture.meet()
        time.sleep(seconds)
        posted = [rank_fixture.transport.irecv(full(0), 0, tag) for tag in range(count)]
    return [work.wait(PATIENCE) for work in posted]


@every_kind
@pytest.mark.parametrize("late", ["sender", "receiver"])
def test_delay_is_the_links_alone(kind, late):
    """Neither the sender's lateness nor the receiver's counts as the link's."""
    for seconds in longer_and_longer(LATE):
        stamps = run(kind, stamps_of, late, seconds)[1]
        for s in stamps:
            assert 0 < s.sent <= s.completed
            assert s.posted > 0
            assert s.eager or s.posted <= s.completed
            assert s.wanted > 0
            assert (s.sent - s.posted if late == "sender" else s.posted - s.sent) >= seconds
        delay = max(s.delay for s in stamps)
        exposed = max(max(0.0, s.completed - s.wanted) for s in stamps)
        least = min(s.delay for s in stamps)
        assert least >= 0
        # Both leave the barrier, but not in the same moment.
        waited = exposed > seconds / 2 if late == "sender" else exposed < seconds
        if least < seconds / 2 and waited:
            return
    raise AssertionError(f"{seconds} s late: delays of {least} to {delay} s, {exposed} s exposed")


@pytest.mark.parametrize("rendezvous", [False, True])
def test_loopback_delays_one_way_or_a_round_trip(rendezvous):
    """With rendezvous the word that a receive is posted has to travel back first."""
    network = LoopbackNetwork(rendezvous, delay={(0, 1): 0.04, (1, 0): 0.03})
    a, b = network.open(0), network.open(1)
    a.isend(full(1), 1, 7)
    stamps = b.irecv(full(0), 0, 7).wait(PATIENCE)
    assert stamps.completed - stamps.sent >= 0.04
    assert stamps.delay >= (0.07 if rendezvous else 0.0)
    network.close()


def several_names(rank_fixture):
    names = ("pipeline", "control", "third")
    transports = {name: rank_fixture.open(name) for name in names}
    peer = 1 - rank_fixture.rank
    sent = [one.isend(full(i), peer, 1) for i, one in enumerate(transports.values())]
    buffers = {name: full(-1) for name in reversed(names)}
    works = [transports[name].irecv(buffer, peer, 1) for name, buffer in buffers.items()]
    for work in works + sent:
        work.wait(PATIENCE)
    return [buffers[name].unique().tolist() for name in names]


@every_kind
def test_transports_of_different_names_do_not_mix(kind):
    assert run(kind, several_names) == [[[0.0], [1.0], [2.0]]] * 2


def wrong_room(rank_fixture):
    if rank_fixture.rank == 0:
        sent = rank_fixture.transport.isend(full(1, 8), 1, 1)
        rank_fixture.meet()
        return sent.done()
    work = rank_fixture.transport.irecv(full(0, 9), 0, 1)
    with pytest.raises(PeerLost, match="bytes"):
        work.wait(PATIENCE)
    rank_fixture.meet()


@every_kind
def test_message_of_another_size_is_refused(kind):
    """Only too much room: gloo ends the process when there is too little."""
    run(kind, wrong_room)


def emulated(rank_fixture):
    """Both ways over one slow direction; what the sender sees, what the receiver does."""
    peer = 1 - rank_fixture.rank
    buffers = [full(-1) for _ in range(3)]
    receives = [
        rank_fixture.transport.irecv(buffer, peer, tag) for tag, buffer in enumerate(buffers)
    ]
    rank_fixture.meet()
    buffer, sends = full(0), []
    for tag in range(3):
        buffer.fill_(tag)
        sends.append(rank_fixture.transport.isend(buffer, peer, tag))
    held = [not work.done() for work in sends]
    stamps = [work.wait(PATIENCE) for work in receives]
    for work in sends:
        work.wait(PATIENCE)
    return held, [s.delay for s in stamps], [b.unique().tolist() for b in buffers]


@pytest.mark.parametrize("kind", PROCESSES)
def test_emulated_link_delays_one_way_and_holds_no_sender(kind):
    for delay in longer_and_longer(0.15):
        rules = [f"0>1:{1000 * delay:.0f}ms"]
        (held0, delays0, got0), (held1, delays1, got1) = run(kind, emulated, rules=rules)
        assert held1 == [False] * 3
        assert min(delays1) >= delay
        assert got0 == got1 == [[0.0], [1.0], [2.0]]
        if held0 == [True] * 3 and min(delays0) < delay:
            return
    raise AssertionError(f"senders were not held: {held0}; the other way took {delays0}")


def test_gloo_refuses_messages_of_a_gpu():
    with pytest.raises(ValueError, match="messages of cuda:0 need our engine"):
        GlooWire().transport("pipeline", [0, 1], [(0, 1)], device=torch.device("cuda", 0))
