# Shared by quickstart.sh and test.sh: a virtual environment with torch, megatron-core and us.
# Source it from the repository's root.

# A python that torch and megatron-core have wheels for: $ADAPTRA_PYTHON, or the first that is there.
find_python() {
  local candidate
  for candidate in "${ADAPTRA_PYTHON:-}" python3.11 python3.12 python3.10 python3; do
    if [ -n "$candidate" ] && "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "adaptra: needs Python 3.10 to 3.13 with venv (on Debian: apt install python3-venv); set ADAPTRA_PYTHON" >&2
  return 1
}

# make_venv FOLDER EXTRAS [PYTHON]: create or complete it; a torch installed for that python is reused.
make_venv() {
  local folder=$1 extras=$2 python=${3:-} stamp have
  [ -n "$python" ] || python=$(find_python) || return 1
  if [ ! -x "$folder/bin/python" ]; then
    have=""
    if "$python" -c 'import torch' 2>/dev/null; then have=--system-site-packages; fi
    "$python" -m venv $have "$folder" || return 1
  fi
  stamp=$(cat pyproject.toml setup.py scripts/lib.sh | cksum)-$extras
  if [ "$(cat "$folder/adaptra.stamp" 2>/dev/null)" = "$stamp" ]; then return 0; fi
  local pip="$folder/bin/python -m pip --disable-pip-version-check --no-input -q"
  if ! "$folder/bin/python" -c 'import torch' 2>/dev/null; then
    echo "adaptra: installing torch (once)" >&2
    $pip install "torch==${ADAPTRA_TORCH:-2.13.0}" || $pip install torch || return 1
  fi
  echo "adaptra: installing megatron-core and megatron-adaptra" >&2
  # megatron-core's own requirements pull in what only other parts of it need; ours are in [demo].
  $pip install --no-deps "megatron-core${ADAPTRA_MEGATRON:->=0.14}" || return 1
  $pip install -e ".[$extras]" || return 1
  echo "$stamp" >"$folder/adaptra.stamp"
}
