"""The one source of every setting: Megatron's flag group, the YAML file and the documentation."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from megatron_adaptra.base.errors import BadFile, BadInput, as_text, refuse_unknown
from megatron_adaptra.base.units import LONGEST, number, parse_bytes
from megatron_adaptra.base.user_files import read_data

ACTS = ("observe", "bits", "exact")
POST_RECEIVES = ("ahead", "on-demand")
SMALL_COLLECTIVES = ("auto", "on", "fixed", "off")
ALLREDUCES = ("native", "auto", "direct", "stragglar")
REROUTES = ("off", "swap", "auto")
SYNCS = ("full", "share", "auto")
TRANSPORTS = ("auto", "engine", "gloo")
ENGINES = ("native", "executor", "stock")
POLICIES = ("adaptive", "1f1b", "zb-h1", "zb-h2", "interleaved")
SPLITTING = ("zb-h1", "zb-h2")  # policies that run backwards in halves
AUTO = "auto"  # an activation budget: what the device has left
OBSERVE = "observe"
# What --adaptra-act sets where a setting is not given itself.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    OBSERVE: {"reroute": "auto", "allreduce": "auto", "sync": "auto"},
    "exact": {
        "engine": "executor", "reroute": "auto", "allreduce": "auto", "sync": "auto",
        "small_collectives": "fixed",
    },
}  # fmt: skip
# All that a job may have that only observes.
OBSERVED = {
    "engine": ("native",), "small_collectives": ("off", "auto"),
    "allreduce": ("native", "auto"), "sync": ("full", "auto"), "act_file": ("",),
}  # fmt: skip


def _setting(default: Any, text: str, **extra: Any) -> Any:
    meta = {"help": text, **extra}
    if isinstance(default, list):
        return field(default_factory=list, metadata=meta)
    return field(default=default, metadata=meta)


class Budget(NamedTuple):
    """A budget limits a stage's activations: by microbatches, bytes, or its device's memory."""

    microbatches: float = math.inf
    nbytes: float = math.inf
    auto: bool = False

    @property
    def in_bytes(self) -> bool:
        """True where the size of a microbatch has to be measured before the budget can be kept."""
        return self.auto or math.isfinite(self.nbytes)


UNLIMITED = Budget()


def parse_budget(text: str, field: str = "activation_budget") -> Budget:
    """Return the budget in `text`: `12`, `20GiB`, `auto` or `none`.

    Raises BadInput with the name of the `field`.
    """
    allowed = "it has to be microbatches (at least 1), bytes such as 20GiB, auto or none"
    text = as_text(text).strip()
    if text in (AUTO, "none"):
        return Budget(auto=text == AUTO)
    try:
        count = number(text)
    except ValueError:
        nbytes = parse_bytes(text, field, allowed)
        if not nbytes:
            raise BadInput(field, text, allowed) from None
        return Budget(nbytes=nbytes)
    if not count >= 1:
        raise BadInput(field, text, allowed)
    return Budget(microbatches=count)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True)
class AdaptraConfig:
    """Settings of the plugin; flags are `--adaptra-` and the name. Times are seconds.

    What `act` sets for other settings counts where these are made by `from_mapping` or `from_args`.
    """

    act: str = _setting(
        "bits",
        "observe: Megatron's own calls; what would be done is logged. bits: what keeps the bits of "
        "stock. exact: also what keeps the exact mean, in another order of sums. Sets "
        "--adaptra-engine, -reroute, -allreduce, -sync and -small-collectives where these are not "
        "given (docs/observe.md)",
        choices=ACTS,
    )
    act_file: str = _setting(
        "",
        "file that holds on or off, read when it changes: off, plans go back to the start and what "
        "would be done is logged; on, or no such file, they come into force",
        metavar="FILE",
    )
    engine: str = _setting(
        "native",
        "native: Megatron's own schedule with our communicator; executor: our own loop over ops; "
        "stock: Megatron as it is, to compare with (emulated links are slow for it too)",
        choices=ENGINES,
    )
    policy: str = _setting(
        "adaptive",
        "adaptive: a plan for the links as they are. The others are fixed: 1f1b and interleaved as "
        "Megatron runs them, zb-h1 and zb-h2 with the executor",
        choices=POLICIES,
    )
    recompute: bool = _setting(
        False,
        "the executor may recompute forwards instead of keeping their activations: single "
        "microbatches where an adaptive plan asks for it, all of them under a fixed policy",
    )
    emulate_link: list[str] = _setting(
        [],
        "make a link slow for a trial, in every replica: 2-3:40ms@10.. (both ways, from iteration "
        "10 on) or 2>3:40ms,jitter=4ms,bandwidth=10MB/s@10..20. Or the path between two workers, "
        "replica.stage: 0.1-0.2:40ms. Or a scenario YAML. May be repeated",
        metavar="RULE",
    )
    emulate_worker: list[str] = _setting(
        [],
        "make the ops of a worker slow for a trial, by waiting: 1.2:2x@10.. (stage 2 of replica 1 "
        "twice as long, from iteration 10 on), or a scenario YAML; may be repeated; not on GPUs",
        metavar="RULE",
    )
    activation_budget: str = _setting(
        "none",
        "what a stage may hold of activations: microbatches (12), bytes (20GiB), auto (what the "
        "device has left after the first iterations) or none (on CPUs no limit, on GPUs as auto)",
        metavar="N",
    )
    min_gain: float = _setting(
        0.15, "share of an iteration that a new plan has to save before it is adopted", metavar="X"
    )
    reroute: str = _setting(
        "off",
        "plan all data-parallel replicas together. swap: whole pipelines exchange partners round "
        "slow paths. auto: single microbatches move round slow workers, too. off: each replica is "
        "planned by itself",
        choices=REROUTES,
    )
    small_collectives: str = _setting(
        "auto",
        "small collectives of an iteration's end that cross stages, exchanged directly in one "
        "delay. auto: where that is faster. on: always where bits stay the same. fixed: also where "
        "they may not (sums in the order of ranks). off: never",
        choices=SMALL_COLLECTIVES,
    )
    allreduce: str = _setting(
        "native",
        "how data-parallel ranks reduce their gradients. native: as Megatron does. auto: native "
        "until a rank is found to be late, or a port slow; on GPUs it only names the rank. direct: "
        "each piece at an owner; a late rank owns nothing. stragglar: for one late rank of at "
        "least 4. Or a file with a collective plan (docs/allreduce.md)",
        metavar="HOW",
    )
    late_ranks: str = _setting(
        "",
        "data-parallel ranks that are late, such as 2 or 2,5: they own no piece of the buffer",
        metavar="RANKS",
    )
    sync: str = _setting(
        "full",
        "how data-parallel replicas share out an iteration. full: as many microbatches each. "
        "share: fewer to slow replicas, with the same global batch and mean of its gradients. "
        "auto: that where no cheaper remedy is enough",
        choices=SYNCS,
    )
    sync_counts: str = _setting(
        "",
        "with --adaptra-sync share: microbatches of each data-parallel replica, in order, such as "
        "9,9,9,5, instead of counts by measured speed; they must sum to the global batch",
        metavar="COUNTS",
    )
    post_receives: str = _setting(
        "ahead",
        "when receives are posted: ahead, as early as plan and budget allow, or on-demand, as "
        "Megatron does, for comparison",
        choices=POST_RECEIVES,
    )
    transport: str = _setting(
        "auto",
        "what carries messages between stages. engine: ours, over shared memory, RDMA and TCP. "
        "gloo: torch's, which needs no compiler. auto: the engine where it was built",
        choices=TRANSPORTS,
    )
    encrypt: bool = _setting(
        False, "encrypt messages between hosts with TLS 1.3, which needs our engine and OpenSSL 3"
    )
    timeout: float = _setting(
        600.0,
        "seconds without a message after which a rank says whom it waits for; it waits on, and the "
        "training ends where Megatron's does (--distributed-timeout-minutes)",
        metavar="S",
    )
    hang_timeout: float = _setting(
        180.0,
        "seconds without progress after which every rank says what it waits for, and who keeps "
        "the job waiting (0: never); it waits on. Less where --adaptra-timeout, torch's limit or "
        "ft_launcher's would come first",
        metavar="S",
    )
    decision_log: str = _setting(
        "", "file that decisions to change the plan are appended to, as JSON lines", metavar="FILE"
    )
    record: str = _setting(
        "",
        "folder in which to keep what was measured and decided, as JSON lines: 64 MiB per "
        "data-parallel replica at most",
        metavar="DIR",
    )
    strict: bool = _setting(
        False, "end with an error where this Megatron does not fit, instead of training as stock"
    )

    def __post_init__(self) -> None:
        if isinstance(self.small_collectives, bool):  # YAML's word for on and off
            value = "on" if self.small_collectives else "off"
            object.__setattr__(self, "small_collectives", value)
        for f in fields(self):
            choices = f.metadata.get("choices")
            if choices and getattr(self, f.name) not in choices:
                raise BadInput(
                    f.name, getattr(self, f.name), f"it has to be one of {', '.join(choices)}"
                )
        given: Any = self.activation_budget
        if _is_number(given):
            text = "none" if given == math.inf else f"{min(given, 1e300):g}"
            object.__setattr__(self, "activation_budget", text)
        parse_budget(self.activation_budget)
        for name, least in (("min_gain", 0.0), ("timeout", 1.0), ("hang_timeout", 0.0)):
            value = getattr(self, name)
            if not _is_number(value) or not value >= least:
                raise BadInput(name, value, f"it has to be a number of at least {least:g}")
            if name != "min_gain" and value > LONGEST:
                raise BadInput(name, value, f"it has to be at most {LONGEST:g} seconds")
        late: Any = self.late_ranks
        for name in ("late_ranks", "sync_counts"):
            given = getattr(self, name)
            if isinstance(given, int) and not isinstance(given, bool):  # YAML's number
                object.__setattr__(self, name, str(given))
        if not isinstance(self.allreduce, str) or not self.allreduce:
            allowed = f"it has to be one of {', '.join(ALLREDUCES)}, or a file with a plan"
            raise BadInput("allreduce", self.allreduce, allowed)
        if self.late and self.allreduce not in ALLREDUCES:
            raise BadInput("late_ranks", late, f"the plan in {self.allreduce} says who does what")
        if self.late and self.allreduce == "auto":
            raise BadInput("late_ranks", late, "auto finds them; leave it out")
        if self.late and self.allreduce == "native":
            raise BadInput(
                "late_ranks", late, "native waits for all; use --adaptra-allreduce direct"
            )
        if self.allreduce == "stragglar" and len(self.late) != 1:
            raise BadInput("late_ranks", late, "stragglar needs the one rank that is late: 3, say")
        if self.counts and self.sync != "share":
            given = self.sync_counts
            raise BadInput("sync_counts", given, f"sync is {self.sync}; use --adaptra-sync share")
        for name, example in (("emulate_link", "2-3:40ms@10.."), ("emulate_worker", "1.2:2x@10..")):
            rules = getattr(self, name)
            if not isinstance(rules, list) or not all(isinstance(rule, str) for rule in rules):
                raise BadInput(name, rules, f"it has to be a list such as [{example}]")
        for name, what in (("decision_log", "file"), ("record", "folder"), ("act_file", "file")):
            if not isinstance(getattr(self, name), str):
                raise BadInput(name, getattr(self, name), f"it has to be the name of a {what}")
        for name in ("strict", "recompute", "encrypt"):
            if not isinstance(getattr(self, name), bool):
                raise BadInput(name, getattr(self, name), "it has to be true or false")
        if self.encrypt and self.transport == "gloo":
            raise BadInput("encrypt", True, "--adaptra-transport gloo cannot; use engine or auto")
        if self.engine == "native" and (self.policy in SPLITTING or self.recompute):
            name = "policy" if self.policy in SPLITTING else "recompute"
            raise BadInput(name, getattr(self, name), "it needs --adaptra-engine executor")

        for name, some in OBSERVED.items() if self.observes else ():
            if (value := getattr(self, name)) not in some:
                one = " or ".join(some) or "none"
                raise BadInput(name, value, f"with --adaptra-act observe it has to be {one}")

    @property
    def observes(self) -> bool:
        """True where Megatron makes its own calls alone, and what would be done is logged."""
        return self.act == OBSERVE

    def log_file(self, what: str = "") -> Path | None:
        """Return the log of decisions on `what`, or of the first pipeline's; None without one."""
        if not self.decision_log:
            return None
        path = Path(self.decision_log)
        return path.with_suffix(f".{what}{path.suffix}") if what else path

    @property
    def budget(self) -> Budget:
        """The budget in `activation_budget`; raises BadInput."""
        return parse_budget(self.activation_budget)

    @property
    def late(self) -> tuple[int, ...]:
        """The ranks in `late_ranks`, in order; raises BadInput."""
        allowed = "it has to be ranks of a data-parallel group, each once, such as 2 or 2,5"
        given = self.late_ranks
        if not isinstance(given, str) or not re.fullmatch(r"( *[0-9]{1,6} *(,(?=.)|$))*", given):
            raise BadInput("late_ranks", given, allowed)
        late = sorted(int(one) for one in given.split(",") if one.strip())
        if len(set(late)) < len(late):
            raise BadInput("late_ranks", given, allowed)
        return tuple(late)

    @property
    def counts(self) -> tuple[int, ...]:
        """The microbatches in `sync_counts`, by replica; empty for none. Raises BadInput."""
        given = self.sync_counts
        if not isinstance(given, str) or not re.fullmatch(
            r"( *0*[1-9][0-9]{0,8} *(,(?=.)|$))*", given
        ):
            allowed = "it has to be a number of microbatches for each replica, such as 9,9,9,5"
            raise BadInput("sync_counts", given, f"{allowed}, and at least 1 each")
        return tuple(int(one) for one in given.split(",") if one.strip())

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any], where: str) -> AdaptraConfig:
        """Settings from `data`, by their names; `where` is what a message calls their source.

        Raises BadInput for an unknown name, with the nearest known one, and for unusable values.
        """
        refuse_unknown(data, [f.name for f in fields(cls)], where)
        act = data.get("act")
        return cls(**{**(PRESETS.get(act, {}) if isinstance(act, str) else {}), **data})

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> AdaptraConfig:
        """Flags over `--adaptra-config FILE` over defaults; raises BadInput."""
        path, flag = getattr(args, "adaptra_config", None), "--adaptra-config"
        found = load_yaml(Path(path), flag) if path else {}
        cls.from_mapping(found, str(path))  # what is wrong in the file alone
        flags = {f.name: getattr(args, f"adaptra_{f.name}", None) for f in fields(cls)}
        given = {name: value for name, value in flags.items() if value is not None}
        try:
            return cls.from_mapping({**found, **given}, str(path))
        except BadInput as error:
            if error.field not in given:
                raise
            flag = f"--adaptra-{error.field.replace('_', '-')}"
            raise BadInput(flag, error.value, error.allowed) from None


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Register `--adaptra` and `--adaptra-...`, one group, in any argparse parser."""
    group = parser.add_argument_group("adaptra", "pipeline schedules that adapt to slow links")
    group.add_argument("--adaptra", action="store_true", help="switch the plugin on")
    group.add_argument(
        "--adaptra-dry-run",
        action="store_true",
        help="say what would be patched, the engine, and the plan for this shape; then leave",
    )
    group.add_argument(
        "--adaptra-config", metavar="FILE", help="YAML file with these settings; flags win"
    )
    for f in fields(AdaptraConfig):
        group.add_argument(f"--adaptra-{f.name.replace('_', '-')}", dest=f"adaptra_{f.name}",
                           default=None, **_argument(f))  # fmt: skip
    return parser


def _argument(f: Field[Any]) -> dict[str, Any]:
    default = [] if f.default is MISSING else f.default
    extra = {k: v for k, v in f.metadata.items() if k != "help"}
    if isinstance(default, list):
        return {"action": "append", "help": f.metadata["help"], **extra}
    if isinstance(default, bool):
        return {"action": "store_true", "help": f.metadata["help"], **extra}
    shown = "none" if default in ("", math.inf) else default
    return {"type": type(default), "help": f"{f.metadata['help']} (default: {shown})", **extra}


def load_yaml(path: Path, field: str = "file") -> dict[str, Any]:
    """The one mapping that a YAML file, named by `field`, holds; raises BadFile."""
    data = read_data(path, field)
    if not isinstance(data, dict):
        raise BadFile(field, str(path), "it has to hold keys and values")
    return data
