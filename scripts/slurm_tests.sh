#!/usr/bin/env bash
# Runs ranks under a real Slurm with two nodes at least, and the job scripts of recipes/slurm.
#
#   scripts/slurm_tests.sh BUILD_FOLDER [SLURM_CONF]
#
# The cluster is the one of SLURM_CONF (the second argument, else the variable, else Slurm's own default). The build
# folder, which holds the programs and gets the jobs' output, must be at the same place on all nodes. Status 77: skipped,
# and why. `make slurm` runs it on a cluster of its own (local_slurm.sh).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
repository=$PWD

if [[ $# -lt 1 || $# -gt 2 ]]; then
  echo "usage: scripts/slurm_tests.sh BUILD_FOLDER [SLURM_CONF]" >&2
  exit 2
fi
bin=$(cd "$1/bin" && pwd)
if [[ $# -eq 2 ]]; then export SLURM_CONF=$2; fi
if ! command -v srun >/dev/null; then
  echo "slurm_tests: skipped: there is no srun in PATH"
  exit 77
fi
nodes=$(sinfo -h -r -t idle,alloc,mix -o %D | awk '{n += $1} END {print n + 0}')
if [[ "$nodes" -lt 2 ]]; then
  echo "slurm_tests: skipped: the cluster has $nodes nodes that are up: two are needed"
  exit 77
fi
for program in launch_test_worker phalanx; do
  if [[ ! -x "$bin/$program" ]]; then
    echo "slurm_tests: $bin/$program is not built" >&2
    exit 1
  fi
done
export PATH="$bin:$PATH" OMP_NUM_THREADS=1
worker=$bin/launch_test_worker

folder=$(mktemp -d "$bin/../slurm_tests.XXXXXX")
trap 'rm -rf "$folder"' EXIT
cd "$folder"

failed=0
fail() {
  echo "FAILED  $1: $2"
  sed 's/^/        | /' "$folder/output"
  failed=1
}

# check NAME RANKS TEXT...: the last output has every rank's line, the sum of all, each TEXT, and nothing is left behind.
check() {
  local name=$1 ranks=$2 rank text
  shift 2
  for ((rank = 0; rank < ranks; ++rank)); do
    grep -q "rank $rank of $ranks, .* sum $((ranks * (ranks + 1) / 2))\$" output || { fail "$name" "no rank $rank"; return; }
  done
  for text in "$@"; do
    grep -qF -- "$text" output || { fail "$name" "not said: $text"; return; }
  done
  if compgen -G ".phalanx-*" >/dev/null; then
    fail "$name" "left behind: $(echo .phalanx-*)"
    rm -f .phalanx-*
    return
  fi
  echo "passed  $name"
}

# run COMMAND...: its output into the file, its failure into the output.
run() { "$@" >output 2>&1 || echo "exit status $?" >>output; }

run srun -N1 -n1 "$worker"
check "one task" 1 "a single process"

run srun -N1 -n4 --overcommit "$worker"
check "4 tasks on one node" 4 "from Slurm (job " "rank 3 of 4, local 3 of 4" "(from the rendezvous file)"

run srun -N2 -n4 --ntasks-per-node=2 "$worker"
# Nodes by name, one machine by proof: each maps the token that another one wrote.
check "2 nodes x 2, every rank by srun" 4 "from Slurm (job " "rank 3 of 4, local 1 of 2" "(from the rendezvous file)" \
  "backend: shm"

PHALANX_JOB_SECRET=$(openssl rand -hex 32) run srun -N2 -n3 "$worker"
check "3 ranks on 2 nodes, secret in the environment" 3 "(from PHALANX_JOB_SECRET)"

# Nobody else may know the secret, so a rank without it is refused, whoever started it.
run srun -N2 -n2 bash -c 'if [ "$SLURM_PROCID" = 0 ]; then export PHALANX_JOB_SECRET=0123456789abcdef; fi
  exec "$0" --timeout-ms 5000' "$worker"
if grep -q "took the job's secret from its environment, and this one has none" output; then
  echo "passed  a rank without the secret is told"
else
  fail "a rank without the secret is told" "not told"
fi
rm -f .phalanx-*

# The mpi backend needs srun's PMIx. Nodes that are one machine share /tmp, where Slurm's PMIx wants a folder for each.
if [[ ! -e "$(dirname "$worker")/libphalanx_mpi.so" ]]; then
  echo "skipped mpi: this build has none"
elif ! srun --mpi=list 2>&1 | grep -qw pmix; then
  echo "skipped mpi: this Slurm has no PMIx"
else
  run srun --mpi=pmix -N1 -n4 --overcommit "$worker" --backend mpi
  check "mpi, 4 tasks on one node" 4 "from Slurm (job " "backend: mpi" "rank 3 of 4, local 3 of 4"
  hosts=$(scontrol show nodes | sed -n 's/.*NodeHostName=\([^ ]*\).*/\1/p' | sort -u | wc -l)
  if [[ "$hosts" -gt 1 ]]; then
    run srun --mpi=pmix -N2 -n4 --ntasks-per-node=2 "$worker" --backend mpi
    check "mpi, 2 nodes x 2, every rank by srun" 4 "from Slurm (job " "backend: mpi" "rank 3 of 4, local 1 of 2"
  elif grep -qs PMIxCliTmpDirBase "$(dirname "${SLURM_CONF:-/etc/slurm/slurm.conf}")/mpi.conf"; then
    # local_slurm.sh's. Open MPI would take the nodes for one machine by its name, and look for shared memory.
    OMPI_MCA_btl=self,tcp run srun --mpi=pmix -N2 -n4 --ntasks-per-node=2 "$worker" --backend mpi
    check "mpi over TCP, 2 nodes x 2, every rank by srun" 4 "from Slurm (job " "backend: mpi" "rank 3 of 4, local 1 of 2"
  else
    echo "skipped mpi on 2 nodes: they are one machine"
  fi
  run srun --mpi=none -N1 -n1 "$worker" --backend mpi
  if grep -qF "srun --mpi=pmix" output && ! grep -q MPI_ERRORS_ARE_FATAL output; then
    echo "passed  mpi without PMIx is told what to do"
  else
    fail "mpi without PMIx is told what to do" "not told"
  fi
fi

# job NAME RANKS SCRIPT [OPTION...] -- TEXT...: a job script, as a user submits it.
job() {
  local name=$1 ranks=$2 script=$3
  shift 3
  local -a options=()
  while [[ "$1" != -- ]]; do options+=("$1"); shift; done
  shift
  run sbatch --wait --output=output.job "${options[@]}" "$repository/recipes/slurm/$script" "$worker"
  cat output.job >>output 2>/dev/null || true
  rm -f output.job
  check "$name" "$ranks" "$@"
}

# says NAME SCRIPT: a job's output, in the file output.job, is what the script's first comment shows.
says() {
  local problem
  problem=$(python3 "$repository/recipes/check_output.py" "$2" --printed output.job 2>&1) && return
  fail "$1" "$problem"
  return 1
}

# shown SCRIPT: the command in the script's first comment prints the lines below it.
shown() {
  local script=$repository/recipes/slurm/$1
  local -a words
  read -ra words <<<"$(sed -n 's/^#   \$ sbatch //p' "$script")"
  words=("${words[@]/#recipes/$repository/recipes}")
  # The log first: two streams of ranks come into one file in any order.
  run sbatch --wait --output=output.out --error=output.err "${words[@]}"
  cat output.err output.out >output.job 2>/dev/null || true
  cat output.job >>output
  if says "$1 prints what it shows" "$script"; then echo "passed  $1 prints what it shows"; fi
  rm -f output.job output.out output.err
}

none=--gres=none  # on a cluster without GPUs
if [[ -x $bin/../recipes/lifecycle ]]; then
  PATH="$(cd "$bin/../recipes" && pwd):$PATH"
  for script in one_gpu one_node two_nodes_srun two_nodes_launcher; do shown "$script.sbatch"; done
else
  echo "skipped what job scripts show: the recipes are not built"
fi
job "one_gpu.sbatch" 1 one_gpu.sbatch "$none" -- "a single process"
job "one_node.sbatch, 2 ranks" 2 one_node.sbatch "$none" --ntasks-per-node=2 -- "from phalanx launch"
job "two_nodes_srun.sbatch, 2 x 2" 4 two_nodes_srun.sbatch "$none" --ntasks-per-node=2 -- "from Slurm (job "
job "two_nodes_launcher.sbatch, 2 x 2" 4 two_nodes_launcher.sbatch "$none" --ntasks-per-node=2 -- \
  "from phalanx launch" "rank 3 of 4, local 1 of 2"

# As they are: a rank for each of a node's four GPUs.
if [[ $(sinfo -h -N -o %G | grep -c 'gpu:.*4') -ge 2 ]]; then
  job "one_gpu.sbatch as it is" 1 one_gpu.sbatch -- "a single process"
  job "one_node.sbatch as it is" 4 one_node.sbatch -- "from phalanx launch" "rank 3 of 4, local 3 of 4"
  job "one_node.sbatch, whose GPUs say how many ranks, and not its tasks" 4 one_node.sbatch --ntasks-per-node=1 -- \
    "from phalanx launch"
  job "two_nodes_srun.sbatch as it is" 8 two_nodes_srun.sbatch -- "from Slurm (job " "rank 7 of 8, local 3 of 4"
  job "two_nodes_launcher.sbatch as it is" 8 two_nodes_launcher.sbatch -- \
    "from phalanx launch" "rank 7 of 8, local 3 of 4"
else
  echo "skipped job scripts as they are: the cluster has no two nodes with 4 GPUs"
fi

# The warning before a job's end, as Slurm sends it, comes while a run trains: it saves, the job is requeued, and the run
# ends with the bits of one that was not disturbed.
mkdir training
python3 -c '
import random, sys
random.seed(1)
sys.stdout.buffer.write(b"".join(random.randrange(512).to_bytes(2, "little") for _ in range(8000)))' >training/tokens.bin
cat >training/run.toml <<END
[job]
dump_folder = "$folder/training/run"
[model]
flavor = "debug"
[training]
dataset_path = "$folder/training/tokens.bin"
seq_len = 32
local_batch_size = 4
steps = 1500
[lr_scheduler]
warmup_steps = 2
[checkpoint]
interval = 100000
END
lines() { cat training/run/metrics.jsonl 2>/dev/null | wc -l; }
# until_true SECONDS COMMAND...: false if it has not come true by then.
until_true() {
  local tries=$(($1 * 10))
  shift
  until "$@"; do ((tries-- > 0)) || return 1; sleep 0.1; done
}
has_begun() { (($(lines) > 20)); }
is_pending() { [[ "$(squeue -h -j "$id" -o %T)" == PENDING ]]; }
has_gone() { [[ -z "$(squeue -h -j "$id" -o %T -t PENDING,RUNNING,COMPLETING 2>/dev/null)" ]]; }
same_bits() {
  local one
  for one in training/whole/checkpoint/step-1500/*.safetensors; do
    cmp -s "$one" "training/run/checkpoint/step-1500/${one##*/}" || return 1
  done
}
run phalanx train -n 2 training/run.toml --job.dump_folder="$folder/training/whole"
id=$(sbatch --parsable "$none" --ntasks-per-node=2 --output="$folder/output.job" \
  "$repository/recipes/slurm/requeue.sbatch" phalanx train training/run.toml)
name="requeue.sbatch: warned, saved, requeued, and the same bits at the end"
if ! until_true 60 has_begun; then
  fail "$name" "training has not begun"
else
  scancel --batch --signal=USR1 "$id"
  if ! until_true 60 is_pending; then
    fail "$name" "the job is not back in the queue"
  else
    # Slurm holds a requeued job for two minutes.
    scontrol update JobId="$id" StartTime=now
    until_true 120 has_gone || fail "$name" "the job does not end"
    cat output.job >>output
    if says "$name" "$repository/recipes/slurm/requeue.sbatch"; then
      if same_bits; then echo "passed  $name"; else fail "$name" "other bits"; fi
    fi
  fi
fi
rm -f output.job

# The batch script itself is no rank, whatever the job's variables say.
cat >batch <<END
#!/bin/bash
"$worker"
END
run sbatch --wait -N2 -n4 --output=output.job batch
cat output.job >>output
check "a program that the batch script starts plainly" 1 "a single process"

exit "$failed"
