#!/usr/bin/env bash
# Pretraining from a TOML file on a token file, on any layout, and from its checkpoint on another one.
#
#   recipes/pretrain.sh [--build build/release] [--folder outputs/pretrain]
#
# One run goes through four layouts of 4, 4, 8 and 1 ranks: sharded stages of a pipeline; tensor parallelism under sharded
# data parallelism; all three; one rank. Its losses are those of a run that one rank does by itself.
#
#   $ recipes/pretrain.sh
#   ...
#   20 steps on four layouts; losses differ from those of one rank by 1.1e-07 of them: the same
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/options.bash

build=build/release
folder=outputs/pretrain
take_only_options build folder -- "$@"
phalanx=$build/bin/phalanx
require_program "$phalanx" --build
rm -rf "$folder"
mkdir -p "$folder"

"$phalanx" tokenize docs --vocab-size 512 --tokenizer "$folder/tokenizer.json" --output "$folder/train"
steps=0
train() {  # <run> <ranks> <steps> <keys of [parallelism]>: goes on for so many steps
  local run=$1 ranks=$2 keys=()
  steps=$((steps + $3))
  shift 3
  for key in "$@"; do keys+=("--parallelism.$key"); done
  "$phalanx" train -n "$ranks" recipes/pretrain.toml --job.dump_folder "$folder/$run" --training.steps "$steps" \
    --training.dataset_path "$folder/train.bin" ${keys[@]+"${keys[@]}"}
}

train layouts 4 5 pipeline_parallel_degree=2
train layouts 4 5 tensor_parallel_degree=2 zero_stage=2
train layouts 8 5 pipeline_parallel_degree=2 pipeline_parallel_schedule=ZBV tensor_parallel_degree=2
train layouts 1 5
steps=0
train alone 1 20

losses() { sed -n 's/.*"step": *\([0-9]*\).*/\1 &/; s/^\([0-9]*\) .*"loss": *\([0-9.]*\).*/\1 \2/p' "$folder/$1/metrics.jsonl"; }
paste <(losses layouts) <(losses alone) | awk '
  { d = $2 / $4 - 1; if (d < 0) d = -d; if (d > largest) largest = d; n += $1 == $3 }
  END { printf "%d steps on four layouts; losses differ from those of one rank by %.1e of them: %s\n", n, largest,
               n == 20 && largest < 2e-5 ? "the same" : "DIFFERENT"
        exit !(n == 20 && largest < 2e-5) }'
