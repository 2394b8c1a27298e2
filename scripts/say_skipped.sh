#!/usr/bin/env bash
# After ctest: which cases did not run here, and why. ctest itself counts a program with skipped cases as passed.
#
#   scripts/say_skipped.sh BUILD_FOLDER
set -euo pipefail

log=$1/Testing/Temporary/LastTest.log
[[ -e "$log" ]] || { echo "say_skipped: no $log: run ctest first" >&2; exit 1; }
# ctest:       3/82 Testing: comm        and, of a test that was skipped whole, its output and "Test Skipped.", or of a recipe
#              that its regular expression for that was found
# GoogleTest:  some_test.cc:12: Skipped
#              this machine has no GPU
awk '
  / Testing: / { test = $NF }
  /^[^ ]+:[0-9]+: Skipped$/ { getline reason; ++cases[test ": " reason] }
  /skipped: / && !/Skipped$/ { last = $0; sub(/^.*skipped: /, "", last) }
  /^Test Skipped\.$/ || /^Skip regular expression found in output/ { ++cases[test ": " last] }
  END {
    for (one in cases) printf "skipped %3d of %s\n", cases[one], one | "sort -k4"
    close("sort -k4")
    if (length(cases) == 0) print "nothing was skipped"
  }' "$log"
