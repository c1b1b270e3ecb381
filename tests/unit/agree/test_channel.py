"""Messages between leader and stages: any size, in order, both ways at once."""

import random
import threading

import pytest
from patience import PATIENCE
from transport.loopback import LoopbackNetwork
from transport.ranks import KINDS, run, until

from megatron_adaptra.agree.channel import _ROOM, Channel

ROOM = _ROOM - len('{"text": ""}')  # of a text that fits into one frame


def texts(seed):
    rng = random.Random(seed)
    sizes = [0, 1, ROOM - 1, ROOM, ROOM + 1, 2 * ROOM, 100_000]
    sizes += [rng.choice([3, 500, 5000, 20_000]) for _ in range(60)]
    rng.shuffle(sizes)
    return [chr(97 + i % 26) * size for i, size in enumerate(sizes)]


def exchange(me, seed):
    """Both sides send everything from one thread while another receives."""
    channel = Channel(me.transport, 1 - me.rank)
    got, sent = [], threading.Event()

    def receives():
        while len(got) < len(texts(seed)) or not sent.is_set():
            if (message := channel.receive(0.01)) is not None and "text" in message:
                got.append(message["text"])

    receiver = threading.Thread(target=receives)
    receiver.start()
    for text in texts(seed + me.rank):
        until(lambda t=text: channel.send({"text": t}), "the other side takes what was sent")
    sent.set()
    receiver.join(PATIENCE)
    me.meet()
    return got == texts(seed + 1 - me.rank)


@pytest.mark.parametrize("kind", KINDS)
def test_messages_keep_order_and_size(kind):
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    assert run(kind, exchange, seed) == [True, True]


def test_senders_on_several_threads_do_not_mix():
    network = LoopbackNetwork()
    channel = Channel(network.open(0), 1)
    words = ["x" * size for size in (10, ROOM + 10, 3 * ROOM)]

    def sends(word):
        for _ in range(20):
            assert channel.send({"text": word})

    threads = [threading.Thread(target=sends, args=(word,)) for word in words]
    for thread in threads:
        thread.start()
    other = Channel(network.open(1), 0)
    got = [other.receive(PATIENCE)["text"] for _ in range(60)]
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(got) == sorted(words * 20)
    network.close()


def test_a_message_that_does_not_come_in_time_can_be_asked_for_again():
    network = LoopbackNetwork()
    channel = Channel(network.open(0), 1)
    assert channel.receive(0.05) is None
    assert channel.receive(0.0) is None
    Channel(network.open(1), 0).send({"text": "x" * 2 * ROOM})
    assert channel.receive(PATIENCE) == {"text": "x" * 2 * ROOM}
    network.close()


def test_text_beyond_ascii():
    network = LoopbackNetwork()
    Channel(network.open(0), 1).send({"why": "Verzögerung → 40 ms"})
    assert Channel(network.open(1), 0).receive(PATIENCE) == {"why": "Verzögerung → 40 ms"}
    network.close()
