# SPDX-License-Identifier: Apache-2.0
# Shared by the scripts of this folder (source it): steps with elapsed time, Debian packages, CUDA, builds, the count of results.
# Everything that is written lies under build/ of the checkout.
# shellcheck shell=bash

CALLER=$PWD  # relative paths on the command line count from here
FLAMIA_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$FLAMIA_ROOT"
BUILD=$FLAMIA_ROOT/build
JOBS=${JOBS:-$(nproc)}
# Test programs run side by side: a thread that waits must not spin on a core that another one needs.
export OMP_WAIT_POLICY=passive
export PYTHONPYCACHEPREFIX=$BUILD/pycache

BUILD_PACKAGES=(g++ cmake ninja-build git libcli11-dev nlohmann-json3-dev libfmt-dev libgtest-dev libgmock-dev libbenchmark-dev python3)

say() { printf '[%4d s] %s\n' "$SECONDS" "$*"; }
fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# ---- packages ---------------------------------------------------------------------------------------------------------------------

# installed PACKAGE...: prints those that dpkg does not have.
missing_packages() {
  local package
  for package in "$@"; do
    [[ $(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || echo "$package"
  done
}

# require_packages PACKAGE...: installs what is missing; touches apt only then.
require_packages() {
  local missing sudo=()
  if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
    say "not a Debian system: these packages, or what they are called here, must be installed: $*"
    return
  fi
  mapfile -t missing < <(missing_packages "$@")
  ((${#missing[@]})) || return 0
  if ((EUID != 0)); then
    command -v sudo >/dev/null ||
      fail "these Debian packages are missing, and there is neither root nor sudo to install them: ${missing[*]}. Have them installed, then run this again."
    sudo=(sudo)
  fi
  say "installing ${missing[*]}"
  local apt=("${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300)
  "${apt[@]}" update || say "apt-get update failed: trying with the package lists that are there"
  "${apt[@]}" install --yes --no-install-recommends "${missing[@]}" >/dev/null ||
    fail "apt-get could not install: ${missing[*]}. Its message is above."
}

# require_python MODULE PACKAGE: sets PYTHON to an interpreter that has MODULE, Debian's own if need be (installs PACKAGE).
require_python() {
  local candidate
  for candidate in python3 /usr/bin/python3; do
    if "$candidate" -c "import $1" 2>/dev/null; then
      PYTHON=$candidate
      return
    fi
  done
  require_packages python3 "$2"
  PYTHON=/usr/bin/python3
  "$PYTHON" -c "import $1" || fail "Python has no module $1 although $2 is installed"
}

# has_torch: sets PYTHON to an interpreter with what the Python tests import, the one that is there or the one of begin_torch.
has_torch() {
  local candidate
  for candidate in python3 /usr/bin/python3 "$BUILD/python/bin/python"; do
    if "$candidate" -c 'import numpy, pytest, safetensors, torch; assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)' 2>/dev/null; then
      PYTHON=$candidate
      return
    fi
  done
  return 1
}

# begin_torch: if there is none, installs PyTorch and its companions under build/, in the background: minutes of waiting for the network,
# once. end_torch waits for it; fails with the reason in WHY where there is no network or no room.
TORCH_GB=9  # PyPI's torch brings CUDA's libraries along: 5 GB installed, and the downloads beside it
TORCH_JOB=
begin_torch() {
  local free
  ! has_torch || return 0
  mkdir -p "$BUILD"
  free=$(df --output=avail -BG "$BUILD" | tail -n 1)
  WHY="no PyTorch 2.11, and too little room to install it: $((${free%G})) GB of $TORCH_GB are free under ${BUILD#"$FLAMIA_ROOT"/}/"
  ((${free%G} >= TORCH_GB)) || return 0
  WHY="no PyTorch 2.11, and none could be installed: see ${BUILD#"$FLAMIA_ROOT"/}/python.log"
  python3 -c 'import ensurepip' 2>/dev/null || require_packages python3-venv
  say "installing PyTorch under build/ meanwhile (minutes, once)"
  set -m  # a process group of its own, so that stop_torch can end it
  install_torch >"$BUILD/python.log" 2>&1 </dev/null &
  TORCH_JOB=$!
  set +m
}
# Without byte code: most of it would never run.
install_torch() {
  local own=$BUILD/python
  local pip=("$own/bin/python" -m pip install --no-cache-dir --no-compile --retries 2)
  rm -rf "$own" && python3 -m venv "$own" && mkdir "$own/tmp" && export TMPDIR=$own/tmp &&
    "${pip[@]}" 'torch>=2.11' numpy pytest safetensors 'transformers>=5,<6' || return 1
  # needs the newest PyTorch; without it its tests are skipped, and say so
  "${pip[@]}" 'torchtitan>=0.3,<0.4' || true
}
end_torch() {
  if [[ -n $TORCH_JOB ]]; then
    wait "$TORCH_JOB" || true
    TORCH_JOB=
  fi
  has_torch
}
stop_torch() { [[ -z $TORCH_JOB ]] || kill -- "-$TORCH_JOB" 2>/dev/null || true; }

# ---- CUDA -------------------------------------------------------------------------------------------------------------------------

CUDA_LEAST=13

# find_nvcc: sets NVCC (empty if there is none) and says what was found.
find_nvcc() {
  local release
  NVCC=$(command -v nvcc || true)
  [[ -n $NVCC || ! -x ${CUDA_HOME:-/usr/local/cuda}/bin/nvcc ]] || NVCC=${CUDA_HOME:-/usr/local/cuda}/bin/nvcc
  if [[ -z $NVCC ]]; then
    say "no CUDA compiler (nvcc $CUDA_LEAST or later): the GPU part is not compiled"
    return
  fi
  release=$("$NVCC" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
  if ((${release%%.*} < CUDA_LEAST)); then
    say "nvcc $release is too old (needs $CUDA_LEAST): the GPU part is not compiled"
    NVCC=
  else
    say "nvcc $release: the GPU part is compiled too"
  fi
}

# find_gpu: sets GPU to the name of the first Hopper GPU (compute capability 9.0), empty if there is none.
find_gpu() {
  GPU=
  if command -v nvidia-smi >/dev/null; then
    GPU=$(nvidia-smi --query-gpu=compute_cap,name --format=csv,noheader 2>/dev/null | sed -n 's/^9\.0, *//p' | head -n 1) || GPU=
  fi
  if [[ -n $GPU ]]; then say "GPU: $GPU"; else say "no Hopper GPU here"; fi
}

# choose_preset [DEVICE]: sets PRESET, NVCC and GPU for a program that is to run here, on DEVICE (cpu, cuda or none given). The kernels
# take minutes to compile, so only where they can run, or where cuda is asked for.
choose_preset() {
  PRESET=cpu NVCC='' GPU=''
  if [[ ${1:-} == cpu ]]; then
    say "device cpu: the GPU part is not compiled"
    return
  fi
  find_gpu
  if [[ -z $GPU && ${1:-} != cuda ]]; then
    say "the GPU part is not compiled"
    return
  fi
  find_nvcc
  [[ -z $NVCC ]] || PRESET=cuda
}

# ---- builds -----------------------------------------------------------------------------------------------------------------------

# configure FOLDER PRESET [OPTION...]: into build/FOLDER.
configure() {
  local folder=$BUILD/$1 preset=$2 options=()
  shift 2
  if [[ $preset == cuda ]]; then
    # The launcher keeps ptxas's report beside every object, for scripts/registers.
    options=("-DCMAKE_CUDA_COMPILER=$NVCC" "-DCMAKE_CUDA_COMPILER_LAUNCHER=$FLAMIA_ROOT/scripts/keep_ptxas_report")
  fi
  mkdir -p "$folder"
  cmake --preset "$preset" -B "$folder" "${options[@]}" "$@" >"$folder/configure.log" 2>&1 || {
    cat "$folder/configure.log"
    return 1
  }
}

# build FOLDER [TARGET...]: a line on how far it is now and then; all it says if it fails or warns.
build() {
  local folder=$BUILD/$1 log=$BUILD/$1/build.log status=0 maker said=$SECONDS
  shift
  cmake --build "$folder" --parallel "$JOBS" ${1:+--target "$@"} >"$log" 2>&1 &
  maker=$!
  while kill -0 "$maker" 2>/dev/null; do
    sleep 0.5
    if ((SECONDS - said >= 15)); then
      said=$SECONDS
      say "  $(tail -n 200 "$log" | sed -n 's/^\(\[[0-9]*\/[0-9]*\]\).*/\1/p' | tail -n 1) ${folder#"$FLAMIA_ROOT"/}"
    fi
  done
  wait "$maker" || status=$?
  if ((status != 0)); then
    # One failing command comes after very many of these lines.
    grep -v '^\[[0-9]*/[0-9]*\] \(Building\|Linking\|Generating\)' "$log" | tail -n 200
    return 1
  fi
  ! grep 'warning:' "$log" | sed "s|$FLAMIA_ROOT/||g" | cut -c -200 || say "the build in ${folder#"$FLAMIA_ROOT"/} warns (lines above)"
}

# targets FOLDER...: the ninja targets "everything in this folder" of those that exist with a CMakeLists.txt.
targets() {
  local folder
  for folder in "$@"; do
    [[ ! -f $folder/CMakeLists.txt ]] || echo "$folder/all"
  done
}
