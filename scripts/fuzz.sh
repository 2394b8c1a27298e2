#!/usr/bin/env bash
# Every parser of files that come from elsewhere, under libFuzzer with AddressSanitizer and UndefinedBehaviorSanitizer
# (tests/fuzz). Ends with a table; fails where a parser crashed, took more than 512 MiB at once or 2 GiB in all, or 10 s.
#
#   scripts/fuzz.sh [--seconds 20] [--jobs 2] [TARGET...]
#   scripts/fuzz.sh --part 3       every 3rd parser, from another one after each commit; the others are not built
#
# What was found useful is kept in build/fuzz/corpus for the next run; an input that fails stays in build/fuzz/findings:
# build/fuzz/bin/fuzz_TARGET FILE runs it again. Needs clang with its runtime libraries (scripts/bootstrap.sh --tests);
# without them it says so and ends with status 77 ("skipped").
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

seconds=20
jobs=2
part=1
find_only=
targets=()
while [[ $# -gt 0 ]]; do
  case $1 in
    --seconds) seconds=$2; shift 2 ;;
    --jobs) jobs=$2; shift 2 ;;
    --part) part=$2; shift 2 ;;
    --find-compiler) find_only=yes; shift ;;  # prints it, or fails
    -h | --help) sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 0 ;;
    -*) echo "$0: unknown option '$1'; known are --seconds, --jobs, --part" >&2; exit 2 ;;
    *) targets+=("$1"); shift ;;
  esac
done

readonly build=build/fuzz
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# A clang whose runtime libraries are there.
compiler=
echo 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }' >"$scratch/empty.cc"
for candidate in ${PHALANX_CLANG:-} clang++ clang++-{20..14}; do
  if "$candidate" -fsanitize=fuzzer,address,undefined "$scratch/empty.cc" -o "$scratch/empty" 2>/dev/null; then
    compiler=$candidate
    break
  fi
done
if [[ -n $find_only ]]; then
  echo "$compiler"
  [[ -n $compiler ]]
  exit
fi
if [[ -z $compiler ]]; then
  echo "fuzz: skipped: no clang++ here that links -fsanitize=fuzzer,address (scripts/bootstrap.sh --tests installs one where it can)"
  exit 77
fi

known=()
for source in tests/fuzz/*.cc; do known+=("$(basename "$source" .cc)"); done
for target in "${targets[@]}"; do
  [[ " ${known[*]} " == *" $target "* ]] || { echo "$0: no target '$target'; there are ${known[*]}" >&2; exit 2; }
done
[[ $part =~ ^[1-9][0-9]*$ && $part -le ${#known[@]} ]] ||
  { echo "$0: --part is '$part', expected a whole number from 1 to ${#known[@]}" >&2; exit 2; }
if [[ ${#targets[@]} -eq 0 ]]; then
  first=0
  if [[ $part -gt 1 ]]; then first=$((0x$(git rev-parse --short=6 HEAD) % part)); fi
  for ((i = first; i < ${#known[@]}; i += part)); do targets+=("${known[i]}"); done
fi

prefix=()
if [[ -d .deps/lib/cmake ]]; then prefix=("-DCMAKE_PREFIX_PATH=$PWD/.deps"); fi
cmake -S . -B "$build" -G Ninja -DPHALANX_FUZZ=ON -DCMAKE_CXX_COMPILER="$compiler" -DCMAKE_BUILD_TYPE=Release "${prefix[@]}" >"$scratch/log" 2>&1 &&
  cmake --build "$build" --parallel "$jobs" --target "${targets[@]/#/fuzz_}" >>"$scratch/log" 2>&1 || { cat "$scratch/log" >&2; exit 1; }

python3 tests/fuzz/make_seeds.py "$build/seeds"
mkdir -p "$build/findings"

run_target() {
  local target=$1
  mkdir -p "$build/corpus/$target"
  # detect_leaks: a parser that throws leaves its memory to RAII; LeakSanitizer needs ptrace, which containers refuse.
  # TMPDIR: token files and images are files, written for every input.
  local status=0
  TMPDIR=$([[ -w /dev/shm ]] && echo /dev/shm || echo "${TMPDIR:-/tmp}") \
    ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=0 UBSAN_OPTIONS=print_stacktrace=1 \
    "$build/bin/fuzz_$target" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -malloc_limit_mb=512 \
    -max_len=65536 -print_final_stats=1 -artifact_prefix="$build/findings/$target-" \
    "$build/corpus/$target" "$build/seeds/$target" >"$build/$target.log" 2>&1 || status=$?
  local runs rate
  runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$build/$target.log")
  rate=$(sed -n 's/^stat::average_exec_per_sec: *//p' "$build/$target.log")
  printf '%-20s %12s %10s  %s\n' "$target" "${runs:--}" "${rate:--}" \
    "$([[ $status == 0 ]] && echo "nothing found" || echo "FOUND: see $build/$target.log")"
  return $status
}
export -f run_target
export build seconds

printf '%-20s %12s %10s\n' target inputs "a second"
printf '%s\0' "${targets[@]}" | xargs -0 -n 1 -P "$jobs" bash -c 'run_target "$1"' run_target || exit 1
