"""Has Megatron's own parser and validate_args judge model files; run as a process of its own.

validate_script.py NAME=WORLD ...  prints one JSON object: what Megatron makes of each model.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path

import torch

if not torch.cuda.is_available():
    from megatron_adaptra.adapter.baseline import cpu

    cpu.install()  # before anything imports megatron

from megatron.training.arguments import parse_args, validate_args

PATH = Path(__file__).resolve().parents[3] / "scripts" / "megatron_flags.py"
spec = importlib.util.spec_from_file_location("megatron_flags", PATH)
assert spec is not None
assert spec.loader is not None
megatron_flags = importlib.util.module_from_spec(spec)
spec.loader.exec_module(megatron_flags)

MOCK = ["--mock-data", "--tokenizer-type", "NullTokenizer"]
found = {}
for request in sys.argv[1:]:
    name, world = request.split("=")
    os.environ.update(WORLD_SIZE=world, RANK="0", LOCAL_RANK="0")
    sys.argv = [name, *megatron_flags.words(megatron_flags.load(name)), *MOCK]
    try:
        args = parse_args()
        validated = validate_args(args)
        args = validated if validated is not None else args
    except BaseException as error:  # argparse exits
        found[name] = {"error": f"{type(error).__name__}: {error}"}
        continue
    found[name] = {
        "layers": args.num_layers,
        "stages": args.pipeline_model_parallel_size,
        "replicas": args.data_parallel_size,
        "bf16": args.params_dtype is torch.bfloat16,
    }
print("RESULT", json.dumps({"from": sys.modules["megatron.training"].__file__, "found": found}))
