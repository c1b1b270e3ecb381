# From options to one torchrun command. Sourced by pretrain_gpt.sh and pretrain_llama.sh, which call
#   launch FAMILY MODEL "$@"
# All wrong input that can be found without Megatron is refused here, in one line and with exit
# status 2: Megatron would report it minutes later, on every rank.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

refuse() {
  echo "${0##*/}: $*" >&2
  exit 2
}

usage() {
  cat <<EOF
usage: scripts/${0##*/} [options] [-- Megatron's flags, as they are]

Trains with an unmodified checkout of Megatron-LM and the plugin switched on.

  --model NAME|FILE    one of configs/models, or a YAML file of the same form (default $model)
  --set KEY=VALUE      another value for a key of the model file; may be repeated
  --megatron-lm DIR    the checkout                                  (or \$MEGATRON_LM)
  --data PREFIX        PREFIX.bin and PREFIX.idx of preprocess_data.py, with the tokenizer after --:
                       --data my_text_document -- --tokenizer-type GPT2BPETokenizer ...
                       Without it: Megatron's mock data.
  --stock              leave the plugin off
  --smoke              a tiny model on CPU and gloo, in GPUS_PER_NODE processes (2 or 4; default 4)
  --dry-run            print the command and stop

  --nnodes N           nodes                                         (or \$NNODES, default 1)
  --node-rank N        0 on the node that hosts the rendezvous       (or \$NODE_RANK)
  --master-addr HOST   that node, needed for more than one           (or \$MASTER_ADDR)
  --master-port PORT                                                 (or \$MASTER_PORT, 29500)
  --gpus-per-node N    processes per node                            (or \$GPUS_PER_NODE, 8)
  --rdzv-id ID         the same on all nodes, another for each job   (or \$RDZV_ID)
  --max-restarts N     all ranks again after a failure; give --save and --load
                                                                     (or \$MAX_RESTARTS, 0)

One node to many: start the same command on every node. Ranks follow the order of the nodes'
names, not NODE_RANK (torchrun's c10d rendezvous sorts them). Options win over variables.
ADAPTRA_PYTHON chooses the Python (default: python on PATH): 3.10 or newer up to Megatron-LM 0.16,
3.12 or newer from 0.17 on.

Packages on a machine without a GPU (--smoke), besides torch: numpy einops pydantic regex pyyaml
packaging six wrapt pybind11 triton (stock Megatron-LM imports triton, which CPU builds of torch leave out).
Plus make and g++: Megatron compiles a helper at its first start.
EOF
}

# A whole number from $3 on, or one line.
number() {
  [[ $2 =~ ^[0-9]+$ ]] && [ "$2" -ge "$3" ] || refuse "$1: $2: it has to be a whole number from $3"
}

# Megatron-LM itself: its folder, its script, a Python new enough for it.
check_checkout() {
  local clone="git clone --depth 1 -b core_v0.16.1 https://github.com/NVIDIA/Megatron-LM (core_v0.19.0 with Python 3.12), then --megatron-lm Megatron-LM"
  [ -n "$megatron" ] || refuse "no Megatron-LM: set MEGATRON_LM to a checkout, or: $clone"
  [ -d "$megatron/megatron/core" ] || refuse "--megatron-lm: $megatron: no checkout of Megatron-LM there; $clone"
  megatron=$(cd "$megatron" && pwd)
  [ -f "$megatron/pretrain_gpt.py" ] || refuse "--megatron-lm: $megatron: it has no pretrain_gpt.py"
  local needs
  needs=$(sed -n 's/^requires-python = ">=3\.\([0-9]*\)".*/\1/p' "$megatron/pyproject.toml" 2>/dev/null || true)
  [ "${needs:-0}" -le "$minor" ] || refuse "$megatron needs Python 3.$needs or newer; $python is 3.$minor; set ADAPTRA_PYTHON"
}

# A machine without a GPU lacks what Megatron needs: report what is missing, build the helper.
prepare_smoke() {
  local helper=$megatron/megatron/core/datasets/helpers_cpp$suffix missing
  local -a modules=(torch numpy einops pydantic regex yaml packaging six triton wrapt)
  [ -f "$helper" ] || modules+=(pybind11)
  missing=$("$python" -c 'import importlib.util as i, sys; print(*(m for m in sys.argv[1:] if i.find_spec(m) is None))' "${modules[@]}")
  [ -z "$missing" ] || refuse "$python lacks: $missing; install with: $python -m pip install ${missing/yaml/pyyaml}"
  [ -f "$helper" ] || make -s -C "${helper%/*}" || refuse "no $helper: make failed; it needs make and g++"
}

launch() {
  local family=$1 model=$2
  shift 2
  local megatron=${MEGATRON_LM:-} data="" plugin=--adaptra smoke="" dry="" given=""
  local nnodes=${NNODES:-1} node_rank=${NODE_RANK:-} addr=${MASTER_ADDR:-} port=${MASTER_PORT:-29500}
  local gpus=${GPUS_PER_NODE:-} id=${RDZV_ID:-adaptra} restarts=${MAX_RESTARTS:-0}
  local -a set=() rest=() flags=() torchrun=() variables=()

  while [ $# -gt 0 ]; do
    case $1 in
      -h | --help) usage && exit ;;
      --stock) plugin="" ;;
      --smoke) smoke=1 ;;
      --dry-run) dry=1 ;;
      --) shift && rest=("$@") && break ;;
      --model | --set | --megatron-lm | --data | --nnodes | --node-rank | --master-addr | --master-port | --gpus-per-node | --rdzv-id | --max-restarts)
        [ $# -gt 1 ] && [ -n "$2" ] && [ "$2" != -- ] || refuse "$1 needs a value; see --help"
        case $1 in
          --model) model=$2 given=1 ;;
          --set) set+=(--set "$2") ;;
          --megatron-lm) megatron=$2 ;;
          --data) data=$2 ;;
          --nnodes) nnodes=$2 ;;
          --node-rank) node_rank=$2 ;;
          --master-addr) addr=$2 ;;
          --master-port) port=$2 ;;
          --gpus-per-node) gpus=$2 ;;
          --rdzv-id) id=$2 ;;
          --max-restarts) restarts=$2 ;;
        esac
        shift
        ;;
      *) refuse "unknown option $1; Megatron's own flags go after --; see --help" ;;
    esac
    shift
  done

  : "${gpus:=$([ -n "$smoke" ] && echo 4 || echo 8)}"
  number --nnodes "$nnodes" 1
  number --gpus-per-node "$gpus" 1
  number --master-port "$port" 1
  number --max-restarts "$restarts" 0
  local world=$((nnodes * gpus))

  local python suffix minor
  python=$(command -v "${ADAPTRA_PYTHON:-python}" || command -v "${ADAPTRA_PYTHON:-python3}") \
    || refuse "no ${ADAPTRA_PYTHON:-python} here; set ADAPTRA_PYTHON to a Python with torch"
  read -r suffix minor < <("$python" -S -c 'import sys, sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"), sys.version_info[1])') \
    || refuse "$python does not run; set ADAPTRA_PYTHON to a Python with torch"
  check_checkout

  # Megatron's Makefile takes the suffix of its helper from the first python3-config on PATH. In a
  # virtual environment that is another Python's, and the run fails late without helpers_cpp.
  export PATH="${python%/*}:$PATH" MAKEFLAGS="${MAKEFLAGS:+$MAKEFLAGS }LIBEXT=$suffix"
  variables=(
    "PYTHONPATH=$megatron:$root${PYTHONPATH:+:$PYTHONPATH}" "MAKEFLAGS=$MAKEFLAGS"
    CUDA_DEVICE_MAX_CONNECTIONS=1 "OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}"
  )
  if [ -n "$smoke" ]; then
    [[ " ${set[*]}" != *" pipeline-model-parallel-size="* ]] || refuse "--set pipeline-model-parallel-size: --smoke has a stage for each of its processes; set --gpus-per-node to 2 or 4"
    [ -z "$given$data" ] || refuse "--smoke brings its own model and data; leave out --model and --data"
    case $world in 2 | 4) ;; *) refuse "--smoke runs in 2 or 4 processes, not $world; set --gpus-per-node" ;; esac
    model=$root/configs/smoke/$family.yaml
    set+=(--set "pipeline-model-parallel-size=$world")
    variables+=(CUDA_VISIBLE_DEVICES=) # on CPU also where there are GPUs
  fi
  # What is after -- may change the sizes that the check would look at.
  [[ " ${rest[*]} " =~ \ --[a-z-]*(parallel|batch)-size[\ =] ]] || set+=(--world "$world")
  local text
  text=$("$python" "$root/scripts/megatron_flags.py" "$model" "${set[@]}") || exit 2
  mapfile -t flags <<<"$text"

  if [ -n "$data" ]; then
    [ -f "$data.bin" ] && [ -f "$data.idx" ] || refuse "--data: $data: needs $data.bin and $data.idx, as preprocess_data.py writes them"
    [[ " ${rest[*]} " == *" --tokenizer-type"[\ =]* ]] || refuse "--data needs the tokenizer it was made with: -- --tokenizer-type ..."
    flags+=(--data-path "$data" --split "99,1,0")
  elif [ -z "$smoke" ] && ! [[ " ${rest[*]} " =~ \ --(mock-data|[a-z-]*data(-args)?-path)[\ =] ]]; then
    flags+=(--mock-data --tokenizer-type NullTokenizer --split "99,1,0")
  fi

  torchrun=("$python" -m torch.distributed.run --nproc-per-node "$gpus" --max-restarts "$restarts")
  if [ "$nnodes" = 1 ]; then
    torchrun+=(--standalone)
  else
    [ -n "$addr" ] || refuse "$nnodes nodes need --master-addr, the same on all of them"
    torchrun+=(--nnodes "$nnodes" --rdzv-backend c10d --rdzv-id "$id" --rdzv-endpoint "$addr:$port")
    if [ -n "$node_rank" ]; then
      number --node-rank "$node_rank" 0
      [ "$node_rank" -lt "$nnodes" ] || refuse "--node-rank: $node_rank: it has to be below --nnodes, $nnodes"
      # torchrun would compare host names to find out, and a Kubernetes service has another one.
      torchrun+=(--rdzv-conf "is_host=$([ "$node_rank" = 0 ] && echo 1 || echo 0)")
    fi
  fi
  torchrun+=(-m megatron_adaptra.run "$megatron/pretrain_gpt.py" "${flags[@]}" ${plugin:+"$plugin"} "${rest[@]}")

  if [ -n "$dry" ]; then
    printf 'PATH=%q:"$PATH" ' "${python%/*}"
    printf '%q ' env "${variables[@]}" "${torchrun[@]}"
    echo
    exit
  fi
  [ -z "$smoke" ] || prepare_smoke
  exec env "${variables[@]}" "${torchrun[@]}"
}
