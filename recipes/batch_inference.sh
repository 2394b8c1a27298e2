#!/usr/bin/env bash
# Data-parallel batch inference: every rank has the model and its share of the prompts, and who is through takes from
# the others; results come as they are ready, in the end all of them in one file in the order of the prompts.
#
#   recipes/batch_inference.sh [--build build/release] [--folder outputs/batch_inference] [--ranks 2]
#
# With a model of your own it is one command (--help of `phalanx generate` has the rest):
#
#   phalanx generate -n 8 --checkpoint Llama-3.2-1B --prompts-file prompts.jsonl --output answers --batch-size 16 \
#       --final-file merged.jsonl --max-new-tokens 50
#
# Here a small model is trained first. The job is stopped in the middle (SIGKILL) and goes on; one prompt lacks its
# field.
#
#   $ recipes/batch_inference.sh
#   stopped with <3> results
#   skipped: <prompts.jsonl>, line 41: neither "input_prompt" (text) nor "ids" (token ids)
#   {"unique_id":"q-1","input_prompt":"<a prompt>","generated_response":"<what the small model makes of it>
#   {"unique_id":"q-2","input_prompt":"<a prompt>","generated_response":"<what the small model makes of it>
#   40 prompts, each answered once, in order
#
# In < > stands any text; lines are cut after 150 characters.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source recipes/small_model.sh

ranks=2
read_options build folder ranks -- "$@"
make_small_model
for i in $(seq 1 40); do
  printf '{"unique_id": "q-%d", "input_prompt": "%s"}\n' "$i" "$(grep . docs/glossary.md | sed -n "$((i * 2))p" | tr -d '"\\' | cut -c 1-60)"
done > "$folder/prompts.jsonl"
echo '{"unique_id": "without"}' >> "$folder/prompts.jsonl"
job=(-n "$ranks" --checkpoint "$folder/run/hf" --prompts-file "$folder/prompts.jsonl" --output "$folder/answers"
     --id-field unique_id --prompt-field input_prompt --response-field generated_response
     --max-new-tokens 50 --batch-size 4 --final-file merged.jsonl --allow-skipped)

rm -rf "$folder/answers"
setsid "$phalanx" generate "${job[@]}" --quiet >> "$folder/log" 2>&1 & started=$!
until [[ $(cat "$folder"/answers/part-*.jsonl 2>/dev/null | wc -l) -ge 3 ]] || ! kill -0 "$started" 2>/dev/null; do sleep 0.05; done
kill -KILL -- "-$started" 2>/dev/null || true
wait "$started" 2>/dev/null || true
before=$(cat "$folder"/answers/part-*.jsonl | wc -l)
echo "stopped with $before results"
quietly "$folder/log" "$phalanx" generate "${job[@]}"
grep 'line 41' "$folder/log" | tail -n 1

head -n 2 "$folder/answers/merged.jsonl" | cut -c 1-150
lines=$(wc -l < "$folder/answers/merged.jsonl") parts=$(cat "$folder"/answers/part-*.jsonl | wc -l)
order=$(grep -o '"unique_id":"q-[0-9]*"' "$folder/answers/merged.jsonl" | grep -o '[0-9]*' | tr '\n' ' ')
[[ $lines = 40 && $parts = 40 && $order = "$(seq -s ' ' 1 40) " ]] || { echo "$lines lines, $parts results: $order" >&2; exit 1; }
echo "40 prompts, each answered once, in order"
