"""Nonsense on a control connection: threads survive, only the package's errors come out."""

from __future__ import annotations

import contextlib
import json
import random
from typing import Any

import pytest
import torch
from agree.leading import drive, warmups
from agree.pipeline import schedule
from hypothesis import given
from hypothesis import strategies as st
from measure.records import report
from seeding import new_seed
from transport.loopback import LoopbackNetwork

from megatron_adaptra.agree.agreement import Proposal, pack, unpack
from megatron_adaptra.agree.bundle import digest_of, scheduled
from megatron_adaptra.agree.channel import _FRAME, _HEAD, LONGEST, Channel
from megatron_adaptra.agree.controller import checked
from megatron_adaptra.base.errors import BadBundle, BadMessage, PeerLost, ScheduleError
from megatron_adaptra.measure.reduction_report import ReductionReport
from megatron_adaptra.measure.report import Collective, LinkSample, Memory, Step, StockOp

BUNDLE = scheduled(schedule((4, 1), 4))
REPORT = report(
    0, wall={"F": 0.1}, links={1: LinkSample(0.1, probed=0.1)}, seconds=0.2,
    ops=(StockOp("F0", 1.0, 2.0, 0.5, 0.0),), memory=Memory(1.0, 100),
    step=Step(0.1, (Collective("all_reduce", 0.1, -1.0, 0.1, (0, 1), False),)),
)  # fmt: skip
REDUCTION = ReductionReport(1, 5, 8, {0: 0.5}, {0: 2e7}, 0.5, 1.0)
MESSAGES: list[dict[str, Any]] = [
    {"kind": "alive", "run": -1},
    {"kind": "ack", "number": 0, "digest": "", "run": 0},
    {"kind": "decision", "number": 0, "commit": True, "run": 0},
    {"kind": "status", "status": {"delays": {"0>1": 0.1}, "iteration": 1, "replans": 0}, "run": 0},
    {**pack(Proposal(0, 2, BUNDLE, "k")), "run": 0},
    {"kind": "report", "run": 0, "report": json.loads(json.dumps(REPORT.to_json()))},
    {"kind": "reduction", "run": 0, "report": json.loads(json.dumps(REDUCTION.to_json()))},
]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


def changed(rng: random.Random) -> dict[str, Any]:
    """A real message with some field left out, of another value, or of another name."""
    junk = [None, True, -1, 10**30, 1e308, float("nan"), "x", [], {}, [[]], {"F": "x"}]
    message = dict(rng.choice(MESSAGES))
    for _ in range(rng.choice([1, 1, 2])):
        name = rng.choice([*message])
        value = message.pop(name)
        if (what := rng.choice(["drop", "set", "set", "rename"])) != "drop":
            renamed = what == "rename"
            message[name + "x" * renamed] = value if renamed else rng.choice(junk)
    return message


def test_real_messages_pass() -> None:
    for message in MESSAGES:
        got = checked(json.loads(json.dumps(message)))
        reports = {"report": REPORT, "reduction": REDUCTION}
        known = {"report": reports[message["kind"]]} if "report" in message else {}
        assert got == {**message, **known}


@given(st.dictionaries(st.text(max_size=8), VALUES, max_size=4) | st.randoms().map(changed))
def test_a_message_is_understood_or_refused(message: dict[str, Any]) -> None:
    with contextlib.suppress(BadMessage, BadBundle, ScheduleError):
        if checked(message)["kind"] == "propose":
            unpack(message, BUNDLE)


@given(VALUES | st.recursive(SCALARS, lambda inner: st.fixed_dictionaries({"order": inner})))
def test_a_plan_is_a_plan_or_refused(plan: Any) -> None:
    text = json.dumps({"schedule": plan})
    message = {"number": 0, "swap": 2, "bundle": text, "digest": digest_of(text), "key": "k"}
    with pytest.raises((BadBundle, ScheduleError)):
        unpack(message, BUNDLE)


def frames(seed: int) -> list[bytes]:
    """Random ones, and real ones of which some bytes are others."""
    rng = random.Random(seed)
    out = []
    for message in rng.choices(MESSAGES, k=20):
        data = json.dumps(message).encode()
        frame = bytearray(_HEAD.pack(len(data), 0) + data + bytes(_FRAME))[:_FRAME]
        for _ in range(rng.choice([0, 1, 1, 5])):
            frame[rng.choice([rng.randrange(12), rng.randrange(300)])] = rng.randrange(256)
        out.append(bytes(frame))
    return out


@pytest.mark.parametrize("seed", range(4))
def test_a_frame_gives_a_message_or_an_error_of_ours(seed: int) -> None:
    network = LoopbackNetwork()
    channel, other = Channel(network.open(0), 1), network.open(1)
    sent = frames(seed)
    works = [
        other.isend(torch.frombuffer(bytearray(frame), dtype=torch.uint8), 0, tag)
        for tag, frame in enumerate(sent)
    ]
    assert len(works) == len(sent)
    for _ in range(len(sent) + 1):
        try:
            message = channel.receive(0.05)
        except BadMessage:
            continue
        except PeerLost:
            assert channel.lost
            break
        assert message is None or isinstance(message, dict)
    assert len(channel._data) <= LONGEST
    network.close()


def test_a_connection_full_of_nonsense_does_not_stop_replans(
    tmp_path: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """Between any two messages of stage 1 there is one that makes no sense."""
    rng = random.Random(new_seed())

    class Babbles(Channel):
        def send(self, message: dict[str, Any]) -> bool:
            if message["kind"] != "bye":
                super().send(babble(rng))
            return super().send(message)

    run = drive(
        tmp_path / "d", lambda i: {(1, 2): 0.05, (2, 1): 0.05} if i >= 6 else {}, 24, paced=True,
        channels={1: Babbles},
    )  # fmt: skip
    for ran in run.ran:
        assert ran == run.ran[0]
    assert len(warmups(run.ran[0])) == 2
    assert run.leader.refused > 0
    printed = capfd.readouterr().err
    assert printed.count("a message of member 1 is ignored") == 1


def babble(rng: random.Random) -> dict[str, Any]:
    message = changed(rng)
    if message.get("kind") in ("ack", "report", "decision"):  # a vote of its own it may not have
        message["kind"] = rng.choice([None, "vote", 7, ["ack"]])
    return message
