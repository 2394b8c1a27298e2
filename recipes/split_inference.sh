#!/usr/bin/env bash
# Inference with a model that no single device would hold: cut by its layers, by tensor parallelism, or both; the tokens
# are those of one rank.
#
#   recipes/split_inference.sh [--build build/release] [--folder outputs/split_inference]
#
#   $ recipes/split_inference.sh
#   -n 2 --pp 2: the same
#   -n 2 --tp 2: the same
#   -n 4 --pp 2 --tp 2: the same
#   {"id":0,"prompt":"<a prompt>","completion":"<what the small model makes of it>
#
# The last line is cut after 150 characters.
# Cut by layers, each rank works on other prompts while their neighbours' are with the next one, so that none waits.
# Each rank reads its part of the files alone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source recipes/small_model.sh

read_options build folder -- "$@"
make_small_model
awk 'NF && n < 8 { print substr($0, 1, 50); n++ }' docs/tensor_parallel.md > "$folder/prompts.txt"
write() { "${@:2}" > "$1"; }  # <file> <command>
answers() {  # <file> <options>
  quietly "$folder/log" write "$folder/$1" "$phalanx" generate "${@:2}" --checkpoint "$folder/run/hf" \
    --prompts-file "$folder/prompts.txt" --max-new-tokens 40 --temperature 0.7 --seed 3
}
answers one.jsonl
for layout in "-n 2 --pp 2" "-n 2 --tp 2" "-n 4 --pp 2 --tp 2"; do
  # shellcheck disable=SC2086
  answers split.jsonl $layout
  cmp "$folder/one.jsonl" "$folder/split.jsonl"
  echo "$layout: the same"
done
head -n 1 "$folder/one.jsonl" | cut -c 1-150
