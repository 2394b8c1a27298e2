#!/usr/bin/env bash
# Pretraining from a TOML file on a token file, on any layout, and from its checkpoint on another one.
#
#   recipes/pretrain.sh [--build build/release] [--folder outputs/pretrain]
#
# One run goes through four layouts of 4, 4, 8 and 1 ranks: sharded stages of a pipeline; tensor parallelism under
# sharded data parallelism; all three; one rank. Its losses are those of a run that one rank does by itself. It trains
# on the pages of docs/, so the losses change a little with them. The trainer's own lines are in FOLDER/log.
#
#   $ recipes/pretrain.sh
#   4 rank(s), steps 1 to 5: pipeline_parallel_degree=2
#   4 rank(s), steps 6 to 10: tensor_parallel_degree=2 zero_stage=2
#   8 rank(s), steps 11 to 15: pipeline_parallel_degree=2 pipeline_parallel_schedule=ZBV tensor_parallel_degree=2
#   1 rank(s), steps 16 to 20
#   1 rank(s), steps 1 to 20
#   step 5: four layouts 6.0317, one rank 6.0317
#   step 10: four layouts 5.7634, one rank 5.7634
#   step 15: four layouts 5.3812, one rank 5.3812
#   step 20: four layouts 5.2271, one rank 5.2271
#   20 steps on four layouts; losses differ from those of one rank by 7.5e-08 of them: the same
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

quietly "$folder/log" "$phalanx" tokenize docs --vocab-size 512 --tokenizer "$folder/tokenizer.json" \
  --output "$folder/train"
steps=0
train() {  # <run> <ranks> <steps> <keys of [parallelism]>: goes on for so many steps
  local run=$1 ranks=$2 keys=() first=$((steps + 1))
  steps=$((steps + $3))
  shift 3
  echo "$ranks rank(s), steps $first to $steps${*:+: }$*"
  for key in "$@"; do keys+=("--parallelism.$key"); done
  quietly "$folder/log" "$phalanx" train -n "$ranks" recipes/pretrain.toml --job.dump_folder "$folder/$run" \
    --training.steps "$steps" --training.dataset_path "$folder/train.bin" ${keys[@]+"${keys[@]}"}
}

train layouts 4 5 pipeline_parallel_degree=2
train layouts 4 5 tensor_parallel_degree=2 zero_stage=2
train layouts 8 5 pipeline_parallel_degree=2 pipeline_parallel_schedule=ZBV tensor_parallel_degree=2
train layouts 1 5
steps=0
train alone 1 20

losses() { sed -n 's/.*"step": *\([0-9]*\).*/\1 &/; s/^\([0-9]*\) .*"loss": *\([0-9.]*\).*/\1 \2/p' "$folder/$1/metrics.jsonl"; }
paste <(losses layouts) <(losses alone) | awk '
  $1 % 5 == 0 { printf "step %d: four layouts %.4f, one rank %.4f\n", $1, $2, $4 }
  { d = $2 / $4 - 1; if (d < 0) d = -d; if (d > largest) largest = d; n += $1 == $3 }
  END { printf "%d steps on four layouts; losses differ from those of one rank by %.1e of them: %s\n", n, largest,
               n == 20 && largest < 2e-5 ? "the same" : "DIFFERENT"
        exit !(n == 20 && largest < 2e-5) }'
