#!/usr/bin/env bash
# Every layout of up to 8 ranks beside one rank, on this repository's own text: a Llama of 4 layers with grouped-query
# attention, 10 steps, by AdamW and by SGD; then two models with experts, with consecutive and with packed documents; then
# every pipeline schedule, with each kind of recomputation. `make layouts` builds and runs it. Ends with the first layout
# that is wrong.
#
#   BUILD=build/release scripts/verify_layouts.sh
set -euo pipefail
cd "$(dirname "$0")/.."
phalanx=${BUILD:-build/release}/bin/phalanx
out=outputs/layouts
[ -x "$phalanx" ] || { echo "verify_layouts: '$phalanx' is missing: run \`make layouts\`, which builds it" >&2; exit 1; }

rm -rf "$out"
mkdir -p "$out"
"$phalanx" tokenize --vocab-size 512 --tokenizer "$out/tokenizer.json" --output "$out/tokens" docs/*.md README.md
# Texts of about 30 tokens, of which a sequence holds several.
python3 - docs/*.md >"$out/short.jsonl" <<'END'
import json, sys
for path in sys.argv[1:]:
    for text in open(path, encoding="utf-8").read().split("\n\n"):
        if text.strip():
            print(json.dumps({"text": text[:60]}))
END
"$phalanx" tokenize --tokenizer "$out/tokenizer.json" --output "$out/short" "$out/short.jsonl"
cat >"$out/run.toml" <<END
[model]
flavor = "debug"
n_layers = 4
[training]
dataset_path = "$out/tokens.bin"
seq_len = 64
local_batch_size = 2
global_batch_size = 16
steps = 10
[lr_scheduler]
warmup_steps = 2
END

export OMP_NUM_THREADS=1
echo "== every mix of degrees and stage of ZeRO"
"$phalanx" verify -n 8 "$out/run.toml" --steps 10 --all
echo "== the same by SGD"
"$phalanx" verify -n 8 "$out/run.toml" --steps 10 --all --optimizer.name SGD
for recompute in full op; do
  echo "== some of them, ac=$recompute"
  "$phalanx" verify -n 8 "$out/run.toml" --steps 10 --layout "ac=$recompute" --layout "dp_replicate=2,ac=$recompute" \
    --layout "dp_shard=2,zero=1,ac=$recompute" --layout "dp_shard=4,zero=3,ac=$recompute" \
    --layout "dp_replicate=2,dp_shard=2,zero=3,ac=$recompute" --layout "tp=2,ac=$recompute" \
    --layout "tp=4,sp=off,ac=$recompute" --layout "dp_shard=2,tp=2,ac=$recompute" \
    --layout "pp=2,dp_replicate=2,tp=2,ac=$recompute"
done
for family in mixtral deepseek_v3; do
  model=(--model.name "$family" --model.flavor debug)
  echo "== $family"
  "$phalanx" verify -n 8 "$out/run.toml" --steps 2 --all "${model[@]}"
  echo "== $family, packed documents"
  "$phalanx" verify -n 8 "$out/run.toml" --steps 2 --all "${model[@]}" --training.dataset_path "$out/short" \
    --training.attn_mask_type block_causal --training.packing best_fit
done
for schedule in GPipe 1F1B Interleaved1F1B LoopedBFS InterleavedZeroBubble ZBVZeroBubble DualPipeV; do
  echo "== $schedule"
  layouts=()
  for recompute in none full op; do
    for degrees in pp=2 pp=4 pp=2,dp_replicate=2 pp=2,tp=2; do
      layouts+=(--layout "$degrees,schedule=$schedule,ac=$recompute")
    done
  done
  "$phalanx" verify -n 4 "$out/run.toml" --steps 10 "${layouts[@]}"
done
