#!/usr/bin/env bash
# The pictures of the documentation, drawn by the program itself: schedules of pipelines to scale, and latency and
# bandwidth of collectives as this machine has them (which the second one is of, so make it on a quiet one).
#
#   scripts/make_pictures.sh [--program build/release/bin/phalanx] [--schedules-only]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

phalanx=build/release/bin/phalanx
only=
while [[ $# -gt 0 ]]; do
  case $1 in
    --program) phalanx=$2; shift 2 ;;
    --schedules-only) only=yes; shift ;;
    -h | --help) sed -n '2,5s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "$0: unknown argument '$1'; known are --program, --schedules-only" >&2; exit 2 ;;
  esac
done
[[ -x $phalanx ]] || { echo "$0: no program '$phalanx'; build it, or give --program" >&2; exit 2; }

mkdir -p docs/pictures
for name in GPipe 1F1B ZBV; do
  "$phalanx" schedule "$name" --ranks 4 --micro-batches 8 --svg "docs/pictures/$(echo "$name" | tr '[:upper:]' '[:lower:]').svg" >/dev/null
done
if [[ -z $only ]]; then
  "$phalanx" bench comm -n 2 --ops all_reduce,all_gather,reduce_scatter,all_to_all --backends shm,symmetric,gloo -b 4K -e 16M -f 4 \
    --plot docs/pictures/collectives.svg
fi
