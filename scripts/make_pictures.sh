#!/usr/bin/env bash
# The pictures of the documentation, drawn by the program itself: schedules of pipelines to scale, memory of layouts, and,
# with --measure, latency and bandwidth of collectives as this machine has them (so make that one on a quiet machine).
#
#   scripts/make_pictures.sh [--program build/release/bin/phalanx] [--measure]
#   scripts/make_pictures.sh [--program build/release/bin/phalanx] --check      fails where one is not what is drawn (a test)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

phalanx=build/release/bin/phalanx
measure= check=
while [[ $# -gt 0 ]]; do
  case $1 in
    --program) phalanx=$2; shift 2 ;;
    --measure) measure=yes; shift ;;
    --check) check=yes; shift ;;
    -h | --help) sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "$0: unknown argument '$1'; known are --program, --measure, --check" >&2; exit 2 ;;
  esac
done
[[ -x $phalanx ]] || { echo "$0: no program '$phalanx'; build it, or give --program" >&2; exit 2; }

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
drawn=$folder/drawn
mkdir "$drawn"
for name in GPipe 1F1B ZBV; do
  "$phalanx" schedule "$name" --ranks 4 --micro-batches 8 --svg "$drawn/${name,,}.svg" >/dev/null
done
# Decoding over four stages is the forward half of GPipe: the micro-batches are tokens of four groups of prompts in turn. The
# picture's title is the file's name.
"$phalanx" schedule GPipe --ranks 4 --micro-batches 16 --csv "$folder/Decoding.csv" >/dev/null
"$phalanx" schedule --from "$folder/Decoding.csv" --times F=1,B=0 --svg "$drawn/decoding.svg" >/dev/null

# memory NAME MODEL DEVICES TOKENS SEQUENCES LAYOUT...
memory() {
  local name=$1 model=$2 devices=$3 tokens=$4 sequences=$5 layouts=()
  shift 5
  for layout in "$@"; do layouts+=(--layout "$layout"); done
  "$phalanx" plan --model "$model" --devices "$devices" --seq "$tokens" --batch "$sequences" --local-batch 1 "${layouts[@]}" \
    --svg "$drawn/$name.svg" >/dev/null
}
memory memory llama3_1b 8xA100-40G 4096 8 dp_replicate=8 dp_shard=8,zero=1 dp_shard=8,zero=2 dp_shard=8,zero=3 tp=8 pp=8
memory memory_data llama3_1b 8xA100-40G 4096 8 dp_replicate=1 dp_replicate=2 dp_replicate=8 dp_replicate=8,ac=full
memory memory_sharding llama3_8b 8xH100 4096 8 dp_replicate=8 dp_shard=8,zero=1 dp_shard=8,zero=2 dp_shard=8,zero=3 \
  dp_replicate=2,dp_shard=4,zero=3
memory memory_tensor llama3_8b 8xH100 8192 8 dp_shard=8,zero=3 dp_shard=4,zero=3,tp=2 dp_shard=2,zero=3,tp=4 tp=8 tp=8,sp=off
memory memory_pipeline llama3_8b 8xH100 2048 32 pp=8,schedule=GPipe pp=8 pp=8,schedule=ZBV pp=4,dp_shard=2,zero=3 pp=4,tp=2

if [[ -n $measure ]]; then
  "$phalanx" bench comm -n 2 --ops all_reduce,all_gather,reduce_scatter,all_to_all --backends shm,symmetric,gloo -b 4K -e 16M -f 4 \
    --plot "$drawn/collectives.svg"
fi

if [[ -z $check ]]; then
  mkdir -p docs/pictures
  cp "$drawn"/*.svg docs/pictures/
  exit
fi
status=0
for picture in "$drawn"/*.svg; do
  cmp -s "$picture" "docs/pictures/${picture##*/}" || { echo "$0: docs/pictures/${picture##*/} is not what the program draws" >&2; status=1; }
done
for name in $(grep -oh '(pictures/[^)]*)' docs/*.md | tr -d '()' | sort -u); do
  [[ -f docs/$name ]] || { echo "$0: a page shows docs/$name, which is not there" >&2; status=1; }
done
[[ $status == 0 ]] && echo "docs/pictures are what the program draws" || echo "$0: run it without --check" >&2
exit $status
