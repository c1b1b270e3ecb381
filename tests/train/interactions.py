"""What test_interactions.py trains: features of Megatron, each with each remedy of the plugin."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass

from pairwise import Row, cover

EACH = 4  # microbatches of a replica
SMALL = (
    "--hidden-size", "32", "--seq-length", "16", "--max-position-embeddings", "16",
    "--vocab-size", "127",
)  # fmt: skip
PP2 = ("--pipeline-model-parallel-size", "2")
TP2 = ("--tensor-model-parallel-size", "2")
PATH, WORKER = ("--adaptra-emulate-link", "0.0-0.1:60ms@2.."), "--adaptra-emulate-worker"
EXECUTOR = ("--adaptra-engine", "executor")
BALANCE = "--moe-router-load-balancing-type"
EXPERTS = (
    "--num-experts", "4", "--moe-router-topk", "2", "--disable-bias-linear",
    "--moe-token-dispatcher-type", "alltoall",
)  # fmt: skip
FULL = ("--recompute-granularity", "full", "--recompute-num-layers", "1", "--recompute-method")


@dataclass(frozen=True)
class Shape:
    """A job: its ranks, data-parallel replicas, stages, and Megatron's flags for it."""

    ranks: int
    replicas: int
    stages: int
    flags: tuple[str, ...]


SHAPES = {
    "pp2 dp2": Shape(4, 2, 2, PP2),
    "pp2 tp2": Shape(4, 1, 2, (*PP2, *TP2)),
    "tp2 dp2": Shape(4, 2, 1, (*TP2, "--pipeline-model-parallel-size", "1")),
    "dp3": Shape(3, 3, 1, ("--pipeline-model-parallel-size", "1")),
    "pp2 dp2, virtual stages": Shape(
        4, 2, 2, (*PP2, "--num-layers-per-virtual-pipeline-stage", "1")
    ),
}  # fmt: skip
# Counts of microbatches that add up to EACH per replica.
COUNTS = {2: "5,3", 3: "5,2,5"}
Values = Mapping[str, tuple[str, ...]]
REMEDIES: Values = {
    "order": PATH,
    "shares": ("--adaptra-sync", "share", "--adaptra-sync-counts"),
    "swap": ("--adaptra-reroute", "swap", *PATH),
    "routes": ("--adaptra-reroute", "auto", *EXECUTOR, WORKER, "1.1:6x@2.."),
    "halves": (*EXECUTOR, *PATH),
    "halves, fixed": (*EXECUTOR, "--adaptra-policy", "zb-h1"),
    "recompute": (*EXECUTOR, "--adaptra-policy", "1f1b", "--adaptra-recompute"),
}
FIXED = "halves, fixed", "recompute"
HOME = "order", "halves"  # what leaves each microbatch to its replica
# Beside these no microbatch leaves its replica.
JOINS = {
    "shape": ("pp2 dp2, virtual stages",),
    "experts": ("global_aux_loss", "ep2"),
    "user's layer": ("other lengths", "equal lengths", "backward", "recomputed", "now and then"),
}
# Seen by the same calls as other layers (test_closed_groups.py, test_late_meetings.py).
ALIKE = {("user's layer", "equal lengths"), ("user's layer", "now and then")}
# Of the plugin, beside a remedy.
OURS: Mapping[str, Values] = {
    "reductions": {"native": (), "direct": ("--adaptra-allreduce", "direct")},
    "small collectives": {"auto": (), "on": ("--adaptra-small-collectives", "on")},
    "transport": {"engine": ("--adaptra-transport", "engine"),
                  "gloo": ("--adaptra-transport", "gloo")},
}  # fmt: skip
FEATURES: Mapping[str, Values] = {
    "experts": {
        "none": (),
        "aux_loss": (*EXPERTS, BALANCE, "aux_loss", "--moe-aux-loss-coeff", "0.1"),
        "seq_aux_loss": (*EXPERTS, BALANCE, "seq_aux_loss", "--moe-aux-loss-coeff", "0.1"),
        "global_aux_loss": (*EXPERTS, BALANCE, "global_aux_loss", "--moe-aux-loss-coeff", "0.1"),
        "sinkhorn": (*EXPERTS, BALANCE, "sinkhorn"),
        "ep2": (*EXPERTS, BALANCE, "none", "--expert-model-parallel-size", "2"),
    },
    "user's layer": {
        name: ("--user-layer", name)
        for name in ("none", "other lengths", "equal lengths", "backward", "recomputed",
                     "now and then")
    },
    "recompute": {
        "none": (),
        "uniform": (*FULL, "uniform"),
        "block": (*FULL, "block"),
        "selective": ("--recompute-granularity", "selective"),
    },
    "skips": {
        "none": (),
        "one": ("--iterations-to-skip", "5"),
        "in a row": ("--iterations-to-skip", "4", *map(str, range(9, 15))),
    },
    "reruns": {
        "validated": (),
        "disabled": ("--rerun-mode", "disabled"),
        "doubted": ("--rerun-mode", "validate_results", "--user-doubt", "0:3,1:7,0:8"),
    },
    "between": {
        "nothing": (),
        "evaluation": ("--eval-interval", "3", "--eval-iters", "2"),
        "saves": ("--save-interval", "3"),
        "non-persistent saves": (
            "--save-interval", "100", "--non-persistent-save-interval", "6",
            "--non-persistent-ckpt-type", "global", "--ckpt-format", "torch_dist",
        ),
    },
    "optimizer": {
        "plain": (),
        "overlap": ("--overlap-grad-reduce",),
        "distributed": ("--use-distributed-optimizer", "--overlap-grad-reduce",
                        "--overlap-param-gather"),
        "not clipped": ("--clip-grad", "0"),
        "fp16": ("--fp16", "--initial-loss-scale", "1024", "--user-overflow", "0:6,0:9"),
        "bf16": ("--bf16",),
    },
    "loss": {"per microbatch": (), "per token": ("--calculate-per-token-loss",)},
}  # fmt: skip
AXES = {"shape": SHAPES, "remedy": REMEDIES, **OURS, **FEATURES}


@dataclass(frozen=True)
class Case:
    row: Row

    @property
    def name(self) -> str:
        """Shape and remedy, and what is not as in the first value of its axis."""
        usual = {axis: next(iter(values)) for axis, values in AXES.items()}
        more = (
            f"{axis}: {value}" for axis, value in self.row.items()
            if axis not in ("shape", "remedy") and value != usual[axis]
        )  # fmt: skip
        return "; ".join((f"{self.row['shape']}, {self.row['remedy']}", *more))

    @property
    def shape(self) -> Shape:
        return SHAPES[self.row["shape"]]

    @property
    def iterations(self) -> int:
        """Enough of them to find what is slow, and to go on."""
        return 20 if self.row["remedy"] in ("swap", "routes") else 15

    @property
    def stock(self) -> list[str]:
        """Flags of the training by stock Megatron."""
        batch = str(EACH * self.shape.replicas)
        features = (word for axis in FEATURES for word in FEATURES[axis][self.row[axis]])
        # A layer per stage, or two where each stage has two parts, or recomputes a part.
        four = "virtual" in self.row["shape"] or self.row["recompute"] == "block"
        layers = ("--num-layers", "4" if four else "2")
        return [*SMALL, "--global-batch-size", batch, *layers, *self.shape.flags, *features]

    @property
    def ours(self) -> list[str]:
        """The same, with the plugin."""
        counts = [COUNTS[self.shape.replicas]] if self.row["remedy"] == "shares" else []
        asked = (word for axis in OURS for word in OURS[axis][self.row[axis]])
        return [*self.stock, "--adaptra", *REMEDIES[self.row["remedy"]], *counts, *asked]


def possible(row: Row) -> bool:
    """Whether stock Megatron trains it, and our flags name something that is there."""
    shape = SHAPES[row["shape"]]
    if shape.stages == 1 and (row["remedy"] != "shares" or row["small collectives"] == "on"):
        return False
    if shape.replicas == 1 and (
        row["remedy"] in ("shares", "swap", "routes") or row["reductions"] == "direct"
    ):
        return False
    if row["remedy"] == "halves, fixed" and row["recompute"] != "none":
        return False  # ends before it trains, and gives the reason
    if "virtual" in row["shape"] and row["skips"] != "none":
        return False  # Megatron takes the list of a rank's iterators for one of them
    if row["between"] == "non-persistent saves" and row["remedy"] != "order":
        return False  # their first one takes ten seconds: Megatron starts a process per rank
    if row["remedy"] == "shares" and row["user's layer"] == "now and then":
        return False  # its collectives meet no earlier than shares begin
    if "tp2" in row["shape"] and row["experts"] != "none":
        return False  # Megatron asks for sequence parallelism, which needs a GPU
    return row["experts"] != "ep2" or shape.replicas == 2


def drawn(axes: Mapping[str, Mapping[str, object]], number: int) -> Iterator[Row]:
    """Possible rows, by seed: the whole product has millions."""
    chance = random.Random(63)
    while number:
        row = {axis: chance.choice(list(values)) for axis, values in axes.items()}
        if possible(row):
            number -= 1
            yield row


def met(row: Row) -> set[Hashable]:
    """The remedy with what keeps it from moving microbatches, if something does.

    Else features and shape with the kind of remedy, and the remedy with what else is of the plugin.
    """
    remedy = row["remedy"]
    joins = {(axis, row[axis]) for axis, values in JOINS.items() if row[axis] in values}
    if remedy not in HOME and joins:
        return {*(joins - ALIKE), ("refused", remedy)}
    features = {(remedy in HOME, axis, row[axis]) for axis in (*FEATURES, "shape")}
    return {*features, *((remedy, axis, row[axis]) for axis in OURS)}


def usual(row: Row) -> bool:
    """Return whether a row takes no longer than most."""
    return bool(row["between"] != "non-persistent saves")


def comparable(row: Row) -> Row:
    """Without experts where fp16 meets work that moves: another rounding is another expert."""
    moves = row["remedy"] not in HOME and row["optimizer"] == "fp16"
    return {**row, "experts": "none"} if moves else row


def chosen(everything: bool) -> list[Case]:
    """Each feature with both kinds of remedy; or every pair of values with every remedy.

    Without `everything` orders that never change are left to test_executor_training.py, and saves
    for which Megatron starts a process per rank are left out.
    """
    if not everything:
        changing = {name: remedy for name, remedy in REMEDIES.items() if name not in FIXED}
        rows = cover([row for row in drawn({**AXES, "remedy": changing}, 3000) if usual(row)], met)
        return [Case(comparable(row)) for row in rows]
    return [
        Case(row)
        for remedy in REMEDIES
        for row in cover(list(drawn({**AXES, "remedy": {remedy: ()}}, 3000)))
    ]
