#!/usr/bin/env bash
# Runs Phalanx on a machine with a GPU and little else: no network, no package manager, but a python3 that has torch.
#
#   scripts/gpu_day.sh pack [--build DIR] [--into DIR]   here: collects programs and libraries that such a machine lacks
#   DIR/gpu_day.sh check [--results DIR]                 there: own kernels, communication, losses of layouts
#   DIR/gpu_day.sh speed [--results DIR]                 there: tokens/s beside PyTorch, eager and compiled
#
#   --build DIR     a CUDA build of Phalanx (default build/cuda/build, of scripts/cuda_check.sh --full). Its libtorch must
#                   have the version of the torch there: set PHALANX_TORCH_DIR when it is configured.
#   --into DIR      default .gpu_day; some 50 MB. Both are relative to the repository.
#   --only PATTERN  only the steps whose names match, such as '@(llama1b|documents_*)'
#   --results DIR   default ./gpu_results. A step that has a result there is not run again.
#
# Each step has its own time limit, and its result is written when it ends. The last lines are a table in Markdown
# (summary.md in the results). One GPU is enough: two and four ranks share it over NCCL, each posing as a node of its own
# (NCCL_HOSTID), so those steps check numbers, and their speed means nothing.
set -euo pipefail

usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; }
fail() { echo "gpu_day: $*" >&2; exit 1; }

mode=${1:-}
[[ $# -gt 0 ]] && shift
build=build/cuda/build into=.gpu_day results=gpu_results only='*'
while [[ $# -gt 0 ]]; do
  case "$1" in
    --build) build=${2:?} && shift 2 ;;
    --into) into=${2:?} && shift 2 ;;
    --only) only=${2:?} && shift 2 ;;
    --results) results=${2:?} && shift 2 ;;
    *) usage >&2 && fail "unknown argument '$1'" ;;
  esac
done

# ------------------------------------------------------------------------------------------------------------- pack

checkpoints=(--checkpoint.no-enable)  # keys of every run
readonly programs=(phalanx phalanx-worker comm_device_test kernels_gpu_cuda_test train_test)

pack() {
  cd "$(dirname "${BASH_SOURCE[0]}")/.."
  [[ -x "$build/bin/phalanx" ]] || fail "no program in $build/bin: build the CUDA flavour first (make cuda-check)"
  mkdir -p "$into/bin" "$into/lib"
  local program library
  for program in "${programs[@]}"; do
    [[ -x "$build/bin/$program" ]] || fail "$build/bin/$program is missing: build all targets of a CUDA libtorch with nvcc"
    strip -o "$into/bin/$program" "$build/bin/$program"
  done
  # Neither libtorch's and CUDA's, nor those that every system has.
  ldd "$into"/bin/* 2>/dev/null | awk '$2 == "=>" && $3 ~ /^\// { print $3 }' | sort -u |
    { grep -vE '/lib(c10|torch|cu(da|pti|dnn|blas)|nv|nccl)[^/]*\.so|/lib(c|m|dl|rt|pthread|util|gcc_s|stdc\+\+|gomp)\.so' || true; } |
    while read -r library; do cp -L "$library" "$into/lib/"; done
  cp scripts/gpu_day/*.py scripts/gpu_day.sh "$into/"
  echo "gpu_day: $(du -sh "$into" | cut -f1) in $into; carry it to the GPU and run $into/gpu_day.sh check"
}

# -------------------------------------------------------------------------------------------------------- one step

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

prepare() {
  [[ -x "$here/bin/phalanx" ]] || fail "no program in $here/bin: run the gpu_day.sh in the folder that 'pack' made"
  torch=$(python3 -c 'import os, torch; print(os.path.dirname(torch.__file__))') || fail "python3 has no torch"
  python3 -c 'import numpy' || fail "python3 has no numpy"
  python3 -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || fail "torch sees no GPU"
  mkdir -p "$results/lib"
  results=$(cd "$results" && pwd)
  local folder libraries= known
  for folder in "$torch/lib" "$torch"/../nvidia/*/lib; do
    if [[ -d "$folder" ]]; then libraries+=$(cd "$folder" && pwd):; fi
  done
  known=$(PATH=$PATH:/sbin:/usr/sbin ldconfig -p || true)
  for folder in "$here"/lib/*; do  # the system's own library, if it has one, fits its other libraries better
    if [[ "$known" != *"$(basename "$folder")"* ]]; then ln -sf "$folder" "$results/lib/"; fi
  done
  library_path=$libraries$results/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  empty=$results/empty.toml
  : >"$empty"
}

# step NAME SECONDS COMMAND...: the output goes to NAME.log, the exit status to NAME.status.
step() {
  local name=$1 limit=$2 status=0 begin=$SECONDS
  shift 2
  # shellcheck disable=SC2053  # a pattern
  if [[ $name != $only ]]; then return; fi
  if [[ "$(cat "$results/$name.status" 2>/dev/null)" == 0 ]]; then echo "$name: done before" && return; fi
  rm -rf "${results:?}/$name"
  (
    if [[ -n "${with_libraries:-}" ]]; then export LD_LIBRARY_PATH=$library_path; fi
    exec timeout -k 5 "$limit" "$@"
  ) >"$results/$name.log" 2>&1 || status=$?
  echo "$status" >"$results/$name.status"
  echo "$name: $([[ $status == 0 ]] && echo passed || echo "FAILED (status $status, see $results/$name.log)"), $((SECONDS - begin)) s"
}
phalanx_step() { with_libraries=yes step "$@"; }

# A stream of token ids with something to learn: FILE VOCABULARY COUNT.
tokens() {
  [[ -s "$1" ]] || python3 - "$@" <<'PY'
import os
import sys
import numpy as np
path, vocab, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
even = (np.random.default_rng(1).random((count + 1) // 2) ** 2 * vocab).astype(np.int64)
stream = np.empty(2 * len(even), dtype=np.int64)
stream[0::2], stream[1::2] = even, (even * 7 + 1) % vocab
stream[:count].astype("<u2" if vocab <= 65536 else "<u4").tofile(path + ".part")
os.replace(path + ".part", path)
PY
}

# Texts of 5 to 800 words, most of them short, and a token file of them that lists its documents.
documents() {
  [[ -s "$results/texts.jsonl" ]] || python3 - "$results/texts.jsonl" <<'PY'
import json
import os
import sys
import numpy as np
path, random = sys.argv[1], np.random.default_rng(2)
words = ["".join(chr(97 + c) for c in random.integers(0, 26, random.integers(2, 9))) for _ in range(400)]
with open(path + ".part", "w") as file:
    for length in np.minimum(5 + random.exponential(90, 1500), 800).astype(int):
        file.write(json.dumps({"text": " ".join(words[k] for k in random.zipf(1.3, length) % 400)}) + "\n")
os.replace(path + ".part", path)
PY
  phalanx_step tokenize 60 "$here/bin/phalanx" tokenize "$results/texts.jsonl" --vocab-size 1024 \
    --tokenizer "$results/tokenizer.json" --output "$results/documents"
}

train() {  # train NAME SECONDS KEYS...
  local name=$1 limit=$2
  shift 2
  phalanx_step "$name" "$limit" "${launcher[@]}" "$here/bin/phalanx" train "$empty" --job.dump_folder "$results/$name" \
    --training.no-shuffle --lr_scheduler.warmup_steps 2 "${checkpoints[@]}" --metrics.no-enable_report \
    --metrics.no-enable_tensorboard --metrics.log_freq 5 "$@"
}

# ------------------------------------------------------------------------------------------------------------ check

readonly -a small=(--model.flavor debug --model.dim 256 --model.n_layers 4 --model.n_heads 8 --model.n_kv_heads 4
  --model.ffn_hidden 704 --model.vocab_size 4096 --training.seq_len 256 --training.global_batch_size 8 --training.steps 20)

# The recipe's name follows.
readonly -a float8=(--training.mixed_precision_param bfloat16 --model.converters quantize.linear.float8
  --quantize.linear.float8.recipe_name)

run_small() {  # run_small NAME KEYS...
  train "$1" 60 "${small[@]}" --training.dataset_path "$results/small.bin" "${@:2}"
}

run_documents() {  # run_documents NAME KEYS...: its losses are compared with those of documents_cpu
  train "documents_$1" 60 "${small[@]}" --training.dataset_path "$results/documents" \
    --training.attn_mask_type block_causal --training.packing best_fit "${@:2}"
}

# A run that saves after 10 and 20 steps, and one that goes on from its step 10: the last ten losses must be the same.
# The model then continues a text on the CPU and on the GPU: under greedy choice the tokens must be the same.
saved_and_resumed() {
  local -a checkpoints=(--checkpoint.interval 10)
  local name
  launcher=()
  run_documents saved
  launcher=(bash -c 'cp -r "$1" "$2" && rm -r "$2/checkpoint/step-20" && shift 2 && exec "$@"' from_10
    "$results/documents_saved" "$results/documents_resumed")
  run_documents resumed
  for name in cpu cuda; do
    phalanx_step "generate_$name" 60 "$here/bin/phalanx" generate --checkpoint "$results/documents_saved" \
      --tokenizer "$results/tokenizer.json" --prompt "a" --prompt "the" --greedy --ignore-end --max-new-tokens 64 \
      --device "$name" --quiet
  done
  step generate_same 5 cmp "$results/generate_cpu.log" "$results/generate_cuda.log"
}

check() {
  prepare
  tokens "$results/small.bin" 4096 400001
  launcher=()
  phalanx_step doctor 60 "$here/bin/phalanx" doctor
  phalanx_step kernels 120 "$here/bin/kernels_gpu_cuda_test"
  if command -v compute-sanitizer >/dev/null; then
    phalanx_step memcheck 150 compute-sanitizer --tool memcheck --error-exitcode 9 "$here/bin/kernels_gpu_cuda_test" \
      --gtest_filter='-*Many*:*Refuses*'
  else
    echo "memcheck: skipped, as there is no compute-sanitizer"
  fi
  phalanx_step device 90 "$here/bin/comm_device_test"
  launcher=(env CUDA_VISIBLE_DEVICES=)
  run_small cpu
  launcher=(env CUDA_VISIBLE_DEVICES=0)
  run_small one
  run_small one_accumulated --training.local_batch_size 2
  run_small one_bf16 --training.mixed_precision_param bfloat16
  run_small one_fp16 --training.mixed_precision_param float16
  run_small one_bf16_full --training.mixed_precision_param bfloat16 --activation_checkpoint.mode full
  run_small one_bf16_op --training.mixed_precision_param bfloat16 --activation_checkpoint.mode selective \
    --activation_checkpoint.selective_ac_option op
  local recipe
  for recipe in tensorwise rowwise; do
    run_small "one_fp8_$recipe" "${float8[@]}" "$recipe"
    run_small "one_fp8_${recipe}_op" "${float8[@]}" "$recipe" --training.local_batch_size 2 \
      --activation_checkpoint.mode selective --activation_checkpoint.selective_ac_option op
  done
  local -a shared=(env CUDA_VISIBLE_DEVICES=0 NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1 NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1
    "$here/bin/phalanx" launch -n)
  local -a node=(bash -c 'export NCCL_HOSTID=node$LOCAL_RANK; exec "$@"' node)
  local -a bf16=(--training.mixed_precision_param bfloat16) nccl=(--comm.backend nccl --comm.init_timeout_seconds 30)
  launcher=("${shared[@]}" 2 "${node[@]}")
  local type
  documents
  launcher=(env CUDA_VISIBLE_DEVICES=)
  run_documents cpu
  launcher=(env CUDA_VISIBLE_DEVICES=0)
  run_documents one
  run_documents one_bf16 "${bf16[@]}"
  run_documents one_fp16 --training.mixed_precision_param float16
  run_documents one_bf16_full "${bf16[@]}" --activation_checkpoint.mode full
  # Adapters on every matrix of the blocks, the rest frozen; in lora_cpu, too.
  local -a lora=("${small[@]}" --training.dataset_path "$results/small.bin" --lora.rank 8 --lora.no-zero_b
    --optimizer.lr 0.003)
  launcher=(env CUDA_VISIBLE_DEVICES=)
  train lora_cpu 60 "${lora[@]}"
  launcher=(env CUDA_VISIBLE_DEVICES=0)
  train lora_one 60 "${lora[@]}"
  train lora_one_bf16 60 "${lora[@]}" "${bf16[@]}"
  launcher=()
  saved_and_resumed
  launcher=("${shared[@]}" 2 "${node[@]}")
  for type in float32 bfloat16; do
    train "lora_fsdp_2_$type" 60 "${lora[@]}" "${nccl[@]}" --training.local_batch_size 4 \
      --training.mixed_precision_param "$type" --parallelism.data_parallel_shard_degree 2
    train "lora_tp_2_$type" 60 "${lora[@]}" "${nccl[@]}" --training.mixed_precision_param "$type" \
      --parallelism.tensor_parallel_degree 2
    run_documents "fsdp_2_$type" "${nccl[@]}" --training.local_batch_size 4 --training.mixed_precision_param "$type" \
      --parallelism.data_parallel_shard_degree 2
    run_documents "tp_2_$type" "${nccl[@]}" --training.mixed_precision_param "$type" --parallelism.tensor_parallel_degree 2
    run_documents "pp_2_$type" "${nccl[@]}" --training.mixed_precision_param "$type" \
      --parallelism.pipeline_parallel_degree 2
    run_small "ddp_2_$type" "${nccl[@]}" --training.local_batch_size 4 --training.mixed_precision_param "$type"
    run_small "fsdp_2_$type" "${nccl[@]}" --training.local_batch_size 4 --training.mixed_precision_param "$type" \
      --parallelism.data_parallel_shard_degree 2
    run_small "tp_2_$type" "${nccl[@]}" --training.mixed_precision_param "$type" --parallelism.tensor_parallel_degree 2
    run_small "pp_2_$type" "${nccl[@]}" --training.mixed_precision_param "$type" --parallelism.pipeline_parallel_degree 2
  done
  for recipe in tensorwise rowwise; do
    run_small "fsdp_2_fp8_$recipe" "${nccl[@]}" "${float8[@]}" "$recipe" --training.local_batch_size 4 \
      --parallelism.data_parallel_shard_degree 2
    run_small "tp_2_fp8_$recipe" "${nccl[@]}" "${float8[@]}" "$recipe" --parallelism.tensor_parallel_degree 2
  done
  launcher=("${shared[@]}" 4 "${node[@]}")
  run_small fsdp_tp_4 "${nccl[@]}" --training.local_batch_size 4 --parallelism.data_parallel_shard_degree 2 \
    --parallelism.tensor_parallel_degree 2
  run_small fsdp_tp_4_bf16 "${nccl[@]}" "${bf16[@]}" --training.local_batch_size 4 \
    --parallelism.data_parallel_shard_degree 2 --parallelism.tensor_parallel_degree 2
  launcher=()
  phalanx_step verify 150 "$here/bin/phalanx" verify -n 1 "$empty" "${small[@]}" --training.dataset_path "$results/small.bin" \
    --layout ac=full --layout precision=bfloat16 --layout precision=float16,ac=op
  phalanx_step sharding 120 "$here/bin/train_test" --gtest_filter='GpuSharding*'
}

# ------------------------------------------------------------------------------------------------------------ speed

speed() {
  prepare
  tokens "$results/big.bin" 128256 2000001
  launcher=()
  local -a keys=(--training.dataset_path "$results/big.bin" --training.mixed_precision_param bfloat16
    --training.seq_len 2048 --model.no-tie_embeddings)
  local -a peer=(python3 "$here/torch_llama.py" --tokens "$results/big.bin" --vocab 128256 --seq 2048 --rope-theta 500000 --precision autocast)
  local -a llama1b=(--dim 2048 --n-layers 16 --n-heads 32 --n-kv-heads 8 --ffn-hidden 8192 --batch 8)
  local -a wide=(--dim 4096 --n-layers 6 --n-heads 32 --n-kv-heads 8 --ffn-hidden 14336 --batch 4)
  # The last two steps are traced; no figure of the table is of them alone.
  local -a profile=(--profiling.enable_profiling --profiling.record_kernels --profiling.profiler_active 2)
  phalanx_step kernel_times 60 "$here/bin/kernels_gpu_cuda_test" --bench
  train llama1b 90 "${keys[@]}" --model.flavor llama3_1b --training.local_batch_size 8 --training.steps 20 \
    "${profile[@]}" --profiling.profile_freq 20
  step llama1b_eager 90 "${peer[@]}" "${llama1b[@]}" --steps 15 --skip 5
  step llama1b_compile 120 "${peer[@]}" "${llama1b[@]}" --steps 20 --skip 10 --compile
  train wide 90 "${keys[@]}" --model.flavor llama3_8b --model.n_layers 6 --training.local_batch_size 4 --training.steps 15 \
    "${profile[@]}" --profiling.profile_freq 15
  # In float8. What the same steps take in bfloat16 is above.
  local recipe suffix
  for recipe in tensorwise rowwise; do
    suffix=fp8; [[ $recipe == tensorwise ]] || suffix=fp8_$recipe
    train "llama1b_$suffix" 90 "${keys[@]}" "${float8[@]}" "$recipe" --model.flavor llama3_1b --training.local_batch_size 8 \
      --training.steps 20 "${profile[@]}" --profiling.profile_freq 20
    train "wide_$suffix" 90 "${keys[@]}" "${float8[@]}" "$recipe" --model.flavor llama3_8b --model.n_layers 6 \
      --training.local_batch_size 4 --training.steps 15 "${profile[@]}" --profiling.profile_freq 15
  done
  step wide_eager 90 "${peer[@]}" "${wide[@]}" --steps 12 --skip 5
  step wide_compile 120 "${peer[@]}" "${wide[@]}" --steps 15 --skip 8 --compile
  # Attention over whole sequences, and within documents of about 110 tokens.
  documents
  local -a long=(--model.flavor llama3_1b --model.no-tie_embeddings --training.mixed_precision_param bfloat16
    --training.dataset_path "$results/documents" --training.seq_len 8192 --training.local_batch_size 2 --training.steps 15)
  train long_causal 90 "${long[@]}"
  train long_documents 90 "${long[@]}" --training.packing best_fit --training.attn_mask_type block_causal
  generation
}

# 512 tokens go in and 128 come out, for each of 1 or 32 prompts at a time. Phalanx answers four such batches in one run.
generation() {
  if ! python3 -c 'import transformers' 2>/dev/null; then
    echo "generation: skipped, as python3 has no transformers"
    return
  fi
  local model=$results/generation_model batch
  step generation_model 60 python3 "$here/hf_generate.py" make "$model" --prompts 128
  for batch in 1 32; do
    if [[ -e "$model/prompts.jsonl" ]]; then head -n $((4 * batch)) "$model/prompts.jsonl" >"$results/prompts_$batch.jsonl"; fi
    phalanx_step "generation_$batch" 90 "$here/bin/phalanx" generate --checkpoint "$model" \
      --prompts-file "$results/prompts_$batch.jsonl" --greedy --ignore-end --max-new-tokens 128 --batch-size "$batch" \
      --dtype bfloat16
    step "generation_${batch}_transformers" 90 python3 "$here/hf_generate.py" run "$model" --batch "$batch"
  done
}

# --------------------------------------------------------------------------------------------------------- the table

summary() {
  python3 - "$results" <<'PY' | tee "$results/summary.md"
import glob, json, os, statistics, sys
folder = sys.argv[1]

def lines(path):
    found = []
    with open(path, errors="replace") as file:
        for line in file:
            try:
                found.append(json.loads(line))
            except ValueError:
                pass  # text, or a line that a time limit has cut
    return [line for line in found if isinstance(line, dict)]

def run(name):
    path = os.path.join(folder, name, "metrics.jsonl")
    if not os.path.exists(path):
        return []
    return [line for line in lines(path) if line.get("loss") is not None and line.get("tps") is not None]

names = sorted(glob.glob(os.path.join(folder, "*.status")), key=os.path.getmtime)
names = [os.path.basename(name)[:-len(".status")] for name in names]
references = {name: [line["loss"] for line in run(name)] for name in ("cpu", "documents_cpu", "lora_cpu")}
print("| step | status | steps | last loss | greatest difference from the CPU | tokens/s | MFU | peak GiB |")
print("| --- | --- | --- | --- | --- | --- | --- | --- |")
for name in names:
    status = open(os.path.join(folder, name + ".status")).read().strip()
    cells = ["passed" if status == "0" else f"FAILED ({status})"] + [""] * 6
    log = lines(os.path.join(folder, name + ".log"))
    steps = run(name)
    if steps:
        losses = [line["loss"] for line in steps]
        cells[1:3] = [str(len(losses)), f"{losses[-1]:.5f}"]
        kind = name.split("_")[0] + "_cpu"
        reference = references.get(kind, references["cpu"])
        if len(reference) == len(losses) and not name.startswith(("llama1b", "wide", "long")):
            cells[3] = f"{max(abs(a - b) / b for a, b in zip(losses, reference)):.1e}"
        later = steps[len(steps) // 4:]
        cells[4] = f"{statistics.median(line['tps'] for line in later):,.0f}"
        if later[0].get("mfu_percent"):
            cells[5] = f"{statistics.median(line['mfu_percent'] for line in later):.1f} %"
        cells[6] = f"{max(max(line['memory_gib']) if isinstance(line['memory_gib'], list) else line['memory_gib'] for line in steps):.1f}"
    elif log and log[-1].get("peer") == "torch":
        peer = log[-1]
        cells[1:3] = [str(peer["steps"]), f"{peer['losses'][-1]:.5f}"]
        cells[4] = f"{peer['batch'] * peer['seq'] * 1e3 / peer['step_ms_p50']:,.0f}"
        cells[5] = f"{100 * peer['mfu']:.1f} %" if peer.get("mfu") else ""
        cells[6] = f"{peer['peak_memory_gib']['reserved']:.1f}" if peer.get("peak_memory_gib") else ""
    print(f"| {name} | " + " | ".join(cells) + " |")
for name in names:
    if name.startswith("generation_") and name != "generation_model":
        with open(os.path.join(folder, name + ".log"), errors="replace") as file:
            print(f"\n{name}: " + (file.read().splitlines() or [""])[-1])
PY
}

case "$mode" in
  pack) pack ;;
  check | speed)
    "$mode"
    summary
    ! grep -lvx 0 "$results"/*.status >/dev/null || fail "some steps failed; see $results"
    ;;
  -h | --help) usage ;;
  *) usage >&2 && fail "expected pack, check or speed" ;;
esac
