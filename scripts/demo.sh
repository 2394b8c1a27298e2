#!/usr/bin/env bash
# The main job, end to end, on this repository's own text: tokenise, train a Llama of about 5 M parameters on two local
# ranks, stop it, resume it, validate, generate. Takes two to four minutes on two cores. `make demo` builds and runs it.
#
#   BUILD=build/release scripts/demo.sh
set -euo pipefail
cd "$(dirname "$0")/.."
phalanx=${BUILD:-build/release}/bin/phalanx
out=outputs/demo
stop_after=80  # steps

say() { printf '\n\033[1m== %s\033[0m\n' "$*"; }
fail() { printf 'demo: %s\n' "$*" >&2; exit 1; }
[ -x "$phalanx" ] || fail "'$phalanx' is missing: run \`make demo\`, which builds it"

rm -rf "$out"
mkdir -p "$out/data"
trainer=
trap '[ -z "$trainer" ] || kill "$trainer" 2>/dev/null || true' EXIT

say "Tokenise the repository's text"
# Every text file of the repository; tables of test data are no text. One file in ten is held out for validation.
if git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
  git ls-files -z -- '*.md' '*.cc' '*.h' '*.txt' '*.cmake' '*.sh' '*.py' '*.toml'
else
  find README.md docs phalanx cli scripts configs cmake -type f -print0
fi | grep -zv testdata |
  xargs -0 "$phalanx" tokenize --vocab-size 4096 --tokenizer "$out/data/tokenizer.json" \
    --output "$out/data/train" --validation-fraction 0.1

say "Train on two ranks, and stop after about $stop_after steps"
"$phalanx" train -n 2 configs/demo.toml &
trainer=$!
while kill -0 "$trainer" 2>/dev/null &&
  ! { [ -e "$out/run/metrics.jsonl" ] && [ "$(wc -l <"$out/run/metrics.jsonl")" -ge "$stop_after" ]; }; do
  sleep 0.2
done
kill -TERM "$trainer"
wait "$trainer" || fail "the stopped run ended with status $?, expected 0"
trainer=
grep -q '"status": "stopped"' "$out/run/run.json" || fail "the run did not stop on SIGTERM"

say "Resume with the same command"
"$phalanx" train -n 2 configs/demo.toml

say "Generate"
"$phalanx" generate --checkpoint "$out/run/checkpoint" --tokenizer "$out/data/tokenizer.json" --prompt "// The communicator" \
  --max-new-tokens 80 --temperature 0.7 --seed 1

say "Result"
number_of() { sed -n "/\"$1\": /{s/.*\"$1\": \([0-9.eE+-]*\).*/\1/p;q}" "$out/run/run.json"; }
loss=$(number_of validation_loss)
entropy=$(number_of unigram_entropy)
[ -n "$loss" ] && [ -n "$entropy" ] || fail "no validation loss in $out/run/run.json"
awk -v loss="$loss" -v entropy="$entropy" 'BEGIN {
  printf "validation loss %.4f, unigram entropy of the held-out text %.4f, ratio %.3f (must be below 0.75)\n",
         loss, entropy, loss / entropy
  exit !(loss < 0.75 * entropy) }' || fail "the model did not learn enough"
printf 'run:    %s\nreport: %s\n' "$PWD/$out/run" "$PWD/$out/run/report.html"
