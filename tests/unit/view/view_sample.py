"""A report like the demo's: 4 stages x 12 microbatches, 40 ms on link 2-3."""

from __future__ import annotations

import functools
import random
from typing import Any, cast

from benchmarks.common import both_ways
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.timeline import Message, Span, Timeline
from megatron_adaptra.plan import Plan, make_plan
from megatron_adaptra.view.gain import ADAPTED, NOT_YET
from megatron_adaptra.view.report import ArmReport, Report
from megatron_adaptra.view.summary import Summary, Times

SLOW = Conditions(
    12, (0.004,) * 4, (0.004,) * 4, (0.004,) * 4, both_ways({2: 0.04}), step_seconds=0.012
)
PHASES = {"healthy": (0, 14), "slow": (14, 40), "recovered": (40, 54)}


@functools.cache
def plan(policy: str, healthy: bool = False) -> Plan:
    return make_plan(SLOW.healthy() if healthy else SLOW, policy)


def measured(timeline: Timeline, seed: int = 1) -> Timeline:
    """The timeline as a noisy machine would run it: some 3 % slower, with jitter."""
    rng = random.Random(seed)

    def later(seconds: float) -> float:
        return 1.03 * seconds + 0.001

    spans = [
        Span(s.stage, s.op, later(s.start), later(s.end) - rng.random() * 0.1 * (s.end - s.start))
        for s in timeline.spans
    ]
    messages = [
        Message(m.source, m.target, m.op, later(m.sent), later(m.arrived) + rng.random() * 2e-4)
        for m in timeline.messages
    ]
    return Timeline(tuple(spans), tuple(messages), "measured")


def sample_report(**summary: Any) -> Report:
    """A complete report; keywords replace keys of its summary."""
    arms, phase_times, losses = [], {}, [4.2 - 0.01 * i for i in range(54)]
    for name, policy in (("stock", "1f1b"), ("adaptra", "warmup")):
        slow, healthy = plan(policy), plan(policy, healthy=True)
        ms = {
            "healthy": 1e3 * healthy.predicted * 1.02,
            "slow": 1e3 * slow.predicted * 1.04,
            "recovered": 1e3 * healthy.predicted * 1.02,
        }
        rng = random.Random(policy)
        times = []
        for phase, (first, end) in PHASES.items():
            times += [ms[phase] * (1 + 0.03 * rng.random()) for _ in range(first, end)]
        times[0] = 1900.0
        if name == "adaptra":
            times[14:17] = [700.0, 690.0, 695.0]
        phase_times[name] = {
            "phases": {phase: {"iteration_ms": t} for phase, t in ms.items()},
            "losses": losses,
            "predicted_slow_ms": 1e3 * slow.predicted,
            "measured_slow_ms": ms["slow"],
            "peak_in_flight": list(slow.peak_in_flight),
            "iteration_ms": times,
        }
        arms.append(ArmReport(name, measured(slow.timeline), slow.timeline))
    rng = random.Random(7)
    delays = {}
    for source, target in ((0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)):
        extra = 40.0 if {source, target} == {2, 3} else 0.0
        delays[f"{source}>{target}"] = [
            0.2 + rng.random() * 0.4 + (extra if 14 <= i < 40 else 0.0) for i in range(54)
        ]
    parts = [
        ("healthy", "", 0, 13), ("slow", NOT_YET, 14, 16), ("slow", ADAPTED, 18, 39),
        ("recovered", "", 40, 53),
    ]  # fmt: skip
    compared: list[Times] = []
    for phase, what, begin, last in parts:
        of_stock, ours = (
            phase_times[name]["phases"][phase]["iteration_ms"] for name in ("stock", "adaptra")
        )
        row: Times = {
            "phase": phase, "what": what, "first_iteration": begin, "last_iteration": last,
            "stock_ms": of_stock, "adaptra_ms": 695.0 if what == NOT_YET else ours, "noise": 0.02,
        }  # fmt: skip
        compared.append(row)
    stock = phase_times["stock"]["phases"]["slow"]["iteration_ms"]
    adaptra = phase_times["adaptra"]["phases"]["slow"]["iteration_ms"]
    data: dict[str, Any] = {
        "config": {
            "stages": 4,
            "microbatches": 12,
            "data_parallel": 1,
            "num_layers": 8,
            "hidden_size": 256,
            "seq_length": 128,
            "iterations": 54,
            "slow_links": ["2-3:40ms"],
            **{key: [] for key in ("slow_workers", "slow_paths", "late_ranks", "slow_replicas")},
            **{key: [] for key in ("slow_hosts", "hosts")},
            "from_iteration": 14,
            "engine": "native",
        },
        "arms": phase_times,
        "workers": None,
        "losses_identical": True,
        "parameters_identical": True,
        "losses_difference": 0.0,
        "parameters_difference": 0.0,
        "equal_to_rounding": False,
        "interrupted": None,
        "times": compared,
        "speedup_slow": stock / adaptra,
        "slowdown_healthy": 0.5,  # what no page shows: the table's figure is the only one
        "compared": {
            "phase": "slow",
            "first_iteration": 18,
            "last_iteration": 39,
            "warmup": [11, 10, 9, 1],
            "since_iteration": 17,
        },
        "notes": ["The machine was busy: other processes used 47 % (slow) of the CPU time."],
        "replans": [
            {
                "iteration": 17,
                "why": "links 2->3 and 3->2 rose from 0.3 to 40.2 ms, confirmed 2 of 3 times",
                "warmup_before": [4, 3, 2, 1],
                "warmup_after": [11, 10, 9, 1],
                "predicted_ms": 272.0,
                "measured_ms": 281.4,
            },
            {
                "iteration": 43,
                "why": "links 2->3 and 3->2 are healthy again",
                "warmup_before": [11, 10, 9, 1],
                "warmup_after": [4, 3, 2, 1],
                "predicted_ms": 192.0,
                "measured_ms": 195.8,
            },
        ],
        "all_reduces": [],
        "shares": [],
        "detected_after_iterations": 3,
        "memory": {
            "budget": [12.0, 12.0, None, None],
            "predicted_peak": [11.0, 10.05, 9.0, 1.0],
            "measured_peak": [11.0, 10.05, 9.0, 1.0],
            "predicted_peak_bytes": [2039840, 1970176, 1970176, 2369872],
            "bytes_per_microbatch": [185440, 196037, 218908, 2369872],
            "measured_peak_bytes": None,
        },
        "machine": {"cores": 4, "load_average": [1.0, 1.0, 1.0], "cpu_share": {}},
        "versions": {"megatron_adaptra": "0.1.0", "megatron_core": "0.16.0", "torch": "2.9.0+cpu"},
    }
    full = cast(Summary, {**data, **summary})
    return Report("Megatron-Adaptra demo", full, arms, PHASES, delays)
