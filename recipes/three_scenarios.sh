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
#   ...
#   scenario 1: data parallelism, ZeRO
#   ...
#   scenario 2: pipeline, sharding (ZeRO, FSDP), tensor parallelism
#   ...
#   scenario 2: pipeline, sharding (ZeRO, FSDP), tensor parallelism
#   ...
#   scenario 3: tensor parallelism
#   ...
#   three scenarios: dp_shard=4,zero=1,batch=4 dp_shard=4,zero=1,batch=1 dp_shard=8,zero=2,batch=1 dp_shard=2,zero=3,tp=8,ac=op,batch=1
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
  echo "\$ phalanx plan $*"
  "$phalanx" plan "$@" --dtype bfloat16 --top 3 --toml "$folder/layout.toml" > "$folder/plan.txt"
  sed 's/^/    /' "$folder/plan.txt"
  grep -q "^scenario $expected:" "$folder/plan.txt" || { echo "expected scenario $expected" >&2; exit 1; }
  # The recommended sections are a configuration.
  "$phalanx" train "$folder/layout.toml" --print-config > "$folder/config.toml"
  layouts="$layouts $(sed -n 's/^recommended: \([^ ]*\), .*/\1/p' "$folder/plan.txt")"
  echo
}

layouts=""
scenario 1 --model llama3_1b --devices 4xA100 --local-batch 4
scenario 2 --model llama3_1b --devices 2x16GiB,2x80GiB --local-batch 4
scenario 2 --model llama3_8b --devices 8xH100 --seq 8192 --batch 64 --local-batch 1
scenario 3 --model llama3_8b --devices 16xRTX4090 --seq 98304 --batch 64 --local-batch 1
echo "three scenarios:$layouts"
