"""The rows of scripts/megatron_lm_matrix.py: which trainings are compared, and how they are judged.

All flags are here. Which Python a release of Megatron-LM needs is here, too.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

# What every release needs to train on a CPU. Two runs of it are equal to the last bit.
_FLAGS = """
    --distributed-backend gloo --transformer-impl local --no-persist-layer-norm
    --no-masked-softmax-fusion --no-gradient-accumulation-fusion --attention-softmax-in-fp32
    --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion --attention-dropout 0
    --hidden-dropout 0 --tokenizer-type NullTokenizer --vocab-size 4095
    --make-vocab-size-divisible-by 1 --mock-data --split 90,5,5 --num-workers 0 --eval-iters 0
    --eval-interval 1000 --log-interval 1 --hidden-size 64 --num-attention-heads 4 --seq-length
    32 --max-position-embeddings 32 --micro-batch-size 1 --lr 1e-3 --seed 1234 --ckpt-format
    torch
"""
FLAGS = tuple(_FLAGS.split())
LINE = re.compile(
    r"iteration +(\d+)/ *\d+ \|.*elapsed time per iteration \(ms\): ([\d.]+).*"
    r"lm loss: (\S+).*grad norm: (\S+)"
)
SWAPPED = "run each other's microbatches"
LEAST_RATIO = 2.0  # over a slow link; healthy runs differ by noise
ON = ("--adaptra",)


@dataclass(frozen=True)
class Shape:
    pipeline: int
    tensor: int = 1
    data: int = 1
    layers: int = 4
    flags: tuple[str, ...] = ()
    # Below 0.18 the interleaved schedule frees outputs that gloo still sends, if it overlaps.
    flags_below_0_18: tuple[str, ...] = ()

    def words(self, release: tuple[int, int], microbatches: int) -> list[str]:
        sizes = {
            "--pipeline-model-parallel-size": self.pipeline,
            "--tensor-model-parallel-size": self.tensor,
            "--num-layers": self.layers,
            "--global-batch-size": microbatches * self.data,
        }
        extra = self.flags + (self.flags_below_0_18 if release < (0, 18) else ())
        return [str(word) for item in sizes.items() for word in item] + list(extra)


SHAPES = {
    "pp2": Shape(2),
    "pp4": Shape(4),
    "pp4x2": Shape(4, layers=8, flags=("--num-layers-per-virtual-pipeline-stage", "1"),
                   flags_below_0_18=("--no-overlap-p2p-communication",)),
    "pp2dp2": Shape(2, data=2),
    "tp2pp2": Shape(2, tensor=2),
}  # fmt: skip
ROWS = (*SHAPES, "slow", "executor", "patched", "routes")
# Of the row `routes`, whose replicas exchange partners round a slow path.
ROUTED = {"pp3dp2": Shape(3, data=2, layers=3), "tp2pp2dp2": Shape(2, tensor=2, data=2)}
ALL_SHAPES = SHAPES | ROUTED


@dataclass(frozen=True)
class Run:
    """One training. A patched pretrain_gpt.py runs without our launcher."""

    shape: str
    plugin: tuple[str, ...] = ()
    patched: bool = False
    network: str = ""  # a really slow link of a laboratory, instead of an emulated one


@dataclass(frozen=True)
class Row:
    name: str
    stock: Run
    adaptra: Run
    least_ratio: float = 0.0
    decision: str = ""  # what has to be in a line of the plugin


@dataclass
class Outcome:
    """What one training left: a log, a checkpoint, and its figures."""

    log: Path
    checkpoint: Path
    status: int | str = 0
    seconds: list[float] = field(default_factory=list)
    printed: list[tuple[str, str]] = field(default_factory=list)  # loss and gradient norm
    text: str = ""

    def read(self) -> None:
        self.text = self.log.read_text(errors="replace")
        found = [match.groups() for match in map(LINE.search, self.text.splitlines()) if match]
        self.seconds = [float(ms) / 1e3 for _, ms, _, _ in found]
        self.printed = [(loss, norm) for _, _, loss, norm in found]

    def milliseconds(self) -> float:
        """The median of the last half: by then a delay has been found and hidden."""
        late = self.seconds[len(self.seconds) // 2 :]
        return 1e3 * statistics.median(late) if late else float("nan")

    def telling_lines(self) -> str:
        lines = [line for line in self.text.splitlines() if line.strip()]
        telling = [x for x in lines if re.search(r"^adaptra: |\w(Error|Exception|Lost)\b", x)]
        return "\n".join(f"    {x[:300]}" for x in (telling[-6:] or lines[-6:]))


def rows(only: Sequence[str], links: Sequence[str], delay: str, netlab: bool) -> list[Row]:
    found = []
    for name in only:
        if name in SHAPES:
            found.append(Row(name, Run(name), Run(name, ON)))
        elif name == "slow":
            for link in links:
                if netlab:
                    rule = f"{link}:{delay}"
                    pair = Run("pp4", network=rule), Run("pp4", ON, network=rule)
                    found.append(Row(f"pp4 netlab {link}", *pair, LEAST_RATIO))
                    continue
                slow = (*ON, "--adaptra-emulate-link", f"{link}:{delay}")
                stock = Run("pp4", (*slow, "--adaptra-engine", "stock"))
                found.append(Row(f"pp4 slow {link}", stock, Run("pp4", slow), LEAST_RATIO))
        elif name == "executor":
            run = Run("pp4", (*ON, "--adaptra-engine", "executor"))
            found.append(Row("pp4 executor", Run("pp4"), run))
        elif name == "routes":
            found += routed(delay)
        else:
            found.append(Row("pp4 patched", Run("pp4"), Run("pp4", ON, patched=True)))
    return found


def routed(delay: str) -> list[Row]:
    """Stock and adaptra over a path of one replica that is slow; in the last row over gloo."""
    slow = (*ON, "--adaptra-emulate-link", f"0.0-0.1:{delay}")
    found = []
    for shape, transport in (("pp2dp2", ""), ("pp3dp2", ""), ("tp2pp2dp2", ""), ("pp2dp2", "gloo")):
        ours = (*slow, "--adaptra-reroute", "swap")
        ours += ("--adaptra-transport", transport) if transport else ()
        stock = Run(shape, (*slow, "--adaptra-engine", "stock"))
        name = f"{shape} routes{' ' + transport if transport else ''}"
        least = 0.0 if ALL_SHAPES[shape].tensor > 1 else LEAST_RATIO  # eight ranks on few cores
        found.append(Row(name, stock, Run(shape, ours), least, SWAPPED))
    return found


def plugin_faults(row: Row, stock: Outcome, ours: Outcome) -> list[str]:
    """Equal losses mean nothing unless the plugin was in one run and not in the other."""
    faults = []
    if not row.stock.plugin and "adaptra: " in stock.text:
        faults.append("the plugin was at work in the stock run")
    if "adaptra: " not in ours.text:
        faults.append("the plugin was not at work")
    elif row.decision not in ours.text:
        faults.append(f"no decision was: {row.decision}")
    elif not ALL_SHAPES[row.adaptra.shape].flags and "adaptra: warmup " not in ours.text:
        faults.append("the plugin left the schedule to Megatron")
    return faults


def notes(text: str) -> list[str]:
    """The lines of the plugin, and the first and the last plan in Megatron's log lines."""
    printed = dict.fromkeys(re.findall(r"^adaptra: (.*)", text, re.MULTILINE))
    plans = re.findall(r"adaptra: (warmup [\d,]+)", text)
    return [*printed, *dict.fromkeys([*plans[:1], *plans[-1:]])]


def pythons_for(release: tuple[int, int]) -> tuple[str, ...]:
    return ("3.12",) if release >= (0, 17) else ("3.11", "3.10")
