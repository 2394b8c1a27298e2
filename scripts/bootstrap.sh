#!/usr/bin/env bash
# Installs what building Phalanx needs, and nothing that is already there. Safe to run again: a second run takes about
# a second.
#
#   scripts/bootstrap.sh            compilers, libraries, libtorch
#   scripts/bootstrap.sh --checks   also clang-format and clang-tidy, for `make check` and `make format`
#   scripts/bootstrap.sh --tests    also safetensors and numpy in .venv, where that is used: a test reads checkpoints by
#                                   Python; and clang with its runtime libraries, for `make fuzz`. Either says that it is
#                                   skipped where these cannot be had
#   scripts/bootstrap.sh --mpi      also Open MPI, for the mpi backend; its package brings a Fortran compiler
#   scripts/bootstrap.sh --slurm    also Slurm's daemons and munge, for `make slurm`
#
#   PHALANX_TORCH_DIR   use the libtorch in this folder (holding include/ and lib/)
#   PHALANX_PYTHON      use this Python for the search, and to make .venv
#
# System packages come from apt-get, as root or through sudo. Where neither may be used, the one line to run is printed
# and the script stops with status 3. libtorch 2.11 to 2.13 is taken from PHALANX_TORCH_DIR, else from the active Python
# environment, else from .venv, which is made with torch 2.13.0 if need be.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly torch_pin="torch==2.13.0"
required=(g++ cmake ninja-build make pkg-config libspdlog-dev libfmt-dev nlohmann-json3-dev libcli11-dev
  libtomlplusplus-dev libpcre2-dev protobuf-compiler libprotobuf-dev libgtest-dev libgmock-dev libbenchmark-dev
  libxxhash-dev libsimdjson-dev libgloo-dev libssl-dev zlib1g-dev libutf8proc-dev)
optional=(ccache mold libzstd-dev)  # faster builds, text compressed by zstd
if [[ "${1:-}" == --checks ]]; then
  required+=(clang-format clang-tidy)
elif [[ "${1:-}" == --slurm ]]; then
  required+=(slurmctld slurmd slurm-client munge)
elif [[ "${1:-}" == --mpi ]]; then
  required+=(libopenmpi-dev openmpi-bin)
elif [[ "${1:-}" == --tests ]]; then
  optional+=(iproute2)  # tests over network namespaces
elif [[ $# -gt 0 ]]; then
  echo "usage: scripts/bootstrap.sh [--checks | --mpi | --slurm | --tests]" >&2
  exit 2
fi

say() { echo "bootstrap: $*"; }
fail() { echo "bootstrap: $*" >&2; exit 1; }

# ---------------------------------------------------------------------------------------------- system packages

missing_of() {  # those of the named packages that are not installed, one a line
  local installed
  installed=" $(dpkg-query -W -f='${db:Status-Status}=${Package} ' "$@" 2>/dev/null || true)"
  local package
  for package in "$@"; do
    [[ "$installed" == *" installed=$package "* ]] || echo "$package"
  done
}

has_candidate() {
  local policy
  policy=$(apt-cache policy "$1" 2>/dev/null)
  [[ "$policy" == *Candidate:* && "$policy" != *"Candidate: (none)"* ]]
}

# How apt-get may be called: nothing in front of it, sudo, or not at all.
apt_prefix() {
  if [[ "$(id -u)" == 0 ]]; then
    echo ""
  elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
    echo "sudo -n"
  else
    return 1
  fi
}

install_packages() {
  local prefix
  if ! prefix=$(apt_prefix); then
    {
      echo "bootstrap: these system packages are missing, and apt-get needs root or passwordless sudo. Run this line,"
      echo "bootstrap: then try again:"
      echo
      echo "    sudo apt-get update && sudo apt-get install -y --no-install-recommends $*"
      echo
    } >&2
    exit 3
  fi
  say "installing system packages: $*"
  # One word each, or none, of the prefix.
  # shellcheck disable=SC2086
  $prefix env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
    -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0 -q "$@" || fail "apt-get could not install: $* (its output is above)"
}

update_package_lists() {
  local prefix
  prefix=$(apt_prefix) || return 0
  say "updating apt's package lists"
  # shellcheck disable=SC2086
  $prefix apt-get update -q || say "apt-get update failed; going on with the lists that are there"
}

# A Python that can make a virtual environment for this torch, or nothing.
suitable_python() {
  local python
  for python in ${PHALANX_PYTHON:+"$PHALANX_PYTHON"} python3 /usr/bin/python3 python3.13 python3.12 python3.11 python3.10; do
    if "$python" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' \
      >/dev/null 2>&1; then
      echo "$python"
      return
    fi
  done
}

find_torch() { cmake -P cmake/PhalanxTorchSearch.cmake 2>&1; }

check_system_packages() {
  if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
    say "no apt-get on this system: taking it that these are installed by other means: ${required[*]}"
    return
  fi
  local -a missing=() wanted=()
  mapfile -t missing < <(missing_of "${required[@]}")
  # clang-format and others may be there under another package's name; the command is what counts.
  local package
  for package in "${missing[@]}"; do
    case "$package" in
      g++ | cmake | make | ccache | mold | clang-format | clang-tidy | pkg-config)
        command -v "$package" >/dev/null || wanted+=("$package") ;;
      ninja-build) command -v ninja >/dev/null || wanted+=("$package") ;;
      libtomlplusplus-dev) [[ -e .deps/include/toml++/toml.h ]] || wanted+=("$package") ;;
      libgmock-dev) [[ -e /usr/include/gmock/gmock.h ]] || wanted+=("$package") ;;
      *) wanted+=("$package") ;;
    esac
  done
  if ! find_torch_possible_without_venv && [[ -z "$(suitable_python)" ]]; then
    wanted+=(python3 python3-venv)
  fi

  local -a extras=()
  mapfile -t missing < <(missing_of "${optional[@]}")
  for package in "${missing[@]}"; do
    command -v "$package" >/dev/null || extras+=("$package")
  done
  if [[ ${#wanted[@]} -eq 0 && ${#extras[@]} -eq 0 ]]; then
    say "system packages: all there"
    return
  fi

  for package in "${wanted[@]}"; do
    if ! has_candidate "$package"; then
      update_package_lists
      break
    fi
  done
  local -a available=()
  for package in "${wanted[@]}"; do
    if has_candidate "$package" || ! apt_prefix >/dev/null; then
      available+=("$package")
    elif [[ "$package" == libtomlplusplus-dev ]]; then
      need_tomlplusplus=yes
    else
      fail "apt knows no package $package: Debian 12, Ubuntu 22.04 or later is needed (on Ubuntu: enable 'universe')"
    fi
  done
  # An optional package is never a reason to stop.
  if apt_prefix >/dev/null || [[ ${#available[@]} -gt 0 ]]; then
    for package in "${extras[@]}"; do
      if has_candidate "$package"; then available+=("$package"); fi
    done
  elif [[ ${#extras[@]} -gt 0 ]]; then
    say "system packages: all that is needed is there (would help, but may not be installed here: ${extras[*]})"
  fi
  if [[ ${#available[@]} -gt 0 ]]; then install_packages "${available[@]}"; fi
}

# True where the search can succeed without a .venv of ours; before cmake is installed nobody knows.
find_torch_possible_without_venv() { command -v cmake >/dev/null && find_torch >/dev/null; }

# ------------------------------------------------------------------------------------------------------ libtorch

install_torch() {
  if [[ -n "${PHALANX_TORCH_DIR:-}" ]]; then
    fail "PHALANX_TORCH_DIR=$PHALANX_TORCH_DIR is not a usable libtorch: $(find_torch | grep -v '^CMake' || true)"
  fi
  local python
  python=$(suitable_python)
  [[ -n "$python" ]] || fail "no Python 3.10 to 3.14 with the venv module: name one with PHALANX_PYTHON"
  if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    say "making .venv with $("$python" --version)"
    rm -rf .venv
    "$python" -m venv .venv
  fi
  say "installing $torch_pin into .venv (some 200 MB for the CPU build, several GB for PyPI's CUDA build; see docs/install.md)"
  .venv/bin/python -m pip install --disable-pip-version-check --no-input "$torch_pin" ||
    fail "pip could not install $torch_pin (its output is above). Without PyPI: unpack a libtorch 2.11 to 2.13 yourself and set PHALANX_TORCH_DIR"
}

# Ubuntu 22.04 has no package of toml++ (header-only, MIT). The sources of pytomlpp on PyPI carry it.
install_tomlplusplus() {
  local scratch python
  python=$(suitable_python)
  [[ -n "$python" ]] || fail "no Python 3.10 to 3.14 with the venv module: name one with PHALANX_PYTHON"
  scratch=$(mktemp -d)
  say "installing toml++ into .deps (apt knows no libtomlplusplus-dev here)"
  "$python" -m venv "$scratch/venv"
  "$scratch/venv/bin/python" -m pip install --disable-pip-version-check --no-input -q 'setuptools<81' wheel &&
    "$scratch/venv/bin/python" -m pip download --disable-pip-version-check --no-input -q --no-deps --no-binary :all: \
      --no-build-isolation -d "$scratch" pytomlpp==1.0.13 || fail "pip could not fetch pytomlpp==1.0.13"
  tar -xzf "$scratch"/pytomlpp-1.0.13.tar.gz -C "$scratch"
  mkdir -p .deps/include .deps/lib/cmake/tomlplusplus
  cp -r "$scratch/pytomlpp-1.0.13/third_party/tomlplusplus/include/toml++" .deps/include/
  cat >.deps/lib/cmake/tomlplusplus/tomlplusplusConfig.cmake <<'END'
if(NOT TARGET tomlplusplus::tomlplusplus)
  add_library(tomlplusplus::tomlplusplus INTERFACE IMPORTED)
  set_target_properties(tomlplusplus::tomlplusplus PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${CMAKE_CURRENT_LIST_DIR}/../../../include")
endif()
END
  rm -rf "$scratch"
}

need_tomlplusplus=no
check_system_packages
if [[ "$need_tomlplusplus" == yes ]]; then install_tomlplusplus; fi
if ! found=$(find_torch); then
  install_torch
  found=$(find_torch) || fail "libtorch is not usable after its installation: $found"
fi
# Not into a Python environment that is the user's.
if [[ "${1:-}" == --tests && "$found" == *"$PWD/.venv/"* ]] &&
  ! compgen -G '.venv/lib/python3*/site-packages/safetensors' >/dev/null; then
  say "installing safetensors and numpy into .venv, for a test"
  .venv/bin/python -m pip install --disable-pip-version-check --no-input -q safetensors numpy ||
    say "pip could not install them (its output is above): the test will be skipped"
fi
# clang's name for the runtime libraries carries its version: libclang-rt-14-dev in Debian 12; in Ubuntu 22.04 they come
# with clang itself.
install_fuzzer() {
  local version
  has_candidate clang || update_package_lists
  version=$(apt-cache depends clang 2>/dev/null | sed -n 's/.*Depends: clang-\([0-9]*\)$/\1/p' | head -n 1)
  local -a packages=(clang)
  if has_candidate "libclang-rt-$version-dev"; then packages+=("libclang-rt-$version-dev"); fi
  install_packages "${packages[@]}"
}
if [[ "${1:-}" == --tests ]] && ! scripts/fuzz.sh --find-compiler >/dev/null; then
  if command -v apt-get >/dev/null && apt_prefix >/dev/null; then
    (install_fuzzer) || say "clang could not be installed (see above): the parsers will not be fuzzed"
  else
    say "no clang with libFuzzer here, and apt-get may not be used: the parsers will not be fuzzed"
  fi
fi
say "libtorch ${found%% *} in ${found#* }"
say "ready"
