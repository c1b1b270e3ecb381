"""The emulated slow link by itself: its grammar, and what it does to messages."""

import threading
import time

import pytest
from patience import PATIENCE, longer_and_longer
from seeding import new_seed
from transport.ranks import threads, until

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.emulate.links import LinkEmulator
from megatron_adaptra.emulate.rules import LinkRule, parse_link, parse_rules
from megatron_adaptra.emulate.scenario import load_rules

SCENARIO = "configs/scenarios/slow_link.yaml"


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("2-3:40ms", [LinkRule(2, 3, 0.04), LinkRule(3, 2, 0.04)]),
        ("2>3:40ms", [LinkRule(2, 3, 0.04)]),
        ("3>2:1.5s@10..", [LinkRule(3, 2, 1.5, 10)]),
        (" 0>1:5ms@3..5 ", [LinkRule(0, 1, 0.005, 3, 5)]),
        (
            "0>1:0ms,jitter=4ms,bandwidth=10MB/s@0..1",
            [LinkRule(0, 1, 0.0, 0, 1, jitter=0.004, bandwidth=1e7)],
        ),
    ],
)
def test_rules_parse(text, rules):
    assert parse_rules(text, stages=4) == rules


@pytest.mark.parametrize(
    ("text", "value", "allowed"),
    [
        ("", "", "a rule such as"),
        ("2-3", "2-3", "a rule such as"),
        ("2-3:40ms@x..", "2-3:40ms@x..", "a rule such as"),
        ("2-3:40", "40", "a duration such as"),
        ("2-3:40ms,jitter=fast", "fast", "a duration such as"),
        ("2-3:40ms,bandwidth=10ms", "10ms", "a rate such as"),
        ("2-3:40ms,bandwidth=0MB/s", "0MB/s", "a rate above 0, of at least 1B/s"),
        ("2-3:40ms,delay=4ms", "2-3:40ms,delay=4ms", "'delay' is unknown; a rule such as"),
        ("2-3:40ms@9..9", "2-3:40ms@9..9", "it ends before it begins"),
        ("2-4:40ms", "2-4", "the links 0-1, 1-2, 2-3"),
        ("1>1:40ms", "1>1", "no such link"),
    ],
)
def test_bad_rule_is_refused(text, value, allowed):
    with pytest.raises(BadInput) as bad:
        parse_rules(text, 4, "--a-flag")
    assert str(bad.value).startswith("--a-flag")
    assert bad.value.value == value
    assert allowed in str(bad.value)


def test_links_parse():
    assert parse_link("2-3", 4) == [(2, 3), (3, 2)]
    assert parse_link("3>2", 4) == [(3, 2)]
    for bad in ("2", "2=3", "a-b", "2-3-4", "0-1"):
        with pytest.raises(BadInput, match="slow_link"):
            parse_link(bad, 1, "slow_link")


def scenario(tmp_path, text):
    path = tmp_path / "scenario.yaml"
    path.write_text(text)
    return load_rules([str(path)], stages=4)


def test_shipped_scenario_parses(request):
    path = str(request.config.rootpath / SCENARIO)
    assert load_rules([path], stages=4) == [
        LinkRule(2, 3, 0.04, 10, 30),
        LinkRule(3, 2, 0.04, 10, 30),
        LinkRule(0, 1, 0.02, 20, jitter=0.002, bandwidth=1e8),
    ]


def test_rules_and_scenarios_mix(tmp_path):
    path = tmp_path / "one.yml"
    path.write_text("links: [{link: 0>1, delay: 1ms, to: null, jitter: null}]")
    rules = load_rules(["2>3:40ms@10..", str(path)], stages=4)
    assert rules == [LinkRule(2, 3, 0.04, 10), LinkRule(0, 1, 0.001)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("link: 3", "did you mean 'links'?"),
        ("links: [{link: 2-3, dealy: 4ms}]", "did you mean 'delay'?"),
        ("links: [{link: 2-3, delay: 4ms, zzz: 1}]", "known are link, delay, from"),
        ("links: [{link: 2-3}]", "each has to have a link and a delay"),
        ("links: []", "a list of at least one"),
        ("links: {link: 2-3, delay: 4ms}", "a list"),
        ("links: [{link: 2-3, delay: 40}]", "a duration such as 40ms"),
        ("links: [{link: 2-3, delay: 4ms, from: later}]", "a rule such as"),
        ("[", "it is not YAML"),
        ("- 1", "it has to hold keys and values"),
    ],
)
def test_bad_scenario_is_refused(tmp_path, text, words):
    with pytest.raises(BadInput) as bad:
        scenario(tmp_path, text)
    assert words in str(bad.value)
    assert "scenario.yaml" in str(bad.value)


def test_missing_scenario_is_refused():
    with pytest.raises(BadInput, match="it cannot be read: No such file"):
        load_rules(["nowhere.yaml"], stages=4)


class Sink:
    """Where held messages arrive: in what order and when."""

    def __init__(self, *rules, stage=0, seed=0):
        self.emulator = LinkEmulator(stage, rules, seed)
        self.arrived: list[tuple[int, float]] = []
        self._all = threading.Condition()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.emulator.close()

    def send(self, number, target=1, nbytes=0):
        self.emulator.hold(target, nbytes, lambda: self._arrive(number))

    def _arrive(self, number):
        with self._all:
            self.arrived.append((number, time.monotonic()))
            self._all.notify_all()

    def wait(self, count):
        with self._all:
            assert self._all.wait_for(lambda: len(self.arrived) >= count, PATIENCE)

    @property
    def order(self):
        return [number for number, _ in self.arrived]


def test_sender_is_not_held_and_the_message_is():
    with Sink(LinkRule(0, 1, 60.0)) as sink:
        sink.send(1)
        assert sink.arrived == []
    with Sink(LinkRule(0, 1, 0.04)) as sink:
        began = time.monotonic()
        sink.send(1)
        sink.wait(1)
        assert sink.arrived[0][1] - began >= 0.04


def test_only_the_named_direction_is_slow():
    rule = LinkRule(0, 1, 60.0)
    with Sink(rule) as forth, Sink(rule, stage=1) as back:
        assert forth.emulator.holds(1)
        assert not forth.emulator.holds(2)
        assert not back.emulator.holds(0)
        back.send(1, target=0)
        forth.send(2, target=2)
        forth.send(3, target=1)
        assert back.order == [1]
        assert forth.order == [2]


def test_window_begins_at_from_and_ends_before_to():
    with Sink(LinkRule(0, 1, 60.0, first=2, end=4)) as sink:
        held = []
        for iteration in range(6):
            sink.emulator.iteration = iteration
            held.append(sink.emulator.holds(1))
        assert held == [False, False, True, True, False, False]


def test_two_windows_take_turns():
    with Sink(LinkRule(0, 1, 60.0, 0, 1), LinkRule(0, 1, 0.01, 2)) as sink:
        sink.emulator.iteration = 2
        sink.send(1)
        sink.wait(1)


def test_jitter_keeps_order():
    count = 200
    with Sink(LinkRule(0, 1, 0.02, jitter=0.02), seed=new_seed()) as sink:
        for number in range(count):
            sink.send(number)
        sink.wait(count)
        assert sink.order == list(range(count))


def test_bandwidth_puts_messages_one_behind_the_other():
    count, nbytes, rate = 8, 10_000, 1e6
    with Sink(LinkRule(0, 1, 0.0, bandwidth=rate)) as sink:
        began = time.monotonic()
        for number in range(count):
            sink.send(number, nbytes=nbytes)
        sink.wait(count)
        for i, (_, at) in enumerate(sink.arrived):
            assert at - began >= (i + 1) * nbytes / rate
        assert sink.order == list(range(count))


def test_delay_is_not_paid_twice_by_a_train_of_messages():
    """Messages sent at once are on their way together."""
    count, delay = 100, 0.1
    with Sink(LinkRule(0, 1, delay)) as sink:
        began = time.monotonic()
        for number in range(count):
            sink.send(number)
        sink.wait(count)
        assert sink.arrived[-1][1] - began < count * delay / 2


def test_message_after_the_window_waits_for_those_before_it():
    """A link that recovers does not let a message overtake one that is still held."""
    for delay in longer_and_longer(0.05):
        with Sink(LinkRule(0, 1, delay, end=1)) as sink:
            sink.send(1)
            sink.emulator.iteration = 1
            held = sink.emulator.holds(1)
            sink.send(2)
            held &= sink.order == []
            sink.wait(2)
            assert sink.order == [1, 2]
            until(lambda one=sink: not one.emulator.holds(1), "the link is free again")
            sink.send(3)
            assert sink.order == [1, 2, 3]
        if held:
            return
    raise AssertionError("the first one was never held")


def test_message_that_is_due_but_not_delivered_is_not_overtaken():
    """Its delivery may be under way, or the thread that does it may be late."""
    begun, go_on = threading.Event(), threading.Event()
    order = []

    def slow():
        begun.set()
        go_on.wait(PATIENCE)
        order.append(1)

    emulator = LinkEmulator(0, [LinkRule(0, 1, 0.001, end=1)])
    emulator.hold(1, 0, slow)
    assert begun.wait(PATIENCE)
    emulator.iteration = 1
    assert emulator.holds(1)
    done = threading.Event()
    emulator.hold(1, 0, lambda: (order.append(2), done.set()))
    go_on.set()
    assert done.wait(PATIENCE)
    assert order == [1, 2]
    emulator.close()


def test_close_drops_what_is_held_and_ends_the_thread():
    sink = Sink(LinkRule(0, 1, 60.0))
    sink.send(1)
    assert threads() == ["adaptra-delay-line"]
    sink.emulator.close()
    sink.emulator.close()
    assert threads() == []
    sink.send(2)
    assert sink.order == []
