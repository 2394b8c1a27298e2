#!/usr/bin/env bash
# Runs targets of the Makefile one after the other, each to its end whether or not one before it failed, and ends with a
# table of their results and times. `make test-all` runs it; on two cores it takes hours.
#
#   scripts/test_all.sh build/release/test_all whole slurm soak
#
# FOLDER gets NAME.log of each target and NAME.passed where it passed. So a call that was stopped goes on: a target that
# passed on the same sources, with the same settings, is not run again. Status 1 where one failed.
set -euo pipefail
cd "$(dirname "$0")/.."

[[ $# -ge 2 ]] || { echo "usage: scripts/test_all.sh FOLDER TARGET..." >&2; exit 2; }
folder=$1
shift
mkdir -p "$folder"

# The commit, what differs from it, and the settings that choose cases and times.
others=$(git ls-files -z --others --exclude-standard | xargs -0 -r sha1sum | git hash-object --stdin)
settings="${MAKEFLAGS:-} $(env | sed -nE '/^(PHALANX_|TEST_SEED=|FAULTS=|RUN_FAULTS=|FUZZ_(SECONDS|PART)=|LINT_PART=)/p' | sort | tr '\n' ' ')"
sources="$(git rev-parse HEAD) $(git diff HEAD | git hash-object --stdin) $others $settings"
failed=0
rows=()
for target in "$@"; do
  passed=$folder/$target.passed
  if [[ -e $passed && $(head -n 1 "$passed") == "$sources" ]]; then
    rows+=("$target passed before, in $(sed -n 2p "$passed") s")
    continue
  fi
  rm -f "$passed"
  echo "== $target ($((${#rows[@]} + 1)) of $#, $(date +%H:%M))"
  begin=$SECONDS
  if make --no-print-directory "$target" 2>&1 | tee "$folder/$target.log"; then
    if skipped=$(grep -m 1 -E '^([a-z_]+: )?skipped: ' "$folder/$target.log"); then
      rows+=("$target: $skipped")
      continue
    fi
    printf '%s\n%s\n' "$sources" "$((SECONDS - begin))" >"$passed"
    rows+=("$target passed in $((SECONDS - begin)) s")
  else
    failed=1
    rows+=("$target FAILED after $((SECONDS - begin)) s: $folder/$target.log")
  fi
done
echo "== results"
printf '%s\n' "${rows[@]}"
exit "$failed"
