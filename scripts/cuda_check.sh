#!/usr/bin/env bash
# Checks the CUDA flavour of Phalanx on a machine without a GPU.
#
#   scripts/cuda_check.sh             headers, and the link if the wheels are cached: what continuous integration runs
#   scripts/cuda_check.sh --headers   headers only: compiles what depends on CUDA against torch's own CUDA headers; and,
#                                     where there is an nvcc, the kernels
#   scripts/cuda_check.sh --full      also downloads the wheels (750 MB, once), builds and links everything against
#                                     torch's CUDA build, starts the program, which must say that there is no GPU, and
#                                     runs the tests of the nccl backend that need none
#
#   PHALANX_WHEEL_CACHE   where the wheels are, or go (default .deps/wheels)
#   PHALANX_CUDA_INCLUDE  the folder with cuda_runtime_api.h (default: of the nvcc on the path, else from PyPI)
#   JOBS                  compile jobs (default: as many as cores)
#
# torch's CPU wheel ships the CUDA headers, too, but for one generated file, for which a stub stands in. What the CUDA
# wheel's libraries need beyond it (cuBLAS, cuDNN and others, 1.9 GB) is replaced by libraries that only have the names:
# enough to start a program, and nothing here computes on a GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly torch_pin="torch===2.13.0"        # three equals signs: not 2.13.0+cpu
readonly nccl_pin="nvidia-nccl-cu13==2.29.7"  # what that torch asks for
readonly work=build/cuda
readonly cache=${PHALANX_WHEEL_CACHE:-.deps/wheels}
readonly jobs=${JOBS:-$(nproc)}
mode=${1:---cached}

say() { echo "cuda-check: $*"; }
fail() { echo "cuda-check: $*" >&2; exit 1; }
case "$mode" in --cached | --headers | --full) ;; *) fail "usage: scripts/cuda_check.sh [--headers | --full]" ;; esac

if [[ -x .venv/bin/python ]]; then python=$PWD/.venv/bin/python; else python=$(command -v python3) || fail "no python3"; fi
mkdir -p "$work"

# The wheels of packages, from PyPI, for the Python that the wheels are named after; nothing is installed.
download() {  # download FOLDER PACKAGE...
  local folder=$1 minor try
  shift
  local -a platforms=(--platform manylinux2014_x86_64)
  for minor in 17 18 25 27 28; do platforms+=(--platform "manylinux_2_${minor}_x86_64"); done
  for try in 1 2 3; do
    "$python" -m pip download --disable-pip-version-check --no-input -q --no-deps --only-binary :all: \
      --python-version 3.12 --implementation cp "${platforms[@]}" -d "$folder" "$@" && return
    say "pip cannot download $*, try $try of 3"
  done
  fail "pip cannot download $* (its output is above)"
}
unpack() { "$python" -m zipfile -e "$1" "$2"; }

# --------------------------------------------------------------------------------------------------- CUDA's headers

cuda_include=${PHALANX_CUDA_INCLUDE:-}
cuda_lib=
if [[ -z "$cuda_include" ]] && nvcc=$(command -v nvcc); then
  # The tree that nvcc itself uses, whatever wrapper is on the path.
  top=$("$nvcc" -dryrun -x cu /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p' | head -n 1)
  for folder in "$top/include" "$top/targets/x86_64-linux/include"; do
    if [[ -n "$top" && -e "$folder/cuda_runtime_api.h" ]]; then cuda_include=$(realpath "$folder") && break; fi
  done
  if [[ -n "$cuda_include" ]]; then
    for folder in "$cuda_include/../lib64" "$cuda_include/../lib"; do
      if [[ -e "$folder/libcudart.so.13" && -e "$folder/libcupti.so.13" ]]; then cuda_lib=$(realpath "$folder") && break; fi
    done
  fi
fi
fetch_cuda_runtime() {  # headers and the two libraries that torch's CPU part needs: some 30 MB
  local folder=$work/runtime
  if [[ ! -e "$folder/ready" ]]; then
    say "downloading CUDA's runtime headers"
    download "$folder/wheels" "nvidia-cuda-runtime==13.0.*" "nvidia-cuda-cupti==13.0.*" "nvidia-cuda-crt==13.0.*"
    local wheel
    for wheel in "$folder"/wheels/*.whl; do unpack "$wheel" "$folder"; done
    touch "$folder/ready"
  fi
  cuda_include=$PWD/$folder/nvidia/cu13/include
  cuda_lib=$PWD/$folder/nvidia/cu13/lib
}
if [[ -z "$cuda_include" ]]; then fetch_cuda_runtime; fi
[[ -e "$cuda_include/cuda_runtime_api.h" ]] || fail "no cuda_runtime_api.h in $cuda_include"

# ------------------------------------------------------------------------------------------------- what needs CUDA

# By their names: cuda_*.cc of every folder. nccl_header_check.cc needs nccl.h and waits for the wheel.
check_headers() {
  local torch found stub=$work/stub
  found=$(cmake -P cmake/PhalanxTorchSearch.cmake 2>&1) || fail "$found"
  torch=${found#* }
  mkdir -p "$stub/c10/cuda/impl"
  if [[ ! -e "$torch/include/c10/cuda/impl/cuda_cmake_macros.h" ]]; then
    printf '#pragma once\n#define C10_CUDA_BUILD_SHARED_LIBS\n' >"$stub/c10/cuda/impl/cuda_cmake_macros.h"
  fi
  local -a sources flags
  mapfile -t sources < <(git ls-files --cached --others --exclude-standard 'phalanx/*/cuda_*.cc' 'cli/cuda_*.cc')
  [[ ${#sources[@]} -gt 0 ]] || fail "no source is named cuda_*.cc"
  flags=(-std=c++20 -fsyntax-only -Wall -Wextra -Werror -Wno-missing-field-initializers -DFMT_HEADER_ONLY -I.
    -isystem "$stub" -isystem "$torch/include" -isystem "$torch/include/torch/csrc/api/include"
    -isystem "$cuda_include")
  local begin=$SECONDS
  printf '%s\0' "${sources[@]}" | xargs -0 -n 1 -P "$jobs" "${CXX:-g++}" "${flags[@]}" || fail "see above"
  say "${#sources[@]} source(s) compile against the CUDA headers of torch ${found%% *} in $((SECONDS - begin)) s:" \
    "${sources[*]}"
}
check_headers

# --------------------------------------------------------------------------------------------------- Phalanx's kernels

# Kernels that work on several elements at a time, by their names: the first number is not 1, or there is none. They must
# read, and write unless they only add up, 16 bytes at a time: nvcc sometimes takes an access apart.
readonly wide_accesses='
  function finish() {
    if (name == "") return
    if (!reads) { print name ": no 16-byte load"; found = 1 }
    if (!writes && name !~ /Squares/) { print name ": no 16-byte store"; found = 1 }
  }
  /^\t*\s*Function : / {
    finish()
    name = $3; reads = writes = 0
    first = match(name, /Li[0-9]+E/) ? substr(name, RSTART, RLENGTH) : ""
    if (name ~ /ColumnSums/ || first == "Li1E" || (first == "" && name !~ /CrossEntropy|AdamW|Squares/)) name = ""
    if (name != "") ++wide
  }
  /LDG\.E[A-Z.]*\.128/ { reads = 1 }
  /STG\.E[A-Z.]*\.128/ { writes = 1 }
  END {
    finish()
    if (!wide) { print "no kernel is found"; found = 1 }
    exit found
  }'

check_kernels() {
  local nvcc top tools object file
  nvcc=$(command -v nvcc) || { say "skipped: the kernels, as there is no nvcc"; return 0; }
  top=$("$nvcc" -dryrun -x cu /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p' | head -n 1)
  tools=$PATH:$top/bin
  local -a flags
  mapfile -t flags <cmake/nvcc_flags.txt
  while read -r file; do
    local begin=$SECONDS
    object=$work/$(basename "$file").o
    "$nvcc" -ccbin "${CXX:-g++}" "${flags[@]}" -I. -c "$file" -o "$object" >"$object.log" 2>&1 || fail "$(cat "$object.log")"
    if grep -E 'warning|[1-9][0-9]* bytes (stack frame|spill)' "$object.log"; then
      fail "$file: warnings, or registers that do not suffice (above)"
    fi
    say "$file: $(grep -c 'Compiling entry' "$object.log") kernels, of up to" \
      "$(sed -n 's/.*Used \([0-9]*\) registers.*/\1/p' "$object.log" | sort -n | tail -n 1) registers, none spilled" \
      "($((SECONDS - begin)) s)"
    if PATH=$tools command -v cuobjdump >/dev/null && PATH=$tools command -v nvdisasm >/dev/null; then
      PATH=$tools cuobjdump -sass "$object" | awk "$wide_accesses" || fail "$file: see above"
      say "$file: the wide kernels access 16 bytes at a time"
    else
      say "skipped: the machine code of $file, as cuobjdump and nvdisasm are missing"
    fi
  done < <(git ls-files --cached --others --exclude-standard '*.cu')
}
check_kernels
if [[ "$mode" == --headers ]]; then exit 0; fi

# --------------------------------------------------------------------------------------------- build, link and start

shopt -s nullglob
torch_wheel() { local found=("$cache"/torch-2.13.0-*.whl) && echo "${found[0]:-}"; }
nccl_wheel() { local found=("$cache"/nvidia_nccl_cu13-2.29.7-*.whl) && echo "${found[0]:-}"; }
if [[ -z "$(torch_wheel)" || -z "$(nccl_wheel)" ]]; then
  if [[ "$mode" == --cached ]]; then
    say "skipped: building and linking the CUDA flavour, as torch's CUDA wheel and NCCL's are not in $cache" \
      "(make cuda-check downloads them, 750 MB)"
    exit 0
  fi
  say "downloading $torch_pin and $nccl_pin into $cache (750 MB)"
  download "$cache" "$torch_pin" "$nccl_pin"
fi
tree=$work/tree
if [[ "$(cat "$tree/ready" 2>/dev/null)" != "$(torch_wheel) $(nccl_wheel)" ]]; then
  say "unpacking into $tree"
  rm -rf "$tree" && mkdir -p "$tree"
  unpack "$(torch_wheel)" "$tree"
  unpack "$(nccl_wheel)" "$tree"
  [[ -e "$tree/torch/lib/libtorch_cuda.so" ]] || fail "$(torch_wheel) is no CUDA build"
  echo "$(torch_wheel) $(nccl_wheel)" >"$tree/ready"
fi
if [[ -z "$cuda_lib" ]]; then fetch_cuda_runtime; fi

"${CXX:-g++}" -std=c++20 -fsyntax-only -Wall -Wextra -Werror -I. -isystem "$tree/nvidia/nccl/include" \
  -isystem "$cuda_include" phalanx/comm/backends/nccl/nccl_header_check.cc || fail "nccl_table.h differs from NCCL's nccl.h"
say "nccl_table.h agrees with the nccl.h of $nccl_pin"

# Libraries with the names, and symbols, of those that are missing.
stubs=$PWD/$work/stubs
if [[ ! -e "$stubs/ready" ]]; then
  rm -rf "$stubs" && mkdir -p "$stubs"
  "$python" scripts/cuda_stubs.py "$stubs" "$tree/torch/lib/libtorch_cuda.so" "$tree/torch/lib/libtorch_nvshmem.so" \
    --have "$cuda_lib" --have "$tree/torch/lib" --have "$tree/nvidia/nccl/lib"
  touch "$stubs/ready"
fi

prefix=()
if [[ -d .deps/lib/cmake ]]; then prefix=("-DCMAKE_PREFIX_PATH=$PWD/.deps"); fi
cmake --preset release -B "$work/build" -DPHALANX_TORCH_DIR="$PWD/$tree/torch" -DPHALANX_CUDA_INCLUDE="$cuda_include" \
  -DPHALANX_CUDA_LIB="$cuda_lib" -DPHALANX_BENCHMARKS=OFF "${prefix[@]}" >"$work/configure.log" ||
  fail "cmake failed: $(tail -n 20 "$work/configure.log")"
begin=$SECONDS
cmake --build "$work/build" --parallel "$jobs" || fail "the CUDA flavour does not build"
say "the CUDA flavour is compiled and linked ($((SECONDS - begin)) s)"

export LD_LIBRARY_PATH=$stubs:$cuda_lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
"$work/build/bin/phalanx" doctor >"$work/doctor.log" 2>&1 || { cat "$work/doctor.log" && fail "phalanx doctor failed"; }
grep -E 'libtorch|nccl|GPU' "$work/doctor.log"
grep -qE 'libtorch .*CUDA build' "$work/doctor.log" || fail "phalanx doctor does not say that this is a CUDA build"
if [[ ! -e /proc/driver/nvidia/version ]]; then
  grep -qE 'GPU .*none' "$work/doctor.log" || fail "phalanx doctor does not say that there is no GPU"
fi
say "the program starts"

# The nccl backend's logic over doubles of NCCL and of streams, which need no GPU; cases that do say that they skip.
for test in comm_device_test comm_backends_nccl_test comm_hierarchical_test; do
  GTEST_FILTER='*Nccl*:*Cuda*' "$work/build/bin/$test" --gtest_brief=1 >"$work/$test.log" 2>&1 ||
    fail "$test of the CUDA flavour failed: $(tail -n 20 "$work/$test.log")"
  say "$test passes over doubles of NCCL and of streams: $(grep -c Skipped "$work/$test.log") cases want a GPU"
done
if [[ -e /proc/driver/nvidia/version ]] && compgen -G "$stubs/libcublas*" >/dev/null; then
  say "sharded training on the GPU is not tried: a library that only has cuBLAS's names stands in for it"
  exit 0
fi
GTEST_FILTER='GpuSharding*' "$work/build/bin/train_test" --gtest_brief=1 >"$work/train_test.log" 2>&1 ||
  fail "sharded training on the GPU failed: $(tail -n 20 "$work/train_test.log")"
say "sharded training on a GPU: $(grep -c Skipped "$work/train_test.log") cases skipped for want of one"
