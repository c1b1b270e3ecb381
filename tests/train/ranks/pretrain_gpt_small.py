"""A training script as a user writes one, for the megatron.training of megatron-core's wheels.

It knows nothing of the plugin. It has a flag of its own, and serves both forms of `pretrain`: up to
0.17 it parses the flags itself, from 0.18 on it gets them parsed.
"""

from __future__ import annotations

import atexit
import inspect
import os
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets import helpers_cpp  # noqa: F401  # else Megatron has to compile it
from megatron.core.datasets import utils as dataset_utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import (
    GPTDatasetConfig,
    MockGPTDataset,
    MockGPTLowLevelDataset,
)
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import arguments, get_args, pretrain, print_rank_0, training
from megatron.training.training import get_megatron_optimizer

sys.path.append(str(Path(__file__).resolve().parents[2] / "support"))
import one_gloo_device

KEYS = ("tokens", "position_ids", "attention_mask", "labels", "loss_mask")


def flags(parser: ArgumentParser) -> ArgumentParser:
    group = parser.add_argument_group("user")
    group.add_argument("--user-flag", default="", help="the user's own")
    text = "gradients of that stage and those before it overflow then"
    group.add_argument("--user-overflow", default="", metavar="STAGE:ITERATION,...", help=text)
    text = "what the loss function reports: a sum and a count, their ratio, or that over replicas"
    group.add_argument("--user-loss", default="pair", choices=["pair", "mean", "all"], help=text)
    text = "folder for the numbers of the samples that forwards read, by iteration and rank"
    group.add_argument("--user-samples", default="", metavar="DIR", help=text)
    text = "the optimizer of that rank returns another norm then, or that its step has failed"
    group.add_argument("--user-result", default="", metavar="RANK:ITERATION:norm,...", help=text)
    text = "that stage finds something odd then, and wants to see it again"
    group.add_argument("--user-doubt", default="", metavar="STAGE:ITERATION,...", help=text)
    return parser


def model(
    pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, **_: Any
) -> GPTModel:
    args = get_args()
    return GPTModel(
        config=arguments.core_transformer_config_from_args(args),
        transformer_layer_spec=get_gpt_layer_local_spec(num_experts=args.num_experts),
        vocab_size=getattr(args, "padded_vocab_size", None) or args.vocab_size + 1,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=True,
        vp_stage=vp_stage,
    )


class NumberedDataset(MockGPTDataset):
    """Whose samples know their numbers."""

    def __getitem__(self, number: int) -> Any:
        return {**super().__getitem__(number), "number": number}


def datasets(counts: list[int], vp_stage: int | None = None) -> Any:
    args = get_args()
    MockGPTLowLevelDataset.size = 1000  # documents; to shuffle 100,000 takes half of a start
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split=args.split,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    kind = NumberedDataset if args.user_samples else MockGPTDataset
    builder = BlendedMegatronDatasetBuilder(kind, counts, lambda: True, config)
    return builder.build()


datasets.is_distributed = True  # type: ignore[attr-defined]  # every rank builds its own


def forward_step(batches: Any, part: Any, *_: Any) -> Any:
    batch = dict.fromkeys(KEYS)
    if any(get_attr_wrapped_model(part, end) for end in ("pre_process", "post_process")):
        batch = next(batches)
        if get_args().user_samples:
            record(batch["number"].tolist())
    device = next(part.parameters()).device
    given = (batch.get(key) for key in KEYS)
    moved = (x if x is None else x.to(device, non_blocking=True) for x in given)
    tokens, positions, mask, labels, weights = moved
    output = part(tokens, positions, mask, labels=labels)
    now = f"{mpu.get_pipeline_model_parallel_rank()}:{get_args().curr_iteration + 1}"
    if now in get_args().user_overflow.split(",") and output.requires_grad:
        output.register_hook(lambda gradient: gradient * float("inf"))
    if now in get_args().user_doubt.split(",") and output.requires_grad:
        get_rerun_state_machine().validate_result(
            result=output.detach().sum(), rejection_func=lambda _: True, message="odd", fatal=False
        )

    def loss(losses: torch.Tensor) -> Any:
        total = torch.sum(losses.float().view(-1) * weights.view(-1))
        count = weights.sum().to(torch.int)
        shown = torch.cat([total.detach().clone().view(1), count.view(1)])
        if get_args().user_loss != "pair":
            shown = shown[:1] / shown[1:]
        if get_args().user_loss == "all":
            torch.distributed.all_reduce(shown, group=mpu.get_data_parallel_group())
            shown = shown / mpu.get_data_parallel_world_size()
        return total, count, {"lm loss": shown}

    return output, loss


def optimizer_of_its_own(*args: Any, **kwargs: Any) -> Any:
    """Megatron's, whose result on one rank may be another one than on the others."""
    optimizer = get_megatron_optimizer(*args, **kwargs)
    native = optimizer.step

    def step() -> Any:
        success, norm, zeros = native()
        now = f"{torch.distributed.get_rank()}:{get_args().curr_iteration + 1}"
        asked = get_args().user_result.split(",")
        return success and f"{now}:fails" not in asked, norm + (f"{now}:norm" in asked), zeros

    optimizer.step = step
    return optimizer


def record(numbers: list[int]) -> None:
    """A forward of this rank, in training or in evaluation, has read these samples."""
    kind = "train" if torch.is_grad_enabled() else "eval"
    path = Path(get_args().user_samples) / f"rank{torch.distributed.get_rank()}"
    with path.open("a") as file:
        print(kind, get_args().curr_iteration + 1, *numbers, file=file)


def print_modules() -> None:
    print("modules:", *sorted(name for name in sys.modules if name.startswith("megatron_adaptra")))


def main(flags: Any = flags, model: Any = model, forward_step: Any = forward_step) -> None:
    """Train as Megatron's own script does, with these parts of a user's."""
    if os.environ.get("ADAPTRA_TEST_MODULES"):
        atexit.register(print_modules)
    one_gloo_device.install()
    # Megatron runs `make` at start; a wheel has the compiled module, but not the Makefile.
    dataset_utils.compile_helpers = lambda: None
    if "--user-result" in sys.argv:
        training.get_megatron_optimizer = optimizer_of_its_own
    common = {
        "train_valid_test_dataset_provider": datasets,
        "model_provider": model,
        "model_type": ModelType.encoder_or_decoder,
        "forward_step_func": forward_step,
    }
    if "extra_args_provider" in inspect.signature(pretrain).parameters:
        pretrain(**common, extra_args_provider=flags)
    else:
        from megatron.training.argument_utils import pretrain_cfg_container_from_args

        given = arguments.parse_and_validate_args(extra_args_provider=flags)
        pretrain(pretrain_cfg_container_from_args(given), **common)
    print_rank_0(f"user flag: {get_args().user_flag}")


if __name__ == "__main__":
    main()
