#!/usr/bin/env bash
# Megatron-LM's own pretrain_gpt.py, stock and with the plugin, on CPUs and gloo. See --help.
set -euo pipefail
usage() {
  cat <<'END'
scripts/test_megatron_lm.sh CHECKOUT... [--only pp2,pp4,pp4x2,pp2dp2,tp2pp2,slow,executor,patched]
    [--iterations 20] [--microbatches 12] [--delay 40ms] [--slow-link 2-3] [--timeout SECONDS]
    [--json FILE] [--keep DIR] [--no-patch] [--netlab]

CHECKOUT is a Megatron-LM checkout of release 0.14 or newer; it is not modified. One Python
environment per need is made next to this project: .venv-megatron-lm-3.11 for releases up to 0.16
and .venv-megatron-lm-3.12 for newer ones, with torch for CPUs. ADAPTRA_VENV_311 and
ADAPTRA_VENV_312 name environments that are used as they are.
With --netlab the row "slow" crosses a really slow network (docs/netlab.md; as root), not an
emulated link. Needs g++ (Megatron compiles its index helpers). About five minutes per checkout on
two idle cores.
Exit status: 0 if every run passed, 1 if not, 2 for bad input.
END
}
die() {
  echo "test_megatron_lm: error: $1" >&2
  exit 2
}

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
checkouts=() options=()
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage && exit ;;
    --no-patch | --netlab | --*=*) options+=("$1") ;;
    --only | --iterations | --microbatches | --delay | --slow-link | --timeout | --json | --keep)
      [ $# -gt 1 ] || die "$1 needs a value"
      options+=("$1" "$2") && shift
      ;;
    -*) die "unknown option $1; see --help" ;;
    *) checkouts+=("$1") ;;
  esac
  shift
done
[ ${#checkouts[@]} -gt 0 ] || die "which CHECKOUT? See --help"
command -v g++ >/dev/null || die "g++ is not installed; Megatron's index helpers need it"

# The first Python of these versions that can make environments.
python_of() {
  local version candidate
  for version in "$@"; do
    for candidate in "python$version" "$HOME"/.pyenv/versions/"$version".*/bin/python; do
      if "$candidate" -c 'import venv, ensurepip' 2>/dev/null; then
        echo "$candidate"
        return
      fi
    done
  done
  return 1
}

# environment FOLDER PYTHON: without a megatron-core, so that the checkout is what gets imported.
environment() {
  local folder=$1 python=$2 stamp pip
  stamp=$(cat "$root/pyproject.toml" "$root/scripts/test_megatron_lm.sh" | cksum)
  if [ "$(cat "$folder/adaptra.stamp" 2>/dev/null)" = "$stamp" ]; then return 0; fi
  echo "test_megatron_lm: making $folder (once; about 2 GB)" >&2
  [ -x "$folder/bin/python" ] || "$python" -m venv "$folder" || return 1
  pip="$folder/bin/python -m pip --disable-pip-version-check --no-input -q install"
  # The wheels for CPUs are smaller; where their index cannot be reached, the usual ones do as well.
  "$folder/bin/python" -c 'import torch' 2>/dev/null ||
    $pip "torch==${ADAPTRA_TORCH:-2.13.0}" --index-url https://download.pytorch.org/whl/cpu 2>/dev/null ||
    $pip "torch==${ADAPTRA_TORCH:-2.13.0}" || $pip torch || return 1
  # triton and six: some releases import them at start, also where nothing is compiled.
  $pip numpy einops regex six pybind11 pydantic packaging setuptools triton pyyaml wrapt || return 1
  $pip -e "$root" || return 1
  if "$folder/bin/python" -c 'import megatron.core' 2>/dev/null; then
    echo "test_megatron_lm: $folder has a megatron-core of its own; remove it" >&2
    return 1
  fi
  echo "$stamp" >"$folder/adaptra.stamp"
}

old="" new=""
for checkout in "${checkouts[@]}"; do
  info=$checkout/megatron/core/package_info.py
  [ -f "$info" ] || die "$checkout is not a Megatron-LM checkout: it has no megatron/core/package_info.py"
  major=$(sed -n 's/^MAJOR *= *\([0-9]*\).*/\1/p' "$info") minor=$(sed -n 's/^MINOR *= *\([0-9]*\).*/\1/p' "$info")
  if [ "$((major * 1000 + minor))" -lt 17 ]; then old=1; else new=1; fi
done
pythons=()
if [ -n "$old" ]; then
  folder=${ADAPTRA_VENV_311:-}
  if [ -z "$folder" ]; then
    python=$(python_of 3.11 3.10) || die "Megatron-LM up to 0.16 needs Python 3.11 or 3.10; set ADAPTRA_VENV_311"
    folder=$root/.venv-megatron-lm-3.11
    environment "$folder" "$python" || die "the environment $folder could not be made"
  fi
  version=$("$folder/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || die "ADAPTRA_VENV_311: $folder has no bin/python"
  pythons+=(--python "$version=$folder/bin/python")
fi
if [ -n "$new" ]; then
  folder=${ADAPTRA_VENV_312:-}
  if [ -z "$folder" ]; then
    python=$(python_of 3.12) || die "Megatron-LM from 0.17 on needs Python 3.12; set ADAPTRA_VENV_312"
    folder=$root/.venv-megatron-lm-3.12
    environment "$folder" "$python" || die "the environment $folder could not be made"
  fi
  version=$("$folder/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || die "ADAPTRA_VENV_312: $folder has no bin/python"
  pythons+=(--python "$version=$folder/bin/python")
fi
# exec: a Ctrl-C or a SIGTERM reaches the one process that ends all others. The plugin need not be installed.
export PYTHONPATH=$root
exec "${pythons[1]#*=}" "$root/scripts/megatron_lm_matrix.py" "${checkouts[@]}" "${pythons[@]}" ${options[@]+"${options[@]}"}
