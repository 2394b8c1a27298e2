#!/usr/bin/env bash
# clang-tidy (.clang-tidy) over sources of the library, without tests.
#
#   scripts/check_lint.sh                 all of them; about 12 minutes of processor time
#   scripts/check_lint.sh --part 3        every 3rd translation unit of them, from another one after each commit
#   scripts/check_lint.sh phalanx/comm    the translation units of the folders or files given
#
# It checks the unity sources that the build makes, because most of the time goes into parsing torch's headers.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly build=build/lint
prefix=()
if [[ -d .deps/lib/cmake ]]; then prefix=("-DCMAKE_PREFIX_PATH=$PWD/.deps"); fi
# Nothing is compiled here. clang cannot read the precompiled headers of another compiler.
cmake -S . -B "$build" -G Ninja -DPHALANX_UNITY=ON -DPHALANX_PCH=OFF -DPHALANX_BENCHMARKS=OFF "${prefix[@]}" >/dev/null

# OpenMP's header is the compiler's, not clang's, which has no attribute `malloc` with an argument.
mkdir -p "$build/include"
sed 's/__malloc__ (omp_free)/__malloc__/' "$(c++ -print-file-name=include/omp.h)" >"$build/include/omp.h"

part=1
if [[ "${1:-}" == --part ]]; then
  part=$2
  shift 2
fi
# One line for each translation unit: its file, and the sources that it consists of.
units=$(python3 - "$build" <<'END'
import json, os, re, sys
build, root = os.path.abspath(sys.argv[1]), os.getcwd()
for entry in sorted(json.load(open(f"{build}/compile_commands.json")), key=lambda entry: entry["file"]):
    file = entry["file"]
    text = open(file).read() if file.startswith(build + "/") and os.path.exists(file) else ""
    sources = re.findall(r'^#include "(.*\.cc)"$', text, re.M) or [file]
    sources = [os.path.relpath(source, root) for source in sources]
    is_product = all(re.match(r"(phalanx|cli)/", source) for source in sources)
    if is_product and not any(re.search(r"_test\.cc$|/testing/", source) for source in sources):
        print(file, *sources)
END
)
[[ $# -gt 0 ]] || set -- phalanx cli
wanted=()
for path in "$@"; do
  path=${path%/}
  found=$(grep -E " ${path//./\\.}(/| |\$)" <<<"$units" || true)
  [[ -n "$found" ]] || { echo "check_lint: no translation unit has a source of '$path' (tests are not checked)" >&2; exit 1; }
  wanted+=("$found")
done
units=$(printf '%s\n' "${wanted[@]}" | sort -u)
if [[ "$part" -gt 1 ]]; then
  first=$((0x$(git rev-parse --short=6 HEAD) % part))
  units=$(awk -v part="$part" -v first="$first" 'NR % part == first' <<<"$units")
fi
[[ -n "$units" ]] || { echo "check_lint: no file to check" >&2; exit 1; }

if ! cut -d ' ' -f 1 <<<"$units" | xargs -n 1 -P "$(nproc)" \
  clang-tidy -p "$build" --quiet --extra-arg=-Wno-unknown-warning-option --extra-arg=-Wno-unknown-pragmas \
  --extra-arg=-isystem"$PWD/$build/include" \
  --checks=-bugprone-suspicious-include \
  --header-filter="^$PWD/(phalanx|cli)/" 2>"$build/clang-tidy.log"; then
  grep -E 'error:|Error ' "$build/clang-tidy.log" >&2 || true
  echo "check_lint: clang-tidy found what is printed above" >&2
  exit 1
fi
echo "check_lint: $(wc -w <<<"$(cut -d ' ' -f 2- <<<"$units")") files, nothing found"
