# Environments for the scripts beside this file: which Python, and what is installed. Source it.

lib_root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)

# find_python [VERSION...]: the path of the first Python of these versions (3.12) that can make
# environments. Without a version: $ADAPTRA_PYTHON, or one that torch and megatron-core support.
find_python() {
  local version candidate candidates=() ask
  ask='import sys, venv, ensurepip; v = "%d.%d" % sys.version_info[:2]; print(sys.executable) if v in sys.argv[1:] else sys.exit(1)'
  if [ $# = 0 ]; then
    set -- 3.12 3.13 3.11 3.10 # megatron-core has its training program in wheels for 3.12 alone
    if [ -n "${ADAPTRA_PYTHON:-}" ]; then
      "$ADAPTRA_PYTHON" -c "$ask" "$@" 2>/dev/null && return
      echo "adaptra: ADAPTRA_PYTHON=$ADAPTRA_PYTHON has to be a Python 3.10 to 3.13 with venv" >&2
      return 1
    fi
  fi
  # Not only names on PATH: a pyenv shim answers for the versions of this folder alone.
  for version in "$@"; do
    candidates+=("python$version" "$HOME/.pyenv/versions/$version".*/bin/python)
  done
  for candidate in "${candidates[@]}" python3; do
    if "$candidate" -c "$ask" "$@" 2>/dev/null; then return; fi
  done
  local wanted
  wanted=$(printf ', %s' "$@")
  echo "adaptra: there is no Python with venv (on Debian: apt install python3-venv) of version ${wanted#, }" >&2
  return 1
}

# make_venv [--no-megatron-core] [--cuda] FOLDER EXTRAS [PYTHON]: create or complete an environment with torch,
# megatron-core, us with the engine, and our EXTRAS (demo,test). A torch installed for that Python is reused.
# --no-megatron-core: for checkouts of Megatron-LM, which are to be what is imported.
# --cuda: torch's build for GPUs, also on a machine without one (docs/testing.md says what for).
make_venv() {
  local core=1 cuda="" folder extras python sum extra missing=() building="" system=() ask='import torch'
  while :; do
    case $1 in
      --no-megatron-core) core="" ;;
      --cuda) cuda=1 ask='import torch; assert torch.version.cuda' ;;
      *) break ;;
    esac
    shift
  done
  folder=$1 extras=$2 python=${3:-}
  if [ ! -x "$folder/bin/python" ]; then
    [ -n "$python" ] || python=$(find_python) || return 1
    # What is installed for that Python is seen too: no place to keep a megatron-core out of.
    if [ -n "$core" ] && "$python" -c 'import torch' 2>/dev/null; then system=(--system-site-packages); fi
    "$python" -m venv ${system[@]+"${system[@]}"} "$folder" || return 1
  fi
  # With names: what is built changes when a file of the engine moves, too.
  sum=$(cd "$lib_root" && find pyproject.toml setup.py scripts/lib.sh csrc/rdma_offload -type f |
    LC_ALL=C sort | xargs cksum | cksum)
  for extra in base ${cuda:+cuda} ${extras//,/ }; do
    grep -qx "$sum $extra" "$folder/adaptra.stamp" 2>/dev/null || missing+=("$extra")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  local pip=("$folder/bin/python" -m pip --disable-pip-version-check --no-input -q install)
  if [[ " ${missing[*]} " = *" base "* ]]; then
    # The engine is compiled while torch comes.
    "${pip[@]}" "setuptools>=68" wheel "pybind11>=2.13" || return 1
    (cd "$lib_root" && "$folder/bin/python" setup.py -q build_ext --inplace) >"$folder/adaptra-build.log" 2>&1 &
    building=$!
  fi
  _install_torch "$folder" "$cuda" "$ask" || { [ -z "$building" ] || kill "$building"; return 1; }
  if [ -n "$building" ]; then
    wait "$building" || true # without an engine messages go over gloo
    echo "adaptra: installing megatron-adaptra${core:+ and megatron-core} in $folder" >&2
    # megatron-core's own requirements pull in what only other parts of it need; ours are in [demo].
    [ -z "$core" ] || "${pip[@]}" --no-deps "megatron-core${ADAPTRA_MEGATRON:->=0.14}" || return 1
    "${pip[@]}" --no-build-isolation -e "$lib_root[$extras]" || return 1
  else
    echo "adaptra: installing what $extras needs in $folder" >&2
    "$folder/bin/python" - ${extras//,/ } >"$folder/adaptra-needs.txt" <<'END' || return 1
import sys
from importlib.metadata import requires
from packaging.requirements import Requirement

for need in map(Requirement, requires("megatron-adaptra")):
    if need.marker and any(need.marker.evaluate({"extra": extra}) for extra in sys.argv[1:]):
        need.marker = None
        print(need)
END
    "${pip[@]}" -r "$folder/adaptra-needs.txt" || return 1
  fi
  if [ -z "$core" ] && "$folder/bin/python" -c 'import megatron.core' 2>/dev/null; then
    echo "adaptra: $folder has a megatron-core of its own, which would hide the checkout's; remove it" >&2
    return 1
  fi
  printf "$sum %s\n" "${missing[@]}" >>"$folder/adaptra.stamp"
}

# _install_torch FOLDER CUDA ASK: torch in an environment, if its Python cannot do what ASK says.
_install_torch() {
  local folder=$1 cuda=$2 index=() version="torch==${ADAPTRA_TORCH:-2.13.0}"
  local pip=("$folder/bin/python" -m pip --disable-pip-version-check --no-input -q install)
  if "$folder/bin/python" -c "$3" 2>/dev/null; then return; fi
  echo "adaptra: installing torch${cuda:+ for CUDA} in $folder (once)" >&2
  # One for CPUs, which may be there, has the number that is asked for, too.
  [ -z "$cuda" ] || "$folder/bin/python" -m pip -q uninstall -y torch 2>/dev/null || true
  # Without a GPU the wheels for CPUs do, which are smaller; where their index cannot be reached, the others.
  [ -n "$cuda" ] || command -v nvidia-smi >/dev/null ||
    index=(--retries 0 --timeout 10 --index-url https://download.pytorch.org/whl/cpu)
  if [ ${#index[@]} -gt 0 ]; then "${pip[@]}" "$version" "${index[@]}" 2>/dev/null && return; fi
  "${pip[@]}" "$version" || "${pip[@]}" torch
}

# build_engine PYTHON: the C++ engine in the source tree, if that Python cannot import it. Needs no network and no pip:
# a compiler, and of that Python its headers, setuptools and pybind11. Is false, with an error in one line, where it fails.
build_engine() {
  local python=$1 compiler=${CXX:-c++} log ask='import megatron_adaptra.transport.engine._native'
  command -v "$python" >/dev/null || { echo "adaptra: error: there is no $python (ADAPTRA_PYTHON)" >&2; return 1; }
  (cd "$lib_root" && "$python" -c "$ask") 2>/dev/null && return
  command -v "${compiler%% *}" >/dev/null || {
    echo "adaptra: error: the engine is not built for $python, and there is no C++ compiler ${compiler%% *}; install one, or name it by CXX" >&2
    return 1
  }
  echo "adaptra: building the engine for $python in place" >&2
  log=$(mktemp)
  (cd "$lib_root" && "$python" setup.py -q build_ext --inplace) >"$log" 2>&1 || true
  if (cd "$lib_root" && "$python" -c "$ask") 2>>"$log"; then
    rm -f "$log"
    return
  fi
  # A failed compiler is a warning to setup.py; the reason is the first error.
  echo "adaptra: error: the engine could not be built for $python: $(grep -m 1 -E '(E|e)rror' "$log" || tail -n 1 "$log"); it needs a C++17 compiler, and of that Python its headers, setuptools and pybind11; all output is in $log" >&2
  return 1
}
