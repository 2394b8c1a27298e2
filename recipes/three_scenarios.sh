#!/usr/bin/env bash
# Three scenarios of a model and its devices, told apart by `phalanx plan`, with the bytes and a layout for each:
#
#   1  all of it fits on every device:                             data parallelism, ZeRO
#   2  it fits on the largest device only (a), or on none, but each layer does (b):   pipeline, FSDP, tensor
#   3  one layer does not fit:                                     tensor
#
#   recipes/three_scenarios.sh [PHALANX]          # build/release/bin/phalanx; no device is needed
#
#   $ recipes/three_scenarios.sh
#   phalanx plan --model llama3_1b --devices 4xA100 --local-batch 4 --dtype bfloat16
#     scenario 1: data parallelism, ZeRO
#       the whole model needs 24.6 GiB with one sequence at a time, 24.3 GiB where activations are computed again;
#   every device has 76.0 GiB for it
#     recommended: dp_shard=4,zero=1,batch=4, 20.9 GiB on each of 4 devices, which have 76.0 GiB
#   phalanx plan --model llama3_1b --devices 2x16GiB,2x80GiB --local-batch 4 --dtype bfloat16
#     scenario 2: pipeline, sharding (ZeRO, FSDP), tensor parallelism
#       the whole model needs 24.6 GiB with one sequence at a time, 24.3 GiB where activations are computed again;
#   only the largest devices have that much, 76.0 GiB, the smallest 15.2 GiB; its largest layer (output and loss)
#   needs 1.98 GiB
#     recommended: dp_shard=4,zero=1,batch=1, 14.9 GiB on each of 4 devices, which have 15.2 GiB
#   phalanx plan --model llama3_8b --devices 8xH100 --seq 8192 --batch 64 --local-batch 1 --dtype bfloat16
#     scenario 2: pipeline, sharding (ZeRO, FSDP), tensor parallelism
#       the whole model needs 168 GiB with one sequence at a time, 151 GiB where activations are computed again; no
#   device has that much, 75.7 GiB at most; its largest layer (output and loss) needs 5.08 GiB
#     recommended: dp_shard=8,zero=2,batch=1, 64.3 GiB on each of 8 devices, which have 75.7 GiB
#   phalanx plan --model llama3_8b --devices 16xRTX4090 --seq 98304 --batch 64 --local-batch 1 --dtype bfloat16
#     scenario 3: tensor parallelism
#       the whole model needs 520 GiB with one sequence at a time, 194 GiB where activations are computed again,
#   and even its largest layer (block) needs 24.1 GiB; a device has 22.8 GiB at most
#     recommended: dp_shard=2,zero=1,tp=8,ac=full,batch=1, 22.1 GiB on each of 16 devices, which have 22.8 GiB
#   three scenarios: 1 2 2 3
#
# The commands say more: a table of layouts, why one of them is recommended, and its sections of a configuration.
set -euo pipefail
# shellcheck source=scripts/options.bash
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/options.bash"
if [[ ${1:-} == -* ]]; then take_only_options -- "$@"; fi
phalanx=${1:-build/release/bin/phalanx}
require_program "$phalanx" PHALANX
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# scenario NUMBER ARGUMENTS...: plans, and holds the planner's answer against what is expected here.
scenario() {
  local expected=$1
  shift
  echo "phalanx plan $*"
  "$phalanx" plan "$@" > "$folder/plan.txt"
  sed -n '/^scenario /{s/^/  /p;n;s/^/  /p}; /^recommended: /s/^/  /p' "$folder/plan.txt" | fold -s -w 112
  grep -q "^scenario $expected:" "$folder/plan.txt" || { echo "expected scenario $expected" >&2; exit 1; }
  # The recommended sections, which the answer ends with, are a configuration.
  sed -n '/^\[/,$p' "$folder/plan.txt" > "$folder/layout.toml"
  "$phalanx" train "$folder/layout.toml" --print-config > "$folder/config.toml"
  found="$found $(sed -n 's/^scenario \([0-9]\):.*/\1/p' "$folder/plan.txt")"
}

found=""
scenario 1 --model llama3_1b --devices 4xA100 --local-batch 4 --dtype bfloat16
scenario 2 --model llama3_1b --devices 2x16GiB,2x80GiB --local-batch 4 --dtype bfloat16
scenario 2 --model llama3_8b --devices 8xH100 --seq 8192 --batch 64 --local-batch 1 --dtype bfloat16
scenario 3 --model llama3_8b --devices 16xRTX4090 --seq 98304 --batch 64 --local-batch 1 --dtype bfloat16
echo "three scenarios:$found"
