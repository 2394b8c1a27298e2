#!/usr/bin/env bash
# The pictures of the documentation, drawn by the program itself: schedules of pipelines to scale, memory of layouts, and,
# with --measure, latency and bandwidth of collectives as this machine has them (so make that one on a quiet machine).
#
#   scripts/make_pictures.sh [--program build/release/bin/phalanx] [--measure]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

phalanx=build/release/bin/phalanx
measure=
while [[ $# -gt 0 ]]; do
  case $1 in
    --program) phalanx=$2; shift 2 ;;
    --measure) measure=yes; shift ;;
    -h | --help) sed -n '2,5s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "$0: unknown argument '$1'; known are --program, --measure" >&2; exit 2 ;;
  esac
done
[[ -x $phalanx ]] || { echo "$0: no program '$phalanx'; build it, or give --program" >&2; exit 2; }

mkdir -p docs/pictures
for name in GPipe 1F1B ZBV; do
  "$phalanx" schedule "$name" --ranks 4 --micro-batches 8 --svg "docs/pictures/$(echo "$name" | tr '[:upper:]' '[:lower:]').svg" >/dev/null
done

# memory NAME LAYOUT...: one model on eight devices, a step of one sequence for each.
memory() {
  local name=$1 layouts=()
  shift
  for layout in "$@"; do layouts+=(--layout "$layout"); done
  "$phalanx" plan --model llama3_1b --devices 8xA100-40G --seq 4096 --batch 8 --svg "docs/pictures/$name.svg" "${layouts[@]}" >/dev/null
}
memory memory dp_replicate=8 dp_shard=8,zero=1 dp_shard=8,zero=2 dp_shard=8,zero=3 tp=8 pp=8

if [[ -n $measure ]]; then
  "$phalanx" bench comm -n 2 --ops all_reduce,all_gather,reduce_scatter,all_to_all --backends shm,symmetric,gloo -b 4K -e 16M -f 4 \
    --plot docs/pictures/collectives.svg
fi
