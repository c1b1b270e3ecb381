"""Megatron's own training program, run from its flags to its end. Every training serves several
tests; those marked `cold` start through torchrun and our launcher, as a user's do.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from patience import decided, in_time
from processes import outliving
from running import zygote
from trainings import (
    EVALUATION,
    SCRIPT,
    SLOW,
    Done,
    needs_training,
    stock,
    train,
    train_cold,
    words_of,
)

pytestmark = [needs_training, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pretrain")


@pytest.fixture(scope="module")
def plain() -> Done:
    return stock(4, *EVALUATION, iterations=20).done


@pytest.fixture(scope="module")
def adapted(folder: Path) -> Done:
    """A slow link from the start, with evaluation, charts and checkpoints."""
    out = folder / "adapted"
    charts = ("--tensorboard-dir", str(out / "charts"), "--tensorboard-log-interval", "1")
    saves = ("--save", str(out / "saved"), "--save-interval", "10")
    return train(out, 4, *EVALUATION, *charts, *saves, *SLOW, iterations=20)


def test_losses_and_evaluations_are_those_of_stock(plain: Done, adapted: Done) -> None:
    assert len(plain.printed) == 20
    assert adapted.printed == plain.printed
    assert len(plain.evaluated) >= 3
    assert adapted.evaluated == plain.evaluated
    assert float(plain.printed[-1][0]) < float(plain.printed[0][0]), "the model has to learn"
    assert re.search(r"^user flag: \S+adapted$", adapted.text, re.MULTILINE)


def test_a_slow_link_costs_less_than_in_stock(adapted: Done, folder: Path) -> None:
    slow_stock = train(folder / "slow", 4, *SLOW, "--adaptra-engine", "stock", iterations=8)
    deepest = max(adapted.plans[0])
    decided("a deeper plan by the checkpoint that is resumed", max(adapted.plans[10]) > deepest)
    decided("a deeper plan at the end", max(adapted.plans[-1]) > deepest)
    in_time("an adapted iteration", 1.5 * adapted.milliseconds(), slow_stock.milliseconds())


def test_every_log_line_and_tensorboard_show_what_the_iteration_ran(
    adapted: Done, folder: Path
) -> None:
    assert len(adapted.plans) == 20
    changes = re.findall(r"from iteration (\d+) on, .*\(warmup (\S+) -> (\S+)\)", adapted.text)
    decided("a plan", bool(changes))
    for first, *depths in changes:
        shown = adapted.plans[int(first) - 2 : int(first)]
        assert [",".join(map(str, plan)) for plan in shown] == depths
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    written = events.EventAccumulator(str(folder / "adapted" / "charts"))
    written.Reload()
    scalars = written.Tags()["scalars"]
    depths = [f"adaptra/warmup/stage-{stage}" for stage in range(4)]
    assert set(depths) <= set(scalars)
    assert any(name.startswith("adaptra/delay-ms/") for name in scalars)
    each = [[int(one.value) for one in written.Scalars(name)] for name in depths]
    assert list(map(list, zip(*each, strict=True))) == adapted.plans


def test_a_resumed_training_goes_on_with_its_plan(adapted: Done, folder: Path) -> None:
    saved = folder / "adapted" / "saved"
    assert (saved / "iter_0000010" / "adaptra-replica0.json").is_file()
    (saved / "latest_checkpointed_iteration.txt").write_text("10")
    load = ("--load", str(saved))
    resumed = train(folder / "resumed", 4, *EVALUATION, *load, *SLOW, iterations=20)
    whole = adapted.printed[10:]
    # Megatron's second line after every start shows the mean loss of two iterations.
    whole[1] = resumed.printed[1][0], whole[1][1]
    assert resumed.printed == whole
    # Deeper than at the start: see test_a_slow_link_costs_less_than_in_stock.
    assert resumed.plans[0] == adapted.plans[10]


@pytest.mark.cold
def test_started_as_a_users_it_ends_with_0_and_leaves_no_process(folder: Path) -> None:
    """With the plugin and without, which then imports nothing and says nothing."""
    out, early = folder / "two", ("--exit-interval", "7")
    ours = train_cold(out, 2, *early, "--adaptra", iterations=20)
    theirs = train_cold(out, 1, *early, iterations=20)
    assert outliving(str(out)) == {}
    assert len(ours.plans) == len(ours.printed) == 7
    for ranks, done in ((2, ours), (1, theirs)):
        assert done.printed == stock(ranks, *early, iterations=20).done.printed

    modules = {"megatron_adaptra.adapt.leader", "megatron_adaptra.transport.gloo"}
    assert modules <= loaded(ours)
    assert not modules & loaded(theirs)
    assert "adaptra: " not in theirs.text


def loaded(done: Done) -> set[str]:
    found = re.search(r"^modules: (.*)", done.text, re.MULTILINE)
    assert found
    return set(found[1].split())


def test_what_cannot_be_written_ends_no_training(folder: Path) -> None:
    """The log of decisions, standard error, and the plan beside a checkpoint."""
    out = folder / "full"
    log, plan = out / "log", out / "saved" / "iter_0000006" / "adaptra-replica0.json"
    plan.mkdir(parents=True)  # so that no file can take its place
    log.symlink_to("/dev/full")
    flags = (
        "--adaptra", "--adaptra-emulate-link", "0-1:40ms", "--adaptra-decision-log", str(log),
        "--save", str(out / "saved"), "--save-interval", "6",
    )  # fmt: skip
    words = words_of(out, 2, *flags, iterations=12)
    script = str(SCRIPT.with_name("broken_output.py"))
    done = zygote(True).run(out, [script, *words], ranks=2)
    assert done.status == 0, done.text[-3000:]
    ours = Done(done.status, done.text)
    assert len(ours.printed) == len(ours.plans) == 12
    assert ours.printed == stock(2, iterations=12).done.printed
    assert plan.is_dir()
    assert log.is_symlink()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("forward_step", "forward_step has no parameter"),
        ("fork", r"gives (__main__|changed_megatron)\.fork_schedule, not a schedule of Megatron's"),
    ],
)
def test_a_megatron_that_does_not_fit_trains_as_stock_with_one_warning(
    change: str, words: str, folder: Path
) -> None:
    changed = [str(SCRIPT.with_name("changed_megatron.py")), change]

    def run(*flags: str) -> Done:
        flags = words_of(folder, 2, "--adaptra", *flags, iterations=6)
        done = zygote(True).run(folder / change, [*changed, *flags], ranks=2)
        return Done(done.status, done.text)

    ours = run()
    assert ours.status == 0, ours.text[-3000:]
    assert len(ours.printed) == 6
    assert ours.printed == stock(2, iterations=6).done.printed
    printed = re.findall(r"^adaptra: (.*)", ours.text, re.MULTILINE)
    assert len(printed) == 1
    assert re.search(f"training goes on as stock Megatron.*{words}", printed[0])
    strict = run("--adaptra-strict")
    assert strict.status != 0
    assert re.findall(f"^adaptra: (.*{words}.*)", strict.text, re.MULTILINE)
    assert strict.printed == []
