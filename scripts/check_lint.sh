#!/usr/bin/env bash
# clang-tidy (.clang-tidy) over the torch-free sources: those of the other folders take a minute each to parse.
# File names as arguments limit it to these; --part N takes every Nth file, from another one after each commit.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly build=build/lint
prefix=()
if [[ -d .deps/lib/cmake ]]; then prefix=("-DCMAKE_PREFIX_PATH=$PWD/.deps"); fi
# One compile command per file, where the real build puts several files into one; nothing is compiled here.
cmake -S . -B "$build" -G Ninja -DPHALANX_UNITY=OFF -DPHALANX_PCH=OFF -DPHALANX_BENCHMARKS=OFF "${prefix[@]}" >/dev/null

part=1
if [[ "${1:-}" == --part ]]; then
  part=$2
  shift 2
fi
files=("$@")
if [[ ${#files[@]} -eq 0 ]]; then
  first=$((0x$(git rev-parse --short=6 HEAD) % part))
  mapfile -t files < <(printf '%s\n' base observe schedule data data/tokenizer data/corpus |
    while read -r folder; do git ls-files ":(glob)phalanx/$folder/*.cc"; done | grep -v '_test\.cc$' | awk -v part="$part" -v first="$first" 'NR % part == first')
fi
# What the compilation database does not know, clang-tidy would guess at.
known=()
for file in "${files[@]}"; do
  if grep -qF "\"file\": \"$PWD/$file\"" "$build/compile_commands.json"; then known+=("$file"); fi
done
[[ ${#known[@]} -gt 0 ]] || { echo "check_lint: no file to check" >&2; exit 1; }

if ! printf '%s\0' "${known[@]}" | xargs -0 -n 1 -P "$(nproc)" \
  clang-tidy -p "$build" --quiet --extra-arg=-Wno-unknown-warning-option 2>"$build/clang-tidy.log"; then
  grep -E 'error:|Error ' "$build/clang-tidy.log" >&2 || true
  echo "check_lint: clang-tidy found what is printed above" >&2
  exit 1
fi
echo "check_lint: ${#known[@]} files, nothing found"
