"""Run a training script with several residual streams (mHC): KIND SCRIPT ...

KIND `flag`: only the config asks for streams, in a Megatron whose shapes do not know them. `wide`:
messages between stages are as many times as wide, too, and Megatron's shapes are.
"""

import inspect
import runpy
import sys

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.training import arguments

STREAMS = 3


def with_flag(function):
    def core_transformer_config_from_args(*args, **kwargs):
        config = function(*args, **kwargs)
        config.enable_mhc_connections, config.mhc_num_residual_streams = True, STREAMS
        return config

    return core_transformer_config_from_args


def wide():
    narrow = schedules.get_tensor_shapes
    take, run = TransformerBlock.set_input_tensor, TransformerBlock.forward

    def get_tensor_shapes(
        *, seq_length, micro_batch_size, decoder_seq_length, config, tp_group=None, cp_group=None,
        pp_group=None, is_recv=True,
    ):  # fmt: skip
        given = dict(locals())
        shapes = narrow(**{k: given[k] for k in inspect.signature(narrow).parameters})
        ends = pp_group is not None and pp_group.rank() == (0 if is_recv else pp_group.size() - 1)
        return [(*rest, width * (1 if ends else STREAMS)) for *rest, width in shapes]

    def set_input_tensor(block, tensor):
        if tensor is not None:
            assert tensor.shape[-1] == STREAMS * block.config.hidden_size
            tensor = sum(tensor.chunk(STREAMS, -1))
        take(block, tensor)

    def forward(block, *args, **kwargs):
        output = run(block, *args, **kwargs)
        return output if block.post_process else torch.cat([output / STREAMS] * STREAMS, -1)

    schedules.get_tensor_shapes = get_tensor_shapes
    TransformerBlock.set_input_tensor, TransformerBlock.forward = set_input_tensor, forward


if __name__ == "__main__":
    kind, *sys.argv = sys.argv[1:]
    arguments.core_transformer_config_from_args = with_flag(
        arguments.core_transformer_config_from_args
    )
    if kind == "wide":
        wide()
    runpy.run_path(sys.argv[0], run_name="__main__")
