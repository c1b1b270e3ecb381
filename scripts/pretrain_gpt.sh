#!/usr/bin/env bash
# Train a GPT with Megatron-LM and the plugin, on one node or many: scripts/pretrain_gpt.sh --help
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
launch gpt gpt_345m "$@"
