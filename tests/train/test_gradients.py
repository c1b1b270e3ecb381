"""Gradients reduced by a plan train as Megatron's all-reduce does, up to the order of summation."""

from __future__ import annotations

import json
import tempfile
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from running import zygote
from transport.ranks import RankFixture, run

from megatron_adaptra.adapter.entry import flags
from megatron_adaptra.adapter.entry.plugin import Plugin
from megatron_adaptra.adapter.step import planned_groups
from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.config import AdaptraConfig
from megatron_adaptra.ir.collective import Goal
from megatron_adaptra.plan.reductions.builders import direct
from megatron_adaptra.run import _check_flags

RANKS = 4
QUICK = "overlap"


def trained(part: str, *cases: str) -> tuple[dict[str, list[dict[str, Any]]], str]:
    """By case, what each rank has found; and all that was printed. All run in the same ranks."""
    with tempfile.TemporaryDirectory() as folder:
        words = [str(Path(__file__).parent / "ranks" / "gradients_script.py"), folder, part, *cases]
        done = zygote(False).run(Path(folder), words, ranks=RANKS, timeout=600, ends=False)
    assert done.status == 0, done.text[-4000:]
    rows = [json.loads(line[5:]) for line in done.texts[0].splitlines() if line[:5] == "CASE "]
    return {row[0]["case"]: row for row in rows}, done.text


CASES = {  # which ranks have the same parameters, and how many reduce together
    "replicas": ([{0, 1, 2, 3}], {"4"}),
    "overlap": ([{0, 1, 2, 3}], {"4"}),
    "bf16": ([{0, 1, 2, 3}], {"4"}),
    "pipelines": ([{0, 1}, {2, 3}], {"2"}),
    "average": ([{0, 1, 2, 3}], {"4"}),
    "experts": ([{0, 2}, {1, 3}], {"2", "4"}),
}


@pytest.mark.timeout(700)
def test_losses_are_those_of_megatron(pytestconfig: pytest.Config) -> None:
    """What a plan does not reduce is left to Megatron."""
    found, text = trained("gradients", *[QUICK] * pytestconfig.getoption("--quick"))
    for case, rows in found.items():
        alike, sizes = CASES[case]
        for row in rows:
            native, ours = row["native"], row["direct"]
            assert set(ours["calls"]) == sizes, case
            close = 1e-2 if case == "bf16" else 1e-5
            assert ours["losses"] == pytest.approx(native["losses"], rel=close), case
            assert ours["norms"] == pytest.approx(native["norms"], rel=close), case
            same = {"late", "gloo", "plan.txt", "voted"}.intersection(row)  # in the ranks' order
            if case == "pipelines":  # the file is for four ranks
                same.remove("plan.txt")
                assert row["plan.txt"] == {**native, "calls": {}}
            for way in same:
                assert row[way] == ours, (case, way)
            for way in {"auto", "half.txt"}.intersection(row):  # nobody was found to be late
                assert row[way] == {**native, "calls": {}}, (case, way)
            assert row["stragglar"]["losses"] == pytest.approx(native["losses"], rel=close), case
            assert set(row["stragglar"]["calls"]) == sizes - {"2"}  # it needs four ranks
            if case == "pipelines":  # of two replicas: one order
                assert ours["parameters"] == native["parameters"]
        for some in alike:
            for way in ("direct", "stragglar"):
                assert len({rows[rank][way]["parameters"] for rank in some}) == 1, case
    # Each once, at rank 0 of those that reduce together.
    assert text.count("half.txt is of another goal: reduce-scatter") == ("replicas" in found)
    assert ("plan.txt is for 4 ranks, here is 2" in text) == ("pipelines" in found)


def checked(config: AdaptraConfig, monkeypatch: pytest.MonkeyPatch, **sizes: int) -> str:
    """What the plugin refuses about `config` at the start of a training of four replicas."""
    monkeypatch.setattr(flags, "refuse", lambda args: None)
    plugin = Plugin()
    plugin.config = config
    sizes = {"data_parallel_size": 4, "pipeline_model_parallel_size": 1, **sizes}
    with pytest.raises(BadInput) as caught:
        plugin._check(types.SimpleNamespace(**sizes))
    return str(caught.value)


@pytest.mark.parametrize("late", ["4", "0,1,2,3"])
def test_late_ranks_out_of_range(late: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checked(AdaptraConfig(allreduce="direct", late_ranks=late), monkeypatch) == (
        f"--adaptra-late-ranks '{late}': data-parallel ranks are 0 to 3, of whom one has to be left"
    )


def test_a_plan_in_a_file_is_checked_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "plan.txt"
    config = AdaptraConfig(allreduce=str(file))
    line = checked(config, monkeypatch)
    assert line.endswith("one of native, auto, direct, stragglar, or a file with a collective plan")
    file.write_text(direct([1] * 4).text())
    assert "for 4 ranks': there are 8" in checked(config, monkeypatch, context_parallel_size=2)
    file.write_text(direct([1] * 5).text())
    line = checked(config, monkeypatch)
    assert line.startswith(f"--adaptra-allreduce '{file}': in it, ")
    assert "for 5 ranks': there are 4" in line
    file.write_text(direct([1] * 4).text().replace("A0=0+1+2+3", "A0=0+1+3", 1))
    assert "rank 0 does not receive it" in checked(config, monkeypatch)
    with pytest.raises(BadInput, match="rank 0 does not receive it"):  # the launcher finds it, too
        _check_flags(["--adaptra", f"--adaptra-allreduce={file}"])


def differing(me: RankFixture) -> list[str]:
    """What ranks find that differ in nothing, a setting, a buffer's size, both, and in all."""
    found = []
    cases = ((0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0), (1, 1, 1))
    for size, overlaps, gpu in cases:
        config = types.SimpleNamespace(
            overlap_grad_reduce=bool(overlaps and me.rank == 1), average_in_collective=False,
            grad_reduce_in_fp32=False, bucket_size=None,
        )  # fmt: skip
        bucket = types.SimpleNamespace(grad_data=torch.zeros(8 + size * (me.rank == 2)))
        buckets = types.SimpleNamespace(ddp_config=config, buckets=[bucket])
        device = "out of reach: it is not for us" if gpu and me.rank == 1 else "cuda"
        found.append(planned_groups.difference_of(dist.group.WORLD, buckets, device))
    return found


def test_ranks_that_differ_stay_with_megatron_and_the_first_difference_is_named() -> None:
    setting = "overlap_grad_reduce is True on rank 1, False on rank 0"
    size = "buckets is ['9 torch.float32'] on rank 2, ['8 torch.float32'] on rank 0"
    gpu = "device is out of reach: it is not for us on rank 1, cuda on rank 0"
    assert run("gloo", differing, ranks=3) == [["", setting, size, setting, gpu]] * 3


@pytest.mark.parametrize("goal", [Goal.ALL_REDUCE, Goal.REDUCE_SCATTER])
def test_of_more_ranks_than_auto_chooses_for_none_are_connected(goal: Goal) -> None:
    from megatron_adaptra.adapter.limits import REDUCTIONS, Collective, why_not

    assert why_not(REDUCTIONS, Collective("auto", None, goal, 128)) == ""
    why = "auto chooses for at most 128 ranks, here are 129"
    assert why_not(REDUCTIONS, Collective("auto", None, goal, 129)) == why


def numbered(me: RankFixture) -> list[tuple[int, ...]]:
    """Which ranks are late of all, of two groups of two, and between these."""
    from megatron_adaptra.adapter.step import planned_collectives
    from megatron_adaptra.adapter.step.gradients import GradientReduction

    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planned_collectives, "data_parallel_number", lambda: me.rank)
        for late in ("2", "0,1"):
            reduction: Any = GradientReduction.__new__(GradientReduction)
            reduction._config = AdaptraConfig(allreduce="direct", late_ranks=late)
            apart = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][me.rank % 2]
            instance = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][me.rank // 2]
            found.append(reduction._late_in(dist.group.WORLD, None))
            found.append(reduction._late_in(apart, None))
            found.append(reduction._late_in(apart, instance))
    return found


def test_a_late_rank_has_another_number_in_a_smaller_group() -> None:
    """Rank 2 is the second of its group, and its whole instance is late."""
    rows = run("gloo", numbered, ranks=4)
    of_two, of_an_instance = [(2,), (1,), (1,)], [(0, 1), (0,), (0,)]
    assert rows[0] == rows[2] == [*of_two, *of_an_instance]
    assert rows[1] == rows[3] == [(2,), (), (1,), *of_an_instance]
