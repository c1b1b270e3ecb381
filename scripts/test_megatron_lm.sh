#!/usr/bin/env bash
# Megatron-LM's own pretrain_gpt.py, stock and with the plugin, on CPUs and gloo. See --help.
set -euo pipefail
usage() {
  cat <<'END'
scripts/test_megatron_lm.sh CHECKOUT... [--only pp2,pp4,pp4x2,pp2dp2,tp2pp2,slow,executor,patched,routes]
    [--iterations 20] [--microbatches 12] [--delay 40ms] [--slow-link 2-3] [--timeout SECONDS]
    [--json FILE] [--keep DIR] [--no-patch] [--netlab]

CHECKOUT is a Megatron-LM checkout of release 0.14 or newer; it is not modified. One Python
environment per need is made next to this project: .venv-megatron-lm-3.11 for releases up to 0.16
and .venv-megatron-lm-3.12 for newer ones, with torch for CPUs. ADAPTRA_VENV_311 and
ADAPTRA_VENV_312 name environments that are used as they are.
With --netlab the row "slow" crosses a really slow network (docs/netlab.md; as root), not an
emulated link. Needs g++ and make, for Megatron compiles its index helpers. About ten minutes per
checkout on two idle cores. A row that fails says why in its line.
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
for tool in g++ make; do
  command -v "$tool" >/dev/null || die "$tool is not installed; Megatron compiles its index helpers with it"
done

. "$root/scripts/lib.sh"
# environment NAME VERSION...: the environment that the variable NAME gives, or one of our own.
environment() {
  local name=$1 folder=${!1:-} python version
  shift
  if [ -z "$folder" ]; then
    folder=$root/.venv-megatron-lm-$1
    python=$(find_python "$@" 2>/dev/null) || die "a checkout needs Python $(printf "%s " "$@") with venv; install it or set $name"
    make_venv --no-megatron-core "$folder" megatron-lm "$python" || die "the environment $folder could not be made"
  fi
  folder=$(cd -- "$folder" 2>/dev/null && pwd) || die "$name: there is no folder ${!name}"
  version=$("$folder/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || die "$name: $folder has no bin/python that runs"
  pythons+=(--python "$version=$folder/bin/python")
}

old="" new=""
for checkout in "${checkouts[@]}"; do
  info=$checkout/megatron/core/package_info.py
  [ -f "$info" ] || die "$checkout is not a Megatron-LM checkout: it has no megatron/core/package_info.py"
  major=$(sed -n 's/^MAJOR *= *\([0-9]*\).*/\1/p' "$info") minor=$(sed -n 's/^MINOR *= *\([0-9]*\).*/\1/p' "$info")
  if [ "$((major * 1000 + minor))" -lt 17 ]; then old=1; else new=1; fi
done
pythons=()
[ -z "$old" ] || environment ADAPTRA_VENV_311 3.11 3.10
[ -z "$new" ] || environment ADAPTRA_VENV_312 3.12
# exec: a Ctrl-C or a SIGTERM reaches the one process that ends all others. The plugin need not be installed.
export PYTHONPATH=$root
exec "${pythons[1]#*=}" "$root/scripts/megatron_lm_matrix.py" "${checkouts[@]}" "${pythons[@]}" ${options[@]+"${options[@]}"}
