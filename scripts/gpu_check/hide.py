"""Part `hide`: a pipeline of two stages whose link is slow for a while, stock and ours."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from gpu_check.ranks import Deadline
from gpu_check.result import Result
from gpu_check.target import FAKE, GPU, Target
from gpu_check.trainings import BACK, INTO, Trained, train, why_not

LEAST = {GPU: 1.2, FAKE: 1.0}  # times faster than stock; the fake's ranks share the CPU's cores
OFF = 0.25  # of what was predicted


def run(found: Result, target: Target, work: Path, deadline: Deadline, options: Any) -> None:
    if why := why_not(target):
        found.why_not = why
        return
    if not target.nccl(2):
        found.left_out.append("NCCL, which refuses two ranks on one GPU: Megatron's messages go by "
                              "gloo, through the host")  # fmt: skip
    stock = train(target, work, deadline, options, plugin=False)
    ours = train(
        target, work, deadline, options, plugin=True, plant="fixed" if options.plant else ""
    )
    least = LEAST[target.kind]
    figures = compared(found, stock, ours, options, strict=target.kind == GPU, least=least,
                       gloo=not target.nccl(2))  # fmt: skip
    if figures:
        found.figures.append(figures)


def compared(
    found: Result, stock: Trained, ours: Trained, options: Any, *, strict: bool,
    least: float = 0.0, gloo: bool = False,
) -> str:  # fmt: skip
    """Check that a slow link was found, hidden and left again; describe what it took.

    Args:
        found: gets what is wrong, and tables.
        stock, ours: trainings over a link that was slow for a while.
        options: of the command.
        strict: predictions have to be right, too.
        least: times that ours is faster than stock at least.
        gloo: Megatron's messages went by gloo, which may be slow enough to be left for good.
    """
    plan = ours.plan
    healthy, slow = median(stock.ms[2 : plan.begin]), median(stock.ms[plan.begin + 1 : plan.end])
    hidden = [i for i in range(plan.begin, plan.end) if ours.ours[i]]
    found.check(slow > 1.1 * healthy, f"the link is not slow: an iteration of stock takes "
                f"{slow:.0f} ms, {healthy:.0f} without")  # fmt: skip
    if not hidden:
        found.wrong.append(f"messages never left the GPU's queue; an iteration takes "
                           f"{_late(ours):.0f} ms, {slow:.0f} of stock, {healthy:.0f} with a "
                           "healthy link")  # fmt: skip
        return ""
    took = median([ours.ms[i] for i in hidden][-4:])
    gain = slow / took
    found.check(gain > least, f"{took:.0f} ms, {slow:.0f} of stock: {gain:.2f} x, "
                f"not more than {least:g}")  # fmt: skip
    predicted = _predicted(ours)
    if strict and predicted is not None:
        found.check(abs(predicted / took - 1) <= OFF, f"{predicted:.0f} ms were predicted, "
                    f"{took:.0f} measured")  # fmt: skip
    healed = [i for i in range(plan.end, plan.iterations) if not ours.ours[i]]
    if not healed and ours.left < plan.begin and gloo:
        found.left_out.append("messages that go back: gloo's are slow enough here to leave before "
                              "the link is slow")  # fmt: skip
    else:
        found.check(bool(healed), "the link has recovered, and messages are not back with Megatron")
    forecast = "none" if predicted is None else f"{predicted:.0f} ms"
    found.table("Iterations, ms (median)", ("", "healthy", "slow", "recovered"), [
        [name, *(f"{median(part):.0f}" if part else "-" for part in parts)]
        for name, parts in (("stock", _parts(stock, range(plan.begin + 1, plan.end), plan.end)),
                            ("ours", _parts(ours, hidden[-4:], healed[0] if healed else 0)))
    ])  # fmt: skip
    found.table("Changes of the plan, as logged", ("decision",), [
        [text] for text in ours.changes if INTO in text or BACK in text
    ])  # fmt: skip
    return (
        f"{options.delay:g} ms on the link: stock {slow:.0f} ms, ours {took:.0f} ms, {gain:.2f} x; "
        f"predicted {forecast}; found in {hidden[0] - plan.begin} iterations, back after "
        f"{healed[0] - plan.end if healed else '-'}; healthy {healthy:.0f} ms, ours "
        f"{median(ours.ms[2 : plan.begin]):.0f} ms"
    )


def _parts(done: Trained, slow: Any, healed: int) -> list[list[float]]:
    after = done.ms[healed + 1 :] if healed else []
    return [done.ms[2 : done.plan.begin], [done.ms[i] for i in slow], after]


def _late(done: Trained) -> float:
    return median(done.ms[done.plan.begin + 1 : done.plan.end])


def _predicted(done: Trained) -> float | None:
    """Of the last plan of the slow time; predicted again if it was."""
    plans = [d for d in done.decisions if d.get("committed")
             and done.plan.begin <= d["iteration"] < done.plan.end]  # fmt: skip
    if not plans:
        return None
    last = plans[-1]
    return float(last.get("refreshed_ms") or last["predicted_ms"])
