#!/usr/bin/env bash
# Whole iterations over a really slow network, part by part of the plugin. See --help.
# Needs root, and in the environment of `python` a torch for CPUs and megatron-core 0.17 or newer.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec python "$root/benchmarks/whole_iteration.py" "$@"
