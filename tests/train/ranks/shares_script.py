"""One rank of test_share_gradients.py: gradients under shares, and in one process.

Prints one JSON line per case, from rank 0: what each rank has found. With one rank it writes what
the same microbatches give in one process, instead. Arguments: a file with the cases, a folder.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_adaptra.adapter.baseline import cpu

cpu.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state as mpu  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.tensor_parallel import random as mpu_random  # noqa: E402
from rank_of_job import of_all_ranks, show  # noqa: E402

from megatron_adaptra.adapter.baseline import gpt  # noqa: E402
from megatron_adaptra.adapter.baseline.shape import GPTShape  # noqa: E402
from megatron_adaptra.adapter.entry.activate import activate  # noqa: E402
from megatron_adaptra.config import AdaptraConfig  # noqa: E402
from megatron_adaptra.ir.sync import SyncPlan  # noqa: E402
from megatron_adaptra.measure.replica_speed import ReplicaRow  # noqa: E402

VOCABULARY, LENGTH, LAYERS = 32, 8, 2
SCALE = 8.0  # of losses, as an optimizer for half precision has one


def model_of(stages: int, per_token: bool) -> tuple[Any, Any]:
    """This stage's part, in double precision; parameters follow from their names."""
    shape = GPTShape(stages, layers=LAYERS, hidden=16, heads=2, seq_length=LENGTH, dropout=0.0)
    mpu_random.model_parallel_cuda_manual_seed(1)
    config = gpt._config(shape)
    config.params_dtype = config.pipeline_dtype = torch.float64
    config.calculate_per_token_loss = per_token
    model = GPTModel(
        config=config, transformer_layer_spec=get_gpt_layer_local_spec(), vocab_size=VOCABULARY,
        max_sequence_length=LENGTH, pre_process=mpu.is_pipeline_first_stage(True),
        post_process=mpu.is_pipeline_last_stage(True), share_embeddings_and_output_weights=True,
    ).double()  # fmt: skip
    for name, parameter in model.named_parameters():
        seed = int.from_bytes(hashlib.sha256(whole_name(name).encode()).digest()[:6], "big")
        values = torch.randn(
            parameter.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        parameter.data.copy_(values * 0.2 + (1.0 if "norm" in name and "weight" in name else 0.0))
    return config, model


def whole_name(name: str) -> str:
    """What a parameter is called in the model of one process."""
    if name == "output_layer.weight":  # tied: of the last of several stages
        return "embedding.word_embeddings.weight"
    parts = name.split(".")
    if "layers" in parts:
        at = parts.index("layers") + 1
        each = LAYERS // mpu.get_pipeline_model_parallel_world_size()
        parts[at] = str(int(parts[at]) + each * mpu.get_pipeline_model_parallel_rank())
    return ".".join(parts)


def sample(index: int) -> dict[str, torch.Tensor]:
    """Tokens, and a mask that leaves some of them out, in each sample another number."""
    generator = torch.Generator().manual_seed(index)
    tokens = torch.randint(VOCABULARY, (1, LENGTH + 1), generator=generator)
    mask = torch.zeros(LENGTH, dtype=torch.float64)
    mask[: 1 + index % LENGTH] = 1.0
    return {"index": torch.tensor(index), "tokens": tokens, "mask": mask}


class Batches:
    """Of a `home` in one iteration, and of iterations after that: a sample each, by turns."""

    def __init__(self, replicas: int, first: int, home: int, fault: str = "") -> None:
        self._replicas, self._first, self._fault = replicas, first, fault
        self._indices = itertools.count(first + home, replicas)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        return sample(next(self._indices))

    def of_home(self, home: int) -> Batches:
        if self._fault == "unread":
            raise OSError("injected")
        if self._fault == "ends":
            raise StopIteration
        return Batches(self._replicas, self._first, home)


class Forward:
    """Megatron's forward_step_func; `ran`: the samples, in order. `form`: of the loss."""

    def __init__(self, form: str) -> None:
        self.form, self.ran = form, list[int]()

    def __call__(self, batches: Iterator[Any], model: Any) -> Any:
        batch = next(batches)
        self.ran.append(int(batch["index"]))
        positions = torch.arange(LENGTH).unsqueeze(0)
        output = model(batch["tokens"][:, :-1], positions, None)

        def loss(logits: torch.Tensor) -> Any:
            losses = torch.nn.functional.cross_entropy(
                logits.reshape(-1, VOCABULARY), batch["tokens"][0, 1:], reduction="none"
            )
            total, count = (losses * batch["mask"]).sum(), batch["mask"].sum()
            shown = {"loss": torch.stack([total.detach(), count])}
            if self.form == "mean":
                return total / count, shown
            return total, count.to(torch.int), shown

        return output, loss


def reference(case: dict[str, Any], folder: Path) -> None:
    """What an iteration's microbatches give in one process: gradients by name, and the loss."""
    per_token = case["form"] == "per token"
    _, model = model_of(1, per_token)
    total = sum(case["plans"][0])
    found = []
    for iteration in range(len(case["plans"])):
        model.zero_grad()
        forward, tokens, losses = Forward(case["form"]), 0.0, 0.0
        for index in range(iteration * total, (iteration + 1) * total):
            output, function = forward(iter([sample(index)]), model)
            loss, *_, shown = function(output)
            count = float(shown["loss"][1])
            part = loss if case["form"] == "mean" or per_token else loss / count
            part.backward()
            tokens, losses = tokens + count, losses + float(shown["loss"][0])
        scale = SCALE / total
        if per_token:  # Megatron divides 1 by the number of tokens in single precision
            scale = SCALE * float(1.0 / torch.tensor(int(tokens), dtype=torch.int))
        grads = {name: p.grad * scale for name, p in model.named_parameters()}
        found.append({"grads": grads, "loss": losses / tokens})
    torch.save(found, folder / f"{case['name']}.pt")


class Planned:
    """As Source: a plan for each iteration, and from some iteration on a `fault`."""

    def __init__(self, plans: list[list[int]], microbatches: int, fault: str, first: int) -> None:
        self._plans = [SyncPlan(microbatches, tuple(counts)) for counts in plans]
        self._fault, self._first = fault, first
        self.ended_with: list[list[int]] = []

    def begin(self, iteration: int, voted: tuple[int, ...] | None, microbatches: int) -> Any:
        assert voted is None
        plan = self._plans[min(iteration, len(self._plans) - 1)]
        if iteration < self._first or self._fault != "other counts":
            return plan
        return SyncPlan(plan.microbatches, plan.counts[::-1])

    def gives(self, iteration: int) -> tuple[None, None]:
        return None, None

    def starts(self, iteration: int) -> None:
        pass

    def ended(self, row: ReplicaRow) -> None:
        assert len(row.microbatches) == len(row.seconds)
        assert all(one > 0 for one in row.seconds)
        self.ended_with.append(list(row.microbatches))

    def close(self) -> None:
        pass


def shared(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """How far the same is from that on this rank, iteration by iteration."""
    replicas, stages = len(case["plans"][0]), case["stages"]
    each = sum(case["plans"][0]) // replicas
    config, model = model_of(stages, case["form"] == "per token")
    distributed = case["optimizer"] == "distributed"
    how = DistributedDataParallelConfig(
        overlap_grad_reduce=case["overlap"], use_distributed_optimizer=distributed,
        bucket_size=1000,
    )  # fmt: skip
    ddp = DistributedDataParallel(config, how, model)
    config.no_sync_func = ddp.no_sync
    if case["overlap"] and distributed:
        config.grad_sync_func = ddp.start_grad_sync
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = lambda loss: loss * SCALE
    settings = AdaptraConfig(
        sync="auto", engine=case["engine"], small_collectives="off", timeout=60.0, min_gain=1e9
    )
    wanted = torch.load(folder / f"{case['name']}.pt", weights_only=False)
    activation = activate(settings)
    fault = case["fault"] if dist.get_rank() in case["ranks"] else ""
    source = Planned(case["plans"], each, fault, case["first"])
    activation.shares._source = source
    function, out = gpt.forward_backward_function(), []
    try:
        for iteration, expected in enumerate(wanted):
            ddp.zero_grad_buffer()
            forward = Forward(case["form"])
            now = fault if iteration + 1 >= case["first"] else ""  # what it reads ahead is for
            home = mpu.get_data_parallel_rank()
            batches = Batches(replicas, iteration * each * replicas, home, now)
            losses = function(
                forward_step_func=forward, data_iterator=[batches], model=[ddp],
                num_microbatches=each, seq_length=LENGTH, micro_batch_size=1, forward_only=False,
            )  # fmt: skip
            pairs = torch.zeros(2, dtype=torch.float64)
            for one in losses:
                pairs += one["loss"]
            dist.all_reduce(pairs, group=mpu.get_data_parallel_group())
            loss = float(pairs[0] / pairs[1]) if losses else None
            out.append(
                {
                    "apart": apart(ddp, expected["grads"], distributed, case["overlap"]),
                    "loss": loss and abs(loss / expected["loss"] - 1),
                    "plan": list(activation.shares.plan.counts),
                    "ran": forward.ran,
                    "next": int(next(batches)["index"]),
                }
            )
    finally:
        activation.undo()
    place = [mpu.get_data_parallel_rank(), mpu.get_pipeline_model_parallel_rank()]
    return {"place": place, "iterations": out, "ended": source.ended_with}


def apart(ddp: Any, wanted: dict[str, torch.Tensor], distributed: bool, overlap: bool) -> float:
    """The largest difference of a gradient on this rank, relative to the largest gradient."""
    names = {parameter: whole_name(name) for name, parameter in ddp.module.named_parameters()}
    largest, seen = 0.0, 0
    size, rank = mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
    for buffer in ddp.buffers:
        for bucket in buffer.buckets:
            expected = torch.zeros_like(bucket.grad_data)
            for parameter in bucket.params_list:
                begin, end, _ = buffer.param_index_map[parameter]
                place = slice(begin - bucket.offset, end - bucket.offset)
                expected[place] = wanted[names[parameter]].flatten()
            own = slice(None)
            if distributed:  # after its reduce-scatter a rank has its shard
                each = bucket.grad_data.numel() // size
                own = slice(rank * each, (rank + 1) * each)
            assert bucket.grad_data.dtype is torch.float64
            largest = max(largest, float((bucket.grad_data - expected)[own].abs().max()))
            seen += 1
    several = overlap and mpu.is_pipeline_first_stage()
    assert seen > several, "several buckets, as Megatron has them on first stages"
    return largest / max(float(one.abs().max()) for one in wanted.values())


def main() -> None:
    cases, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    dist.init_process_group("gloo")
    alone, stages = dist.get_world_size() == 1, 0
    for case in cases:
        if (1 if alone else case["stages"]) != stages:
            if stages:
                mpu.destroy_model_parallel()
            stages = 1 if alone else case["stages"]
            gpt.initialize(GPTShape(stages), timeout=60)
        if alone:
            reference(case, folder)
        else:
            show("CASE", {"name": case["name"], "ranks": of_all_ranks(shared(case, folder))})
    dist.destroy_process_group()


main()
