"""Words on what a run has gained: faster, slower, or no different within noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from megatron_adaptra.view.summary import Times

NOT_YET, ADAPTED = "not adapted yet", "adapted"
FINDING = 22  # iterations at most until a plan is in force, as docs/evidence/routes.md measured

Sign = Literal["faster", "slower", "alike"]


def ratio(times: Times) -> float:
    """Return how many times as fast as stock Megatron Adaptra ran."""
    return times["stock_ms"] / times["adaptra_ms"]


def sign(times: Times) -> Sign:
    """Return how Adaptra compares with stock Megatron, by more than chance explains."""
    if abs(ratio(times) - 1) <= times["noise"]:
        return "alike"
    return "faster" if ratio(times) > 1 else "slower"


def in_words(times: Times) -> str:
    """Describe what was gained, to begin a sentence."""
    found = sign(times)
    if found == "faster":
        return f"{ratio(times):.2f}× as fast"
    if found == "slower":
        return f"{100 * (1 / ratio(times) - 1):.0f} % slower"
    return "No difference beyond noise"


def factor(times: Times, unit: str) -> str:
    """Return the ratio for a table, with a word where it is no gain; `unit`: after the number."""
    words = {"faster": "", "slower": " (slower)", "alike": " (noise)"}
    return f"{ratio(times):.2f}{unit}{words[sign(times)]}"


def length(times: Times, how: str = "") -> str:
    """Return the number of iterations with their noun; `how`: an adjective before it."""
    count = times["last_iteration"] - times["first_iteration"] + 1
    return f"{count} {how}iteration{'s' * (count > 1)}"


def name(times: Times) -> str:
    """Return the name of a row of a table: phase, and of what part of it so many iterations."""
    count = times["last_iteration"] - times["first_iteration"] + 1
    return times["phase"] + (f", {times['what']} ({count})" if times["what"] else "")


def key_times(times: Sequence[Times], phase: str) -> Times:
    """Return what a report of `phase` is about: its end, adapted if it is."""
    return [one for one in times if one["phase"] == phase][-1]


def wait(times: Sequence[Times]) -> Times | None:
    """Return the iterations until a plan for what is slow ran; None where none was looked for."""
    return next((one for one in times if one["what"] == NOT_YET), None)


def no_plan(times: Sequence[Times]) -> str:
    """Describe that no plan has run for what is slow, and why; empty where one has."""
    waits = wait(times)
    if waits is None or any(one["what"] == ADAPTED for one in times):
        return ""
    if waits["last_iteration"] - waits["first_iteration"] < FINDING:
        return f"No plan yet: {length(waits, 'slow ')}, detection takes up to {FINDING}"
    return f"No other plan in {length(waits, 'slow ')}: none was expected to save enough"
