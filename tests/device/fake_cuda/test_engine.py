"""The engine over the fake driver: marks and messages beside captures."""

from __future__ import annotations

import pytest
from fake_runs import run_script

from megatron_adaptra.transport.engine import bindings

pytestmark = pytest.mark.skipif(bool(bindings.missing()), reason=bindings.missing())
MODES = range(3)  # global, thread-local, relaxed


def test_a_mark_is_read_beside_a_capture_and_leaves_the_threads_mode() -> None:
    """Whatever reading it comes to: the mode comes back, and the capture goes on."""
    (found,) = run_script("engine_script.py", "captured", kernel_us=20e6)
    words = {"passed": "read", "not yet": "not yet", "closed": "a call failed: this side has"}
    assert len(found) == len(words) * len(MODES) * 2
    for key, (word, restored, end) in found.items():
        assert word.startswith(words[key.partition(",")[0]]), (key, word)
        assert restored, key
        assert end == 0, f"{key}: reading the mark ended the capture with error {end}"


def test_a_message_is_sent_beside_a_capture() -> None:
    assert run_script("engine_script.py", "sent") == [{"pinned": 1 << 20, "end": 0}]
