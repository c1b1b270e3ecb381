"""A real GPT of megatron-core on real text: the model that the demo and the tests train.

Everything here is megatron-core's own: GPTModel, its DistributedDataParallel, optimizer, dataset
and gradient finalisation. Import it after `cpu.install()` on a machine without CUDA.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import random as mpu_random
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

VOCABULARY = 257  # 256 bytes and the end of a document


@dataclass(frozen=True)
class GPTShape:
    """What is trained: `layers` over `stages`, `microbatches` of one sequence per iteration."""

    stages: int = 4
    microbatches: int = 12
    layers: int = 4
    hidden: int = 64
    heads: int = 4
    seq_length: int = 64
    dropout: float = 0.1
    precision: str = "fp32"
    seed: int = 1234


def initialize(stages: int, timeout: float) -> None:
    """Megatron's process groups, over the default group that torchrun's variables describe.

    `timeout`: seconds after which a message of Megatron's own pipeline is given up.
    """
    mpu.initialize_model_parallel(
        pipeline_model_parallel_size=stages, distributed_timeout_minutes=timeout / 60
    )


def forward_backward_function() -> Any:
    """What a training loop fetches: Megatron's own, or ours once the plugin is active."""
    return schedules.get_forward_backward_func()


def write_dataset(text: Path | None, folder: Path, limit: int = 2_000_000) -> Path:
    """Text as bytes in Megatron's indexed format; returns the prefix of its .bin and .idx.

    `text`: a file or a folder; None takes the Python standard library's own source, which is on
    every machine. `limit`: bytes of text used.
    """
    root = Path(json.__file__).parents[1] if text is None else text
    files = [root] if root.is_file() else sorted(root.glob("**/*" if text else "*.py"))
    shutil.rmtree(folder, ignore_errors=True)  # Megatron's index cache knows texts by path only
    folder.mkdir(parents=True)
    prefix = folder / "text"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    left = limit
    for path in files:
        data = path.read_bytes()[:left] if path.is_file() else b""
        if data:
            tokens = np.frombuffer(data, dtype=np.uint8).astype(np.uint16)
            builder.add_item(torch.from_numpy(np.append(tokens, np.uint16(256)).astype(np.int32)))
            builder.end_document()
            left -= len(data)
        if left <= 0:
            break
    builder.finalize(f"{prefix}.idx")
    return prefix


class _ByteTokenizer:
    """What GPTDataset asks of a tokenizer; the bytes themselves are the tokens."""

    eod = 256
    pad = -1
    vocab_size = VOCABULARY
    unique_identifiers: dict[str, str] = {"class": "bytes"}  # noqa: RUF012


def build_dataset(prefix: Path, shape: GPTShape, samples: int) -> Any:
    """GPTDataset with at least `samples` sequences. Every rank calls it; rank 0 indexes first."""
    config = GPTDatasetConfig(
        random_seed=shape.seed,
        sequence_length=shape.seq_length,
        blend=([str(prefix)], None),
        split="1,0,0",
        path_to_cache=str(prefix.parent / "cache"),
        tokenizer=_ByteTokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    builder = BlendedMegatronDatasetBuilder(GPTDataset, [samples, 0, 0], lambda: True, config)
    return builder.build()[0]


@dataclass
class Arm:
    """A model in training: everything of it that an iteration changes, random states included."""

    model: Any
    optimizer: Any
    config: Any
    shape: GPTShape
    dataset: Any
    random: tuple[torch.Tensor, dict[str, torch.Tensor]]
    consumed: int = 0

    @classmethod
    def build(cls, shape: GPTShape, dataset: Any) -> Arm:
        """The same seeds give the same arm, however often it is built."""
        mpu_random.model_parallel_cuda_manual_seed(shape.seed)
        torch.manual_seed(shape.seed + mpu.get_pipeline_model_parallel_rank())
        low = torch.bfloat16 if shape.precision == "bf16" else torch.float32
        config = TransformerConfig(
            num_layers=shape.layers,
            hidden_size=shape.hidden,
            num_attention_heads=shape.heads,
            pipeline_model_parallel_size=shape.stages,
            pipeline_dtype=low,
            params_dtype=low,
            bf16=shape.precision == "bf16",
            hidden_dropout=shape.dropout,
            attention_dropout=shape.dropout,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            bias_dropout_fusion=False,
            persist_layer_norm=False,
            deallocate_pipeline_outputs=True,
            attention_softmax_in_fp32=True,
        )
        model: Any = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(),
            vocab_size=VOCABULARY,
            max_sequence_length=shape.seq_length,
            pre_process=mpu.is_pipeline_first_stage(),
            post_process=mpu.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=True,
        )
        if shape.precision == "bf16":
            model = Float16Module(config, model)
        model = DistributedDataParallel(
            config, DistributedDataParallelConfig(overlap_grad_reduce=False), model
        )
        settings = OptimizerConfig(
            optimizer="adam", lr=1e-3, weight_decay=0.01, clip_grad=1.0,
            bf16=shape.precision == "bf16", params_dtype=low,
        )  # fmt: skip
        optimizer = get_megatron_optimizer(settings, [model])
        config.no_sync_func = model.no_sync
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = optimizer.scale_loss
        return cls(model, optimizer, config, shape, dataset, _random_states())

    def begin(self) -> None:
        """Go on with this arm's random states, as if no other arm had run in between."""
        state, tracked = self.random
        torch.set_rng_state(state)
        mpu_random.get_cuda_rng_tracker().set_states(tracked)
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def end(self) -> None:
        self.random = _random_states()

    def forward_backward(self, function: Any) -> list[torch.Tensor]:
        """One iteration's forwards and backwards through `function`; losses on the last stage."""
        shape = self.shape
        outputs = function(
            forward_step_func=_forward_step,
            data_iterator=self._batches(),
            model=[self.model],
            num_microbatches=shape.microbatches,
            seq_length=shape.seq_length,
            micro_batch_size=1,
            forward_only=False,
        )
        self.consumed += shape.microbatches * mpu.get_data_parallel_world_size()
        return [output["loss"] for output in outputs]

    def _batches(self) -> Iterator[dict[str, torch.Tensor]]:
        replicas, replica = mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
        for i in range(self.shape.microbatches):
            index = self.consumed + i * replicas + replica
            sample = self.dataset[index % len(self.dataset)]
            yield {k: torch.as_tensor(v).unsqueeze(0) for k, v in sample.items()}

    def digest(self) -> str:
        """SHA-256 over all parameters of this rank, bit for bit."""
        sha = hashlib.sha256()
        for name, parameter in sorted(self.model.named_parameters()):
            sha.update(name.encode())
            sha.update(parameter.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return sha.hexdigest()


def mean_loss(losses: list[torch.Tensor]) -> float:
    """The iteration's loss over all microbatches and replicas, known on every rank."""
    total = torch.stack(losses).double().sum() if losses else torch.zeros([], dtype=torch.double)
    count = torch.tensor([float(len(losses))], dtype=torch.double)
    both = torch.cat([total.reshape(1), count])
    dist.all_reduce(both)
    return float(both[0] / both[1])


def _random_states() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    tracked = mpu_random.get_cuda_rng_tracker().get_states()
    return torch.get_rng_state(), {name: state.clone() for name, state in tracked.items()}


def _forward_step(batches: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[Any, Any]:
    batch: dict[str, Any] = {}
    if mpu.is_pipeline_first_stage() or mpu.is_pipeline_last_stage():
        batch = next(batches)
    output = model(batch.get("tokens"), batch.get("position_ids"), None, labels=batch.get("labels"))
    return output, partial(_loss, batch.get("loss_mask"))


def _loss(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = (losses.float() * mask).sum() / mask.sum()
    return loss, {"loss": loss.detach().clone()}


def versions() -> dict[str, str]:
    import megatron.core

    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "megatron-core": str(megatron.core.__version__),
    }
