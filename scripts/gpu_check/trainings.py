"""Two trainings over a link that is slow for a while: stock, and with the plugin. For three parts.

Megatron's own program, a pipeline of two stages. Each is run once, for the first part to need it.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_check.ranks import Deadline, Failed, run_command
from gpu_check.result import Result
from gpu_check.shared_nccl import Network
from gpu_check.target import ALONE, CPU, FAKE, HERE, ROOT, Target

from scripts.megatron_lm_rows import FLAGS, LINE

STAGES = 2
QUEUES = 32
CHANGE = re.compile(r"^adaptra: from iteration (\d+) on, (.*)", re.MULTILINE)
INTO, BACK = "its messages leave the GPU's queue", "back to Megatron's own messages"


@dataclass(frozen=True)
class Plan:
    """`begin`, `end`: iterations, from 0, in which the link is slow."""

    begin: int
    end: int
    iterations: int
    flags: tuple[str, ...]
    microbatches: int
    stages: int = STAGES


@dataclass(frozen=True)
class Shape:
    """A shape lays out ranks as stages of `replicas`; `flags` are those of Megatron for it."""

    replicas: int = 1
    flags: tuple[str, ...] = ()

    def links(self, stages: int) -> list[tuple[int, int]]:
        """Return the ranks at both ends of each pipeline's first link."""
        return [(rank, rank + self.replicas) for rank in range(self.replicas)] if stages > 1 else []


PP2, DP2 = Shape(), Shape(2, ("--use-distributed-optimizer",))

MESSAGE = 2.0  # MiB of one between stages, in single precision, of _LARGE
_LARGE = (
    "--hidden-size", "1024", "--num-attention-heads", "16", "--seq-length", "512",
    "--max-position-embeddings", "512", "--num-layers", "16",
)  # fmt: skip
_SMALL = (
    "--num-layers", "4", "--no-check-for-nan-in-loss-and-grad", "--rerun-mode", "disabled",
)  # fmt: skip
_GRAPHS = (  # of single layers
    "--cuda-graph-impl", "local", "--cuda-graph-warmup-steps", "2", "--te-rng-tracker",
)  # fmt: skip
ON_GPUS = Plan(8, 32, 48, _LARGE, 12)
REHEARSED = Plan(6, 22, 38, _SMALL, 8)
# With two stages no plan is better over the engine: graphs keep Megatron's warmup.
GRAPHS_ON_GPUS = Plan(8, 24, 32, (*_LARGE, *_GRAPHS), 12, 4)
GRAPHS_REHEARSED = Plan(6, 16, 22, (*_SMALL, *_GRAPHS), 8, 4)


@dataclass(frozen=True)
class Trained:
    """`ranks`: what each has written. `decisions`: of the plugin's log."""

    plan: Plan
    text: str
    ranks: list[dict[str, Any]]
    decisions: list[dict[str, Any]]

    @property
    def ms(self) -> list[float]:
        """Of each iteration, on the last rank to be done."""
        return [max(row["ms"] for row in rows) for rows in self._rows]

    @property
    def ours(self) -> list[bool]:
        """Of each iteration, whether the engine carried the messages."""
        return [all(row["ours"] for row in rows) for rows in self._rows]

    @property
    def calls(self) -> list[list[Any]]:
        """Of each iteration and rank, a digest of its calls of torch.distributed."""
        return [[row["calls"] for row in rows] for rows in self._rows]

    @property
    def left(self) -> int:
        """The first iteration over the engine; the number of iterations if there is none."""
        return next((i for i, ours in enumerate(self.ours) if ours), self.plan.iterations)

    @property
    def losses(self) -> list[tuple[str, str]]:
        """As printed, with gradient norms."""
        found = map(LINE.search, self.text.splitlines())
        return [(match[3], match[4]) for match in found if match]

    @property
    def changes(self) -> list[str]:
        """Log lines about changes of the plan."""
        return [f"from iteration {number} on, {text}" for number, text in CHANGE.findall(self.text)]

    @property
    def _rows(self) -> list[tuple[dict[str, Any], ...]]:
        return list(zip(*(rank["rows"] for rank in self.ranks), strict=True))


_done: dict[str, Trained | Failed] = {}


def why_not(target: Target) -> str:
    """Why there can be no trainings here; else empty."""
    if target.kind == CPU:
        return "torch has no CUDA build here; on CPUs `adaptra demo` shows the same"
    found = importlib.util.find_spec("megatron")
    folders = (found.submodule_search_locations or ()) if found is not None else ()
    if not any((Path(folder) / "training" / "training.py").is_file() for folder in folders):
        return (
            "there is no megatron.training: take a wheel of megatron-core 0.17 or newer, or put a "
            "checkout of Megatron-LM into PYTHONPATH"
        )
    return ""


def train(
    target: Target, work: Path, deadline: Deadline, options: Any, plugin: bool, plant: str = "",
    graphs: bool = False, shape: Shape = PP2, network: Network | None = None,
) -> Trained:  # fmt: skip
    """`plant`: a fault: "spoil" has peaks of memory forgotten, "fixed" has the plan stay,
    "uncopied" sends outputs of graphs from where they are. `graphs`: layers run as CUDA graphs.
    `network`: what NCCL connects ranks by that share a GPU; without, gloo serves such ranks.

    Raises Failed; also for a later part, which does not try again what was begun.
    """
    name = f"{'ours' if plugin else 'stock'}{'-graphs' if graphs else ''}{plant and f'-{plant}'}"
    name += f"-{network.folder.name}" if network is not None else ""
    if name not in _done:
        deadline.begin(f"training, {name}")
        try:
            _done[name] = _train(
                target, work / name, deadline, options, plugin, plant, graphs, shape, network
            )
        except Failed as error:
            _done[name] = Failed(f"{error} (as for the part before)")
            raise
    done = _done[name]
    if isinstance(done, Failed):
        raise done
    return done


def _train(
    target: Target, folder: Path, deadline: Deadline, options: Any, plugin: bool, plant: str,
    graphs: bool, shape: Shape, network: Network | None,
) -> Trained:  # fmt: skip
    folder.mkdir()
    if target.kind == FAKE:
        plan = GRAPHS_REHEARSED if graphs else REHEARSED
    else:
        plan = GRAPHS_ON_GPUS if graphs else ON_GPUS
    ranks = plan.stages * shape.replicas
    nccl = network is not None or target.nccl(ranks)
    links = shape.links(plan.stages)
    script = ROOT / "tests" / "train" / "ranks" / "pretrain_gpt_small.py"
    given = {
        "folder": str(folder), "nccl": nccl, "fake": target.kind == FAKE, "gpus": target.gpus,
        "delay": options.delay / 1e3, "begin": plan.begin, "end": plan.end,
        "iterations": plan.iterations, "script": str(script), "spoil": plant == "spoil",
        "graphs": graphs, "stages": plan.stages, "uncopied": plant == "uncopied", "links": links,
        "network": str(network.folder) if network is not None else "",
    }  # fmt: skip
    samples = round(options.hide_message / MESSAGE)
    words = [
        *FLAGS, "--distributed-backend", "nccl" if nccl else "gloo",
        "--pipeline-model-parallel-size", str(plan.stages), "--train-iters", str(plan.iterations),
        *plan.flags, *shape.flags, "--micro-batch-size", str(samples),
        "--global-batch-size", str(plan.microbatches * samples * shape.replicas),
    ]  # fmt: skip
    launcher = []
    if plugin:
        launcher = ["-m", "megatron_adaptra.run"]
        words += ["--adaptra", "--adaptra-emulate-link",
                  f"0-1:{options.delay:g}ms@{plan.begin}..{plan.end}",
                  "--adaptra-decision-log", str(folder / "decisions.jsonl")]  # fmt: skip
        # One GPU for all stages leaves little to gain, and what counts here is the bits.
        words += ["--adaptra-min-gain", "0.01"] if graphs else []
        words += ["--adaptra-policy", "1f1b"] if plant == "fixed" else []
    machine = {"kernel_us": 50, "depth": 100_000} if target.kind == FAKE else {}
    environment = {
        **target.environment(queues=QUEUES, **machine), "ADAPTRA_GPU_CHECK": json.dumps(given),
        "TORCHDYNAMO_DISABLE": "1",  # compiling kernels would take longer than training
    }  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", *ALONE, "--nproc-per-node",
               str(ranks), *launcher, str(HERE / "pretrain.py"), *words]  # fmt: skip
    text = run_command(command, f"training, {folder.name}", environment, deadline,
                       folder / "text.log")  # fmt: skip
    seen = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    if any(len(rank["rows"]) != plan.iterations for rank in seen):
        raise Failed(f"training, {folder.name}: not all iterations were seen")
    return Trained(plan, text, seen, _read(folder / "decisions.jsonl"))


def _read(log: Path) -> list[dict[str, Any]]:
    """Decisions, each from all lines that have something of it."""
    found: dict[Any, dict[str, Any]] = {}
    for line in log.read_text().splitlines() if log.exists() else ():
        data = json.loads(line)
        found.setdefault(data["number"], {}).update(data)
    return list(found.values())


def same_bits(found: Result, what: str, stock: Trained, ours: Trained) -> bool:
    """Whether losses, norms and parameters of two trainings are the same; else why is `found`."""
    before = len(found.wrong)
    for i, (theirs, mine) in enumerate(zip(stock.losses, ours.losses, strict=True)):
        if theirs != mine:
            found.wrong.append(f"{what}: iteration {i} has loss and norm {mine}, stock {theirs}")
            break
    for stage, (one, other) in enumerate(zip(stock.ranks, ours.ranks, strict=True)):
        found.check(one["digest"] == other["digest"], f"{what}: other parameters of stage {stage}")
    return len(found.wrong) == before
