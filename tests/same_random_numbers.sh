#!/usr/bin/env bash
# Every test binary that needs torch draws the same random numbers each time: same_random_numbers.cc is in it.
#   tests/same_random_numbers.sh FOLDER_OF_BINARIES
set -euo pipefail

looked=0 wrong=0
for binary in "$1"/*_test; do
  [[ $(readelf --dynamic --wide "$binary") == *libtorch_cpu* ]] || continue
  looked=$((looked + 1))
  grep -q SameRandomNumbers "$binary" && continue
  echo "$binary needs torch and does not link tests/same_random_numbers.cc: call phalanx_same_random_numbers()"
  wrong=1
done
[ $looked -gt 0 ] || { echo "no test binary in $1 needs torch: is this the folder of the build's tests?"; exit 1; }
exit $wrong
