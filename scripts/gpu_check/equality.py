"""Part `equality`: losses, steps, parameters and random states have the bits of stock Megatron.

Cases of tests/train/ranks/cases.py by the script of tests/train/test_schedules.py; ranks get a GPU
each where there are enough. Megatron's groups are gloo's, for stock and for ours alike, and ours
sends its messages from GPU to GPU through the engine. Then the trainings of part `hide`, over NCCL
where that is possible: their messages change from NCCL to the host and back.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cases import LAYOUTS, Case, matrix
from gpu_check.deterministic import without
from gpu_check.ranks import Deadline, Failed, run_command
from gpu_check.result import Result
from gpu_check.target import ALONE, CPU, FAKE, GPU, HERE, Target
from gpu_check.trainings import same_bits, train, why_not

SAME = ("losses", "steps", "parameters", "random", "statistics")
QUICK = ("1f1b", "zb-h1")  # policies of a rehearsal
APEX = "fused_weight_gradient_mlp_cuda"
NO_NUMERICS = ("random",)  # what is the same where kernels compute nothing


def run(found: Result, target: Target, work: Path, deadline: Deadline, options: Any) -> None:
    rows: list[list[str]] = []
    places = [(target, SAME, "")]
    if target.kind == FAKE:
        on_cpu = Target(CPU, 0, target.versions)
        places = [(on_cpu, SAME, ""), (target, NO_NUMERICS, " over the fake: random states alone")]
        found.left_out.append("numbers of GPUs: the fake's kernels compute nothing, so the cases "
                              "run on the CPU, too")  # fmt: skip
    for layout in options.layouts or ("pp2",):
        for place, compared, words in places:
            rows.append(_layout(found, layout, place, compared, words, work, deadline, options))
    same, ran = (sum(int(row[i]) for row in rows if "fake" not in row[0]) for i in (3, 2))
    found.figures.append(f"{same} of {ran} cases have the bits of stock")
    found.table("Cases", ("layout: models", "processes", "cases", "same bits as stock", "s"), rows)
    if target.kind == GPU:
        _trainings(found, target, work, deadline, options)


def _layout(
    found: Result, layout: str, target: Target, compared: Sequence[str], words: str, work: Path,
    deadline: Deadline, options: Any,
) -> list[str]:  # fmt: skip
    """A row: all cases of a layout."""
    cases = chosen(layout, target)
    folder = work / f"equality-{layout}-{target.kind}"
    folder.mkdir()
    file = folder / "cases.json"
    file.write_text(json.dumps([case.dump() for case in cases]))
    begin = time.monotonic()
    try:
        out = _run(target, layout, file, deadline, options)
    except Failed as error:  # the cases before that one still count
        found.wrong.append(str(error))
        print(error.log, file=sys.stderr, flush=True)
        out = (folder / "text.log").read_text()
    _note(found, layout, out)
    done = [json.loads(line[5:]) for line in out.splitlines() if line.startswith("CASE ")]
    bad = {case[0]["name"]: what for case in done if (what := differs(case, compared))}
    found.wrong += [f"{name}{words}: other {', '.join(what)}" for name, what in bad.items()]
    ended = len(done)
    found.check(ended == len(cases), f"{layout}{words}: {ended} of {len(cases)} cases ended")
    shapes = ", ".join(dict.fromkeys(c.name.split(", ")[0].partition(" ")[2] for c in cases))
    count = str(LAYOUTS[layout][0])
    took = f"{time.monotonic() - begin:.0f}"
    return [f"{layout}: {shapes}{words}", count, str(len(cases)), str(len(done) - len(bad)), took]


def _note(found: Result, what: str, text: str) -> None:
    if names := sorted(without(text)):
        found.figures.append(f"{what}: no deterministic kernel for {', '.join(names)}")


def _trainings(found: Result, target: Target, work: Path, deadline: Deadline, options: Any) -> None:
    what = "a training whose messages change their way"
    if why := why_not(target):
        found.left_out.append(f"{what}: {why}")
        return
    stock = train(target, work, deadline, options, plugin=False)
    ours = train(target, work, deadline, options, plugin=True)
    _note(found, "training", stock.text)
    if same_bits(found, what, stock, ours):
        way = "NCCL" if target.nccl(2) else "gloo"
        found.figures.append(
            f"a training of {len(ours.losses)} iterations, {sum(ours.ours)} of them over the "
            f"engine and the others over {way}, has stock's parameters"
        )


def chosen(layout: str, target: Target) -> list[Case]:
    """A layout's cases; those with the fused kernel only where it, or its stand-in, runs."""
    fused = target.kind != GPU or importlib.util.find_spec(APEX) is not None
    cases = [case for case in matrix(layout) if fused or not case.shape.fused]
    if target.kind != GPU:
        cases = [c for c in cases if c.policy in QUICK and c.name.startswith(f"{layout} fp32")]
    return cases


def differs(ranks_of_case: Sequence[dict[str, Any]], compared: Sequence[str]) -> list[str]:
    """What of a case is not as it is under Megatron's schedule, of what is `compared`."""
    both = [(rank["ours"], rank["stock"]) for rank in ranks_of_case]
    found = [what for what in compared if any(ours[what] != stock[what] for ours, stock in both)]
    peaks = [(p, ours["predicted_peak"]) for ours, _ in both for p in ours["peaks"]]
    if any(abs(peak - predicted) > 1e-6 for peak, predicted in peaks):
        found.append("microbatches in flight")
    return found


def _run(target: Target, layout: str, file: Path, deadline: Deadline, options: Any) -> str:
    ranks = LAYOUTS[layout][0]
    command = [
        sys.executable, "-m", "torch.distributed.run", *ALONE, "--nproc-per-node",
        str(ranks), str(HERE / "equality_rank.py"), str(file), str(file.parent),
        str(target.gpus), str(int(options.plant)), str(int(target.kind == FAKE)),
    ]  # fmt: skip
    environment = target.environment(**({"kernel_us": 5} if target.kind == FAKE else {}))
    return run_command(command, f"equality, {layout}, {ranks} ranks", environment, deadline,
                       file.parent / "text.log")  # fmt: skip
