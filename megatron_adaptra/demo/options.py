"""The options of the demo, checked before anything starts."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path

from megatron_adaptra.base.errors import BadFile, BadInput
from megatron_adaptra.base.units import LONGEST
from megatron_adaptra.base.user_files import files_in, read_bytes
from megatron_adaptra.config import (
    POLICIES,
    REROUTES,
    SPLITTING,
    AdaptraConfig,
    load_yaml,
    parse_budget,
)
from megatron_adaptra.demo.slow import FLAG, Slowness, changes, op_times, slowness_of
from megatron_adaptra.emulate.rules import LinkRule, PortRule
from megatron_adaptra.ir.routes import worker_name
from megatron_adaptra.netlab.lab import MOST_HOSTS

DROPOUT = 0.1  # unless it is given
MOST_RANKS = 256  # processes on one machine
MOST_FILES = 1000  # empty ones that are looked at before a folder counts as empty
PRECISIONS = ("fp32", "bf16")
DEMO_ENGINES = ("native", "executor")  # stock is the other arm
# Set for the ranks by the launcher; without it rank 0 prints for people.
LAUNCHED = "ADAPTRA_LAUNCHED"
PROGRESS = "@adaptra "  # what rank 0 sends the launcher, one JSON object a line
# Settings of the plugin that the demo chooses itself, and what to do instead of giving them.
_NOT_IN_CONFIG = {
    **{name: f"pass --{name}" for name in ("engine", "policy", "recompute", "reroute", "timeout")},
    **dict.fromkeys(("emulate_link", "emulate_worker"), "pass --slow"),
    **dict.fromkeys(("decision_log", "record"), "the demo keeps it in --out"),
}
# Variables of a rank's environment, unless the user sets them.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # stages are processes, whose threads would only disturb each other
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
}


@dataclass
class DemoOptions:
    """Options choose a run of the demo. Times are seconds; `num_layers` 0: one per chunk.

    `slow`: rules of what gets slow or late, see emulate/slow.py; without any the last link does.
    With a late rank the plugin's all-reduces are chosen while training, with a slow replica it
    shares out microbatches. `op_times`: how many times as long as it computes each op takes, by
    waiting; 0: with slow replicas, so many that the cores are idle half of the time, else 1.

    `reroute`: as the plugin's; empty: off, or, where a worker or a path is slow and there are
    several replicas, auto with the executor and swap with engine native.

    `engine` empty: native, or the executor where policy, chunks or recompute need it, or where
    microbatches are to move away from a slow worker. `chunks` 0: 2 per stage under policy
    interleaved, else 1. `dropout` None: 0.1, or 0 where microbatches may move.

    `netlab`: one host per rank, joined by links that are really slow, instead of emulated ones.
    `data`: a new folder for the text as the dataset has it; empty: rank 0 makes, and removes, one
    in `out`. `config`: a YAML file of AdaptraConfig.
    """

    stages: int = 4
    microbatches: int = 12
    data_parallel: int = 1
    num_layers: int = 0
    hidden_size: int = 64
    seq_length: int = 64
    iterations: int = 60
    slow: list[str] = field(default_factory=list)
    op_times: float = 0.0
    config: str = ""
    engine: str = ""
    reroute: str = ""
    policy: str = "adaptive"
    chunks: int = 0
    recompute: bool = False
    precision: str = "fp32"
    dropout: float | None = None
    activation_budget: str = ""
    seed: int = 1234
    text: str = ""
    out: str = "adaptra-demo"
    data: str = ""
    emulate: bool = True
    netlab: bool = False
    timeout: float = 25.0

    def __post_init__(self) -> None:
        for name, least, most in (
            ("stages", 2, MOST_RANKS), ("microbatches", 1, 10**5), ("data_parallel", 1, MOST_RANKS),
            ("num_layers", 0, 10**4), ("hidden_size", 4, 10**5), ("seq_length", 8, 10**6),
            ("iterations", 9, 10**6), ("seed", 0, 2**31 - 1), ("chunks", 0, 10**3),
        ):  # fmt: skip
            value = getattr(self, name)
            integer = isinstance(value, int)
            if not integer or not least <= value <= most:
                bound = f"most {most}" if integer and value > most else f"least {least}"
                raise BadInput(_flag(name), value, f"it has to be a whole number of at {bound}")
        if self.world > MOST_RANKS:
            raise BadInput(
                "--replicas", self.data_parallel, f"it has to be at most {MOST_RANKS} ranks"
            )
        if self.netlab and self.world > MOST_HOSTS:
            name = "stages" if self.stages > MOST_HOSTS else "data_parallel"
            hosts = f"with --netlab it has to be at most {MOST_HOSTS} ranks, one per host"
            raise BadInput(_flag(name), getattr(self, name), hosts)
        self._check_schedule()
        self._check_slow_replicas()
        self._check_reroute()
        if not self.op_times:
            shared = self.slowness.slow_replicas and self.emulate
            self.op_times = op_times(self.world) if shared else 1.0
        positions = self.stages * self.chunks
        self.num_layers = self.num_layers or positions
        if self.num_layers % positions:
            parts = f"{self.chunks} chunks of {self.stages} stages"
            what = parts if self.chunks > 1 else f"{self.stages} stages"
            allowed = f"it has to be a multiple of the {what}"
            raise BadInput("--num-layers", self.num_layers, allowed)
        if self.hidden_size % 4:
            allowed = "it has to be a multiple of the 4 attention heads"
            raise BadInput("--hidden-size", self.hidden_size, allowed)
        if self.dropout is None:
            moves = self.reroute == "auto" or self.slowness.slow_replicas
            self.dropout = 0.0 if moves else DROPOUT
        if not 0 <= self.dropout < 1:
            raise BadInput("--dropout", self.dropout, "it has to be from 0 up to, not including, 1")
        for name, known in (("engine", DEMO_ENGINES), ("precision", PRECISIONS)):
            if (value := getattr(self, name)) not in known:
                raise BadInput(_flag(name), value, f"it has to be one of {', '.join(known)}")
        if self.activation_budget:
            parse_budget(self.activation_budget, "--activation-budget")
        if not 5 <= self.timeout <= LONGEST:
            bound = f"most {LONGEST:g}" if self.timeout > LONGEST else "least 5"
            raise BadInput("--timeout", self.timeout, f"it has to be at {bound} seconds")
        self._check_config()
        if self.text:
            files = islice(files_in(self.text), MOST_FILES)
            if not any(read_bytes(path, "--text", 1) for path in files):
                raise BadFile("--text", self.text, "there is no text in it")

    def _check_slow_replicas(self) -> None:
        """Raise BadInput where no microbatches of slow replicas can be shared out."""
        given = ",".join(self.slowness.slow_replicas)
        if given and self.chunks > 1:
            allowed = "with several --chunks per stage microbatches are not shared out"
            raise BadInput(FLAG, given, allowed)
        if given and self.reroute not in ("", "off"):
            allowed = f"it has no place beside --reroute {self.reroute}: one remedy or the other"
            raise BadInput(FLAG, given, allowed)

    def _check_schedule(self) -> None:
        if self.policy not in POLICIES:
            raise BadInput("--policy", self.policy, f"it has to be one of {', '.join(POLICIES)}")
        self.chunks = self.chunks or (2 if self.policy == "interleaved" else 1)
        if self.policy == "interleaved" and self.chunks == 1:
            raise BadInput(
                "--chunks", 1, "it has to be at least 2 for policy interleaved; with 1 it is 1f1b"
            )
        if self.policy not in ("interleaved", "adaptive") and self.chunks > 1:
            raise BadInput("--chunks", self.chunks, f"it has to be 1 for policy {self.policy}")
        if self.chunks > 1 and self.microbatches % self.stages:
            allowed = f"with several chunks it has to be a multiple of the {self.stages} stages"
            raise BadInput("--microbatches", self.microbatches, allowed)
        needed = self.policy in SPLITTING or self.recompute or self.chunks > 1
        moves = not self.reroute and bool(self.slowness.slow_workers) and self._helps
        moves = moves or self.reroute == "auto"
        self.engine = self.engine or ("executor" if needed or moves else "native")
        if self.engine == "native" and needed:
            allowed = "--policy zb-h1 and zb-h2, --recompute, and several --chunks need executor"
            raise BadInput("--engine", self.engine, allowed)

    @cached_property
    def slowness(self) -> Slowness:
        """The links, workers and ranks that get slow or late, and when; raises BadInput."""
        return slowness_of(
            self.slow, self.stages, self.data_parallel, self.iterations, self.netlab, self.timeout
        )

    @property
    def _helps(self) -> bool:
        """True where one plan for all replicas is possible, and may help against what is slow."""
        possible = self.data_parallel > 1 and self.chunks == 1 and self.policy == "adaptive"
        slow = self.slowness
        helps = bool(slow.slow_workers or slow.slow_paths) and not slow.slow_replicas
        return possible and self.emulate and helps

    def _check_reroute(self) -> None:
        if not self.reroute:
            most = "auto" if self.engine == "executor" else "swap"
            self.reroute = most if self._helps else "off"
        if self.reroute not in REROUTES:
            raise BadInput("--reroute", self.reroute, f"it has to be one of {', '.join(REROUTES)}")
        for wrong, allowed in (
            (self.data_parallel == 1, "it needs several replicas, --replicas 2"),
            (self.chunks > 1, "chunks of several replicas are not planned together"),
            (self.policy != "adaptive", f"policy {self.policy} stays as it is; use adaptive"),
            (self.reroute == "auto" and self.engine == "native",
             "to move microbatches it needs --engine executor; with native it has to be swap"),
        ):  # fmt: skip
            if self.reroute != "off" and wrong:
                raise BadInput("--reroute", self.reroute, allowed)

    def _check_config(self) -> None:
        if not self.config:
            return
        given = load_yaml(Path(self.config))
        for name in sorted(given.keys() & _NOT_IN_CONFIG.keys()):
            allowed = f"it has no place in a file of --config; {_NOT_IN_CONFIG[name]}"
            raise BadInput(f"{name} in {self.config}", given[name], allowed)
        AdaptraConfig.from_mapping(given, self.config)
        if self.activation_budget and "activation_budget" in given:
            allowed = f"it has no place beside activation_budget in {self.config}"
            raise BadInput("--activation-budget", self.activation_budget, allowed)

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.stages * self.data_parallel

    @property
    def message_bytes(self) -> int:
        """The bytes of one message of the pipeline: a sequence's hidden states."""
        return self.seq_length * self.hidden_size * (2 if self.precision == "bf16" else 4)

    @property
    def rules(self) -> list[str]:
        """The emulated links, in the syntax of `--adaptra-emulate-link`."""
        return [] if self.netlab or not self.emulate else list(self.slowness.links)

    @property
    def worker_rules(self) -> list[str]:
        """The emulated slow workers, in the syntax of `--adaptra-emulate-worker`."""
        if not self.emulate:
            return []
        found = [
            (one.worker, one.times * self.op_times, f"@{one.first:g}..{one.end:g}")
            for one in self.slowness.workers
        ]
        if self.op_times > 1:  # of two rules for a worker the first one counts
            found += [(worker, self.op_times, "") for worker in range(self.world)]
        rules = [f"{worker_name(w, self.stages)}:{times:g}x{when}" for w, times, when in found]
        return [rule.removesuffix("inf") for rule in rules]

    @property
    def host_rules(self) -> list[LinkRule]:
        """The laboratory's links. Host r has rank r: a stage's replicas are neighbours."""
        return [
            replace(rule, source=self._host(rule.source), target=self._host(rule.target))
            for rule in (self.slowness.link_rules if self.emulate else ())
        ]

    @property
    def lateness(self) -> dict[int, float]:
        """The seconds by which data-parallel ranks come late in the slow phase, by rank."""
        return self.slowness.lateness if self.emulate else {}

    @property
    def allreduce(self) -> str:
        """The all-reduce of the plugin's arm: as in the file of `config`, or as needed."""
        given = load_yaml(Path(self.config)) if self.config else {}
        return str(given.get("allreduce", "auto" if self.lateness else "native"))

    @property
    def sync(self) -> str:
        """The setting `sync` of the plugin's arm: as in the file of `config`, or as needed."""
        given = load_yaml(Path(self.config)) if self.config else {}
        shares = self.slowness.slow_replicas and self.emulate
        return str(given.get("sync", "share" if shares else "full"))

    @property
    def sync_counts(self) -> str:
        """Microbatches by replica that the file of `config` names; empty where they are found."""
        return str(load_yaml(Path(self.config)).get("sync_counts", "")) if self.config else ""

    @property
    def port_rules(self) -> list[PortRule]:
        """The rules of the ports of the laboratory's hosts."""
        return list(self.slowness.ports)

    @property
    def lab_changes(self) -> set[int]:
        """The iterations at which links or ports of the laboratory change."""
        return changes([*self.host_rules, *self.port_rules] if self.netlab else [], self.iterations)

    def _host(self, worker: int) -> int:
        replica, stage = divmod(worker, self.stages)
        return stage * self.data_parallel + replica

    @property
    def phases(self) -> dict[str, tuple[int, int]]:
        """The phases: name -> first iteration and the one after the last."""
        if not self.emulate:
            return {"measured": (self.iterations // 2, self.iterations)}
        a, b = self.slowness.first, self.slowness.end
        phases = {"healthy": (0, a), "slow": (a, b), "recovered": (b, self.iterations)}
        return {name: span for name, span in phases.items() if span[0] < span[1]}

    def dump(self) -> str:
        """Return the options as the text that `load` reads, for a rank's command line."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> DemoOptions:
        """Return the options in the `text` that `dump` gave."""
        return cls(**json.loads(text))


def _flag(name: str) -> str:
    return "--" + {"data_parallel": "replicas"}.get(name, name).replace("_", "-")
