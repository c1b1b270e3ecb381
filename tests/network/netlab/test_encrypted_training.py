"""A training whose ranks are hosts of their own: what crosses the network, encrypted or not."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from megatron_adaptra.demo import launch
from megatron_adaptra.demo.options import DemoOptions
from megatron_adaptra.netlab.lab import Lab
from megatron_adaptra.netlab.relay import Relay
from megatron_adaptra.transport.engine.handshake import VERSION, Kind

HELLO = re.compile(rb"adaptra\n" + re.escape(VERSION.to_bytes(2, "little")) + rb"(.)\0", re.DOTALL)
FRAME = re.compile(rb"\xa1\xad\x01[\0\1]...\0", re.DOTALL)  # the begin of a piece of a message


@pytest.mark.trains
@pytest.mark.cold
@pytest.mark.parametrize("encrypted", [True, False])
def test_trained_with_stocks_bits_and_read_only_if_it_may_be(
    encrypted: bool, shaper: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: list[Kind] = []
    seen = {"bytes": 0, "frames": 0}
    take = Relay._take

    def listen(relay: Relay, source: int, packet: bytes) -> None:
        kinds.extend(Kind(found[0]) for found in HELLO.findall(packet))
        seen["bytes"] += len(packet)
        seen["frames"] += len(FRAME.findall(packet))
        take(relay, source, packet)

    monkeypatch.setattr(Relay, "_take", listen)
    monkeypatch.setattr(launch, "Lab", functools.partial(Lab, shaper=shaper))
    config = tmp_path / "config.yaml"
    config.write_text(f"transport: engine\nencrypt: {str(encrypted).lower()}\n")
    options = DemoOptions(
        stages=2, microbatches=4, hidden_size=32, seq_length=32, iterations=9,
        slow=["0-1:5ms"], netlab=True, config=str(config), out=str(tmp_path / "out"),
    )  # fmt: skip
    done = launch.launch(options, launch.prepare(options), lambda _: None)
    assert done["losses_identical"]
    assert done["parameters_identical"]
    print(f"{kinds} connections, {seen}")
    assert set(kinds) == {Kind.TLS if encrypted else Kind.TCP}
    assert (seen["frames"] == 0) == encrypted
    assert seen["bytes"] > 1 << 20
