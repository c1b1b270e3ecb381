"""A real GPT of megatron-core on real text: the model that the demo and the tests train.

Everything here is megatron-core's own: GPTModel, its DistributedDataParallel, optimizer, dataset
and gradient finalisation. Import it after `cpu.install()` on a machine without CUDA.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
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
from megatron.core.transformer.moe import moe_utils
from megatron.core.utils import get_attr_wrapped_model

from megatron_adaptra.adapter.baseline.shape import GPTShape as GPTShape
from megatron_adaptra.adapter.compat.patch_attr import patch_attr
from megatron_adaptra.base.user_files import files_in, read_bytes

LOSS_SCALE = 2.0**17  # at first, in fp16: high enough to overflow, as those of long trainings do
VOCABULARY = 257  # 256 bytes and the end of a document
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def initialize(shape: GPTShape, timeout: float) -> None:
    """Make Megatron's process groups over the default group that torchrun's variables describe.

    `timeout`: seconds after which a message of Megatron's own pipeline is given up.
    """
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=shape.tensor_parallel,
        pipeline_model_parallel_size=shape.stages,
        virtual_pipeline_model_parallel_size=shape.chunks if shape.chunks > 1 else None,
        expert_model_parallel_size=shape.expert_parallel,
        num_distributed_optimizer_instances=shape.instances,
        distributed_timeout_minutes=timeout / 60,
    )


def data_parallel_rank() -> int:
    """Return this process's rank in its data-parallel group."""
    return int(mpu.get_data_parallel_rank())


def forward_backward_function() -> Any:
    """Return the function that runs an iteration: Megatron's, or ours once the plugin is active."""
    return schedules.get_forward_backward_func()


def write_dataset(text: Path | None, folder: Path, limit: int = 2_000_000) -> Path:
    """Write text as bytes in Megatron's indexed format; return the prefix of its .bin and .idx.

    `text`: a file or a folder; None takes the Python standard library's own source, which is on
    every machine. `folder`: has no other text. `limit`: bytes of text used.
    """
    library = Path(json.__file__).parents[1]
    files = sorted(library.glob("*.py")) if text is None else files_in(text)
    folder.mkdir(parents=True, exist_ok=True)
    prefix = folder / "text"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    left = limit
    for path in files:
        data = read_bytes(path, "--text", left)
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
    """A byte tokenizer holds the constants that GPTDataset reads; each byte of text is a token."""

    eod = 256
    pad = -1
    vocab_size = VOCABULARY
    unique_identifiers: dict[str, str] = {"class": "bytes"}  # noqa: RUF012


def build_dataset(prefix: Path, shape: GPTShape, samples: int) -> Any:
    """Build a GPTDataset of at least `samples` sequences on all ranks; rank 0 indexes first."""
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
    """An arm holds a model in training: all that an iteration changes, with its random states."""

    models: list[Any]  # chunks
    optimizer: Any
    config: Any
    shape: GPTShape
    dataset: Any
    random: tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]
    consumed: int = 0

    @classmethod
    def build(cls, shape: GPTShape, dataset: Any) -> Arm:
        """Build an arm; the same seeds give the same arm, however often it is built.

        `dataset`: from `build_dataset`.
        """
        mpu_random.model_parallel_cuda_manual_seed(shape.seed)
        torch.manual_seed(shape.seed + mpu.get_pipeline_model_parallel_rank())
        config = _config(shape)
        models = [_chunk(config, shape, i) for i in range(shape.chunks)]
        low, distributed = config.params_dtype, shape.distributed_optimizer
        settings = OptimizerConfig(
            optimizer="adam", lr=1e-3, weight_decay=0.01, clip_grad=1.0,
            bf16=shape.precision == "bf16", fp16=shape.precision == "fp16", params_dtype=low,
            initial_loss_scale=LOSS_SCALE, hysteresis=1, use_distributed_optimizer=distributed,
            overlap_param_gather=shape.overlap_gather,
        )  # fmt: skip
        optimizer = get_megatron_optimizer(settings, models)
        several = len(models) > 1
        config.no_sync_func = [m.no_sync for m in models] if several else models[0].no_sync
        if shape.overlaps_reductions and distributed:
            # Stages start their reductions at the same moment, as Megatron's default is.
            starts = [m.start_grad_sync for m in models]
            config.grad_sync_func = starts if several else starts[0]
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = optimizer.scale_loss
        return cls(models, optimizer, config, shape, dataset, _random_states())

    def begin(self) -> None:
        """Go on with this arm's random states, as if no other arm had run in between."""
        mpu_random._set_all_rng_states(*self.random)
        for model in self.models:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def end(self) -> None:
        """Keep this arm's random states for its next iteration."""
        self.random = _random_states()

    def forward_backward(self, function: Any) -> list[torch.Tensor]:
        """Run one iteration through `function`; return the losses on the last stage, else none."""
        shape = self.shape
        outputs = function(
            forward_step_func=_forward_step,
            data_iterator=[_Batches(self, mpu.get_data_parallel_rank()) for _ in self.models],
            model=self.models,
            num_microbatches=shape.microbatches,
            seq_length=shape.seq_length,
            micro_batch_size=1,
            forward_only=False,
        )
        self.consumed += shape.microbatches * mpu.get_data_parallel_world_size()
        pairs = [output["loss"] for output in outputs]
        if len(pairs) == 1 and not pairs[0][1]:  # its microbatches have run elsewhere
            return []
        return [pair[0] for pair in pairs]

    def digest(self) -> str:
        """Return the SHA-256 over all parameters of this rank, bit for bit."""
        sha = hashlib.sha256()
        for model in self.models:
            for name, parameter in sorted(model.named_parameters()):
                flat = parameter.detach().contiguous().view(-1).view(torch.uint8)
                sha.update(name.encode() + flat.cpu().numpy().tobytes())
        return sha.hexdigest()

    def apart(self, other: Arm) -> float:
        """Compute how far this rank's parameters are from `other`'s, as a share of their norm."""
        own, apart = 0.0, 0.0
        for model, twin in zip(self.models, other.models, strict=True):
            for a, b in zip(model.parameters(), twin.parameters(), strict=True):
                x, y = a.detach().double(), b.detach().double()
                own += float(y.square().sum())
                apart += float((x - y).square().sum())
        return math.sqrt(apart / own) if own else 0.0


class _Batches:
    """An iterator yields the batches of replica `home`, from the `arm`'s next iteration on."""

    def __init__(self, arm: Arm, home: int) -> None:
        self._arm = arm
        first, each = arm.consumed + home, mpu.get_data_parallel_world_size()
        self._indices = itertools.count(first, each)

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        sample = self._arm.dataset[next(self._indices) % len(self._arm.dataset)]
        # Copied, as a loader does: datasets of megatron-core 0.14 change masks that they keep.
        return {k: torch.stack([torch.as_tensor(v)]).cuda() for k, v in sample.items()}

    def of_home(self, home: int) -> _Batches:
        """Return an iterator over the batches of replica `home`."""
        return _Batches(self._arm, home)


def _config(shape: GPTShape) -> Any:
    low = DTYPES[shape.precision]
    experts: dict[str, Any] = {}
    if shape.experts:
        if not hasattr(moe_utils, "te_general_gemm"):  # 0.16 without TransformerEngine asks for it
            patch_attr(moe_utils, "te_general_gemm", None)
        experts = {
            "num_moe_experts": shape.experts,
            "moe_router_topk": 2,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 0.01,
            "moe_token_dispatcher_type": "alltoall",
            "add_bias_linear": False,
            "expert_model_parallel_size": shape.expert_parallel,
        }
    # Between two stages with several chunks Megatron needs its overlapped messages; before 0.18 it
    # frees their memory while they are still being sent.
    kept = shape.chunks > 1 and shape.stages == 2 and not shape.overlapped
    overlapped = kept or shape.overlapped
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        tensor_model_parallel_size=shape.tensor_parallel,
        pipeline_model_parallel_size=shape.stages,
        virtual_pipeline_model_parallel_size=shape.chunks if shape.chunks > 1 else None,
        pipeline_dtype=low,
        params_dtype=low,
        bf16=shape.precision == "bf16",
        fp16=shape.precision == "fp16",
        hidden_dropout=shape.dropout,
        attention_dropout=shape.dropout,
        gradient_accumulation_fusion=shape.fused,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        overlap_p2p_comm=overlapped,
        batch_p2p_comm=not overlapped,
        deallocate_pipeline_outputs=not kept,
        attention_softmax_in_fp32=True,
        **experts,
    )


def _chunk(config: Any, shape: GPTShape, chunk: int) -> Any:
    """Build one of this stage's model chunks, wrapped as Megatron wraps it."""
    first, last = mpu.is_pipeline_first_stage(True), mpu.is_pipeline_last_stage(True)
    model: Any = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(num_experts=shape.experts or None),
        vocab_size=-(-VOCABULARY // shape.tensor_parallel) * shape.tensor_parallel,
        max_sequence_length=shape.seq_length,
        pre_process=first and chunk == 0,
        post_process=last and chunk == shape.chunks - 1,
        share_embeddings_and_output_weights=shape.tied,
        **({"vp_stage": chunk} if shape.chunks > 1 else {}),
    )
    model.cuda()  # not all of its parameters are made there
    if shape.precision != "fp32":
        model = Float16Module(config, model)
    how = DistributedDataParallelConfig(
        overlap_grad_reduce=shape.overlaps_reductions,
        use_distributed_optimizer=shape.distributed_optimizer,
        overlap_param_gather=shape.overlap_gather,
        average_in_collective=shape.average,
        num_distributed_optimizer_instances=shape.instances,
        bucket_size=shape.bucket,
    )
    return DistributedDataParallel(config, how, model, disable_bucketing=chunk > 0)


def mean_loss(losses: list[torch.Tensor]) -> float:
    """Return the mean loss over all microbatches and replicas; a collective of all ranks."""
    total = torch.stack(losses).double().sum() if losses else torch.zeros([], dtype=torch.double)
    count = torch.tensor([float(len(losses))], dtype=torch.double)
    both = torch.cat([total.reshape(1), count])
    dist.all_reduce(both)
    return float(both[0] / both[1])


def _random_states() -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the random states of the CPU, of the device, and of Megatron's tracker by name."""
    cpu, device, tracked = mpu_random._get_all_rng_states()
    return cpu, device, {name: state.clone() for name, state in tracked.items()}


def _forward_step(batches: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[Any, Any]:
    batch: dict[str, Any] = {}
    if any(get_attr_wrapped_model(model, end) for end in ("pre_process", "post_process")):
        batch = next(batches)
    output = model(batch.get("tokens"), batch.get("position_ids"), None, labels=batch.get("labels"))
    return output, partial(_loss, batch.get("loss_mask"))


def _loss(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = (losses.float() * mask).sum() / mask.sum()
    shown = loss.detach()
    return loss, {"loss": torch.stack([shown, torch.ones_like(shown)])}  # as Megatron adds them up


def versions() -> dict[str, str]:
    """Return the versions of Python, torch and megatron-core, on which results depend, by name."""
    import megatron.core

    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "megatron-core": str(megatron.core.__version__),
    }
