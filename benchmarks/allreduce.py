"""Where each all-reduce wins, to 1,024 ranks, with one late rank: `python benchmarks/allreduce.py`.

Predicted, not measured: closed forms (megatron_adaptra/model/all_reduce_forms.py) over published
bandwidths. `--clock 64` runs the plans for so many ranks message by message instead, and prints how
far the forms are from that.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from common import equal_ports, markdown, save
from gantt_png import INK, SOFT, write_header
from gantt_png import save as save_png

from megatron_adaptra.cli.output import Table, progress, say, show_table
from megatron_adaptra.model.all_reduce_forms import ALGORITHMS, AllReduce, seconds_after_arrival
from megatron_adaptra.plan.reductions.sized import MESSAGE, pieces_for, sized
from megatron_adaptra.sim.ports import run_on_ports
from megatron_adaptra.view.axis import size
from megatron_adaptra.view.theme import ADAPTRA, BOX_TEXT, OTHER, STOCK, lighter


class Network(NamedTuple):
    """A port's bytes per second each way, seconds between ports, and of a message's sender."""

    name: str
    rate: float
    delay: float
    cost: float


# NVLink 4 of an H100: 900 GB/s in both directions together (NVIDIA), written as 450 GiB/s with 3 us
# per message in the simulation of StragglAR's authors. InfiniBand NDR: 400 Gb/s per GPU of a DGX
# H100; 14 us per step is what NCCL's tuner counts (src/graph/tuning.cc, ring, Simple, network), of
# which 3 us are taken for the sender's. Ethernet: the rate, and this project's cost of a message.
NETWORKS = (
    Network("NVSwitch, 450 GiB/s", 450 * 2.0**30, 0.0, 3e-6),
    Network("InfiniBand NDR, 400 Gb/s", 50e9, 11e-6, 3e-6),
    Network("Ethernet, 100 Gb/s", 12.5e9, 30e-6, MESSAGE),
    Network("Ethernet, 10 Gb/s", 1.25e9, 30e-6, MESSAGE),
)
RANKS = 8, 64, 256, 1024
SIZES = tuple(1 << power for power in range(20, 33, 2))  # 1 MiB to 4 GiB
LATE = 0, 0.25, 0.5, 1, 2, 4  # times of one buffer through a port
CLASSIC = "ring", "halving-doubling"
COLOURS = dict(zip(ALGORITHMS, (STOCK, OTHER[1], OTHER[5], ADAPTRA, OTHER[0]), strict=True))

# Speed-up over a ring, one piece per owner, 1 GiB, on NVSwitch: what the simulation script of
# StragglAR's authors gives, and what the paper (arXiv 2505.23523, version 2) measured: 25 % on 8
# GPUs, and about 2 simulated for 256.
PAPER_MODEL = {
    4: 1.13, 6: 1.19, 8: 1.36, 12: 1.35, 16: 1.56, 24: 1.63, 32: 1.72, 64: 1.83, 128: 1.90,
    256: 1.94,
}  # fmt: skip
PAPER_MEASURED = {8: 1.25}


@dataclass(frozen=True)
class Cell:
    """The seconds after the arrival of the last rank of each algorithm, for one job."""

    network: str
    job: AllReduce
    seconds: dict[str, float]

    @property
    def winner(self) -> str:
        return min(self.seconds, key=lambda name: self.seconds[name])

    @property
    def gain(self) -> float:
        """How many times as fast the winner is as the best that asks not who is late."""
        return min(self.seconds[name] for name in CLASSIC) / self.seconds[self.winner]

    def to_json(self) -> dict[str, Any]:
        job = {"ranks": self.job.ranks, "bytes": self.job.nbytes, "late_ms": 1e3 * self.job.late}
        times = {name: 1e3 * seconds for name, seconds in self.seconds.items()}
        return {"network": self.network, **job, "ms_after_arrival": times, "winner": self.winner}


def job_of(network: Network, ranks: int, nbytes: float, late: float) -> AllReduce:
    """`late`: in times of one buffer."""
    job = AllReduce(ranks, nbytes, network.rate, network.delay, network.cost)
    return replace(job, late=late * job.buffer)


def cells() -> Iterator[Cell]:
    for network in NETWORKS:
        for ranks in RANKS:
            for nbytes in SIZES:
                for late in LATE:
                    yield cell(network, job_of(network, ranks, nbytes, late))


def cell(network: Network, job: AllReduce) -> Cell:
    seconds = {name: seconds_after_arrival(name, job, pieces_for(name, job)) for name in ALGORITHMS}
    return Cell(network.name, job, seconds)


def stragglar_points(ranks: int) -> tuple[float, float]:
    """Over the ring of whole chunks, as in the paper: with one piece per owner, and the best."""
    job = job_of(NETWORKS[0], ranks, 2.0**30, math.inf)
    ring = seconds_after_arrival("ring", job, 1)
    best = pieces_for("stragglar", job)
    one, many = (ring / seconds_after_arrival("stragglar", job, k) for k in (1, best))
    return one, many


def tables(results: Sequence[Cell]) -> Iterator[Table]:
    """Who wins where the last rank is late by one buffer; then the paper's points."""
    for ranks in RANKS:
        rows = []
        for network in NETWORKS:
            of = [
                c for c in results
                if (c.network, c.job.ranks) == (network.name, ranks)
                and math.isclose(c.job.late, c.job.buffer)
            ]  # fmt: skip
            rows.append((network.name, *(_words(c) for c in of)))
        head = ("late by one buffer", *map(size, SIZES))
        yield Table(f"{ranks} ranks", head, rows)
    head = ("ranks", "ours, one piece", "ours, best", "authors' model", "measured in the paper")
    rows = []
    for ranks, model in PAPER_MODEL.items():
        measured = PAPER_MEASURED.get(ranks)
        ours = (f"{ratio:.2f}" for ratio in stragglar_points(ranks))
        rows.append((str(ranks), *ours, f"{model:.2f}", f"{measured:.2f}" if measured else ""))
    yield Table("StragglAR over a ring, 1 GiB on NVSwitch", head, rows)


def _words(found: Cell) -> str:
    return found.winner + f" {found.gain:.2f}" * (found.winner not in CLASSIC)


def by_clock(ranks: int) -> Table:
    """The forms beside the clock of ports, for a buffer that is late by 0, 1 and 4 times itself."""
    rows = []
    for network in NETWORKS:
        for late in (0, 1, 4):
            job = job_of(network, ranks, 2.0**30, late)
            row = [f"{network.name}, late by {late}"]
            for name in ALGORITHMS:
                with progress(f"{row[0]}, {name}", lines=True):
                    run = run_on_ports(
                        sized(name, job, [ranks - 1]),
                        int(job.nbytes),
                        equal_ports([job.rate] * ranks, job.delay, job.cost),
                        [0.0] * (ranks - 1) + [job.late],
                    )
                    form = seconds_after_arrival(name, job, pieces_for(name, job))
                    row.append(f"{form / run.after_arrival:.2f}")
            rows.append(row)
    return Table(f"{ranks} ranks, 1 GiB: form / clock", ("", *ALGORITHMS), rows)


def draw(path: Path, results: Sequence[Cell]) -> None:
    """Raises ImportError where matplotlib is not installed."""
    head, map_, chart, foot = 1.95, 1.62, 2.6, 0.75

    def fill(figure: Any, height: float) -> None:
        write_header(
            figure, height, "Which all-reduce is fastest while one rank is late",
            "From the arrival of the late rank to the end, predicted. Numbers: times as fast as the"
            " better of ring and halving-doubling, which wait for the late rank.",
            "Lateness in times of one buffer through a port; sizes of the buffer from left to "
            "right.",
        )  # fmt: skip
        legend(figure, (height - 1.3) / height)
        for i, network in enumerate(NETWORKS):
            for j, ranks in enumerate(RANKS):
                bottom = height - head - (i + 1) * map_ + 0.32
                at = (0.075 + 0.233 * j, bottom / height, 0.215, (map_ - 0.5) / height)
                of = [
                    c for c in results if (c.network, c.job.ranks) == (network.name, ranks)
                ]  # fmt: skip
                draw_map(figure.add_axes(at), of, f"{network.name}: {ranks} ranks", j == 0)
        draw_points(figure.add_axes((0.075, foot / height, 0.9, (chart - 0.7) / height)))

    save_png(path, head + map_ * len(NETWORKS) + chart + foot, fill)


def legend(figure: Any, y: float) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=lighter(c, 1), label=name) for name, c in COLOURS.items()]
    figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.02, y), ncols=len(handles),
                  frameon=False, fontsize=9.5, handlelength=1.2)  # fmt: skip


def draw_map(axes: Any, of: Sequence[Cell], title: str, left: bool) -> None:
    """A box for each size and lateness, in the colour of the fastest."""
    from matplotlib.patches import Rectangle

    for at, found in enumerate(of):
        x, y = divmod(at, len(LATE))
        fill = lighter(COLOURS[found.winner], 1)
        axes.add_patch(Rectangle((x, y), 0.96, 0.94, facecolor=fill))
        if found.winner not in CLASSIC:
            style = {"ha": "center", "va": "center", "fontsize": 7, "color": BOX_TEXT}
            axes.text(x + 0.48, y + 0.47, f"{found.gain:.2f}", **style)
    axes.set_xlim(0, len(SIZES))
    axes.set_ylim(0, len(LATE))
    axes.set_xticks([x + 0.48 for x in range(len(SIZES))], [size(n) for n in SIZES])
    axes.set_yticks([y + 0.47 for y in range(len(LATE))], [f"{late:g}" for late in LATE])
    axes.tick_params(length=0, labelsize=6.5, labelleft=left)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.set_title(title, loc="left", fontsize=8.5, fontweight="bold", pad=4)
    if left:
        axes.set_ylabel("late by", fontsize=7.5)


def draw_points(axes: Any) -> None:
    ranks = sorted({4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024})
    ours = [stragglar_points(count) for count in ranks]
    axes.plot(ranks, [best for _, best in ours], color=COLOURS["stragglar"], marker="o",
              markersize=3.5, label="ours, best number of pieces")  # fmt: skip
    axes.plot(ranks, [one for one, _ in ours], color=COLOURS["stragglar"], linestyle=(0, (4, 3)),
              label="ours, one piece per owner")  # fmt: skip
    axes.scatter(list(PAPER_MODEL), list(PAPER_MODEL.values()), s=46, facecolor="none",
                 edgecolor=INK, zorder=3, label="simulation script of the authors")  # fmt: skip
    axes.scatter(list(PAPER_MEASURED), list(PAPER_MEASURED.values()), s=60, marker="x", color=INK,
                 zorder=3, label="measured in the paper, 8 GPUs")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks([4, 8, 16, 32, 64, 128, 256, 512, 1024])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylim(1, 2.05)
    axes.grid(color="#e8ecf0", linewidth=0.8)
    axes.tick_params(length=0, labelsize=8)
    axes.legend(frameon=False, fontsize=8.5, loc="lower right")
    axes.set_xlabel("ranks", fontsize=8.5, color=SOFT)
    axes.set_title("StragglAR over a ring of whole chunks, 1 GiB on NVSwitch, late by 4 buffers "
                   "and more", loc="left", fontsize=10.5, fontweight="bold", pad=8)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Where each all-reduce wins while a rank is late")
    add = parser.add_argument
    add("--clock", type=int, metavar="N", help="compare the forms with the clock for N ranks")
    add("--out", metavar="DIR", help="write allreduce.json and allreduce.png there")
    add("--markdown", action="store_true", help="print the tables as Markdown")
    args = parser.parse_args()
    results = list(cells())
    for table in [by_clock(args.clock)] if args.clock else tables(results):
        if args.markdown:
            say(markdown(table))
        else:
            show_table(table)
    if args.out:
        folder = Path(args.out)
        folder.mkdir(parents=True, exist_ok=True)
        save(folder / "allreduce.json", 1, [result.to_json() for result in results])
        draw(folder / "allreduce.png", results)


if __name__ == "__main__":
    main()
