#!/usr/bin/env bash
# Train a Llama 3 with Megatron-LM and the plugin, on one node or many: scripts/pretrain_llama.sh --help
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
launch llama llama3_8b "$@"
