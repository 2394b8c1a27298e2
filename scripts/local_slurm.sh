#!/usr/bin/env bash
# A Slurm of two nodes on this machine, n1 and n2, for as long as a command runs.
#
#   scripts/local_slurm.sh scripts/slurm_tests.sh build/release
#
# The controller, the two nodes' daemons and a munge of their own keep all they have in a temporary folder and listen on
# ports that the system gives, on loopback's name. The second node sees a folder of its own where Slurm's PMIx keeps its
# files, as on another machine. Each node has four GPUs as far as Slurm knows: files that it counts, so that job scripts
# get what they ask for, and ranks compute on CPUs. The command finds the cluster by SLURM_CONF. Status 77 (skipped): not root, or something
# is not installed (Debian: slurmctld slurmd slurm-client munge); else the command's.
set -euo pipefail

skip() { echo "local_slurm: skipped: $*" >&2; exit 77; }
if [[ $# -eq 0 ]]; then
  echo "usage: scripts/local_slurm.sh COMMAND..." >&2
  exit 2
fi
[[ $EUID -eq 0 ]] || skip "Slurm's daemons start jobs as their users: this needs root"
export PATH="$PATH:/usr/sbin:/sbin"
missing=()
for program in slurmctld slurmd srun sinfo munged unshare; do
  command -v "$program" >/dev/null || missing+=("$program")
done
[[ ${#missing[@]} -eq 0 ]] || skip "not installed: ${missing[*]} (apt-get install slurmctld slurmd slurm-client munge)"

folder=$(mktemp -d -t phalanx-slurm.XXXXXX)
stop() {
  local status=$? file process
  for file in "$folder"/*.pid; do
    if [[ -s "$file" ]]; then
      process=$(<"$file")
      kill "$process" 2>/dev/null || continue
      for _ in $(seq 50); do kill -0 "$process" 2>/dev/null && sleep 0.1 || break; done
      kill -KILL "$process" 2>/dev/null || true
    fi
  done
  rm -rf "$folder"
  exit "$status"
}
trap stop EXIT
trap 'exit 130' INT TERM
chmod 755 "$folder"
mkdir -p "$folder"/{state,spool-n1,spool-n2,pmix,pmix-n2}

(umask 077 && head -c 1024 /dev/urandom >"$folder/munge.key")
munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" --pid-file="$folder/munge.pid" \
  --log-file="$folder/munge.log" --seed-file="$folder/munge.seed" 2>"$folder/munge.errors" ||
  { cat "$folder/munge.errors" >&2 && skip "munged does not start"; }

# Three ports that are free now.
read -r control first second < <(python3 -c '
import socket
held = [socket.socket() for _ in range(3)]
for one in held: one.bind(("127.0.0.1", 0))
print(*(one.getsockname()[1] for one in held))')

host=$(hostname -s)
getent hosts "$host" >/dev/null || skip "this machine's name, $host, does not resolve (add it to /etc/hosts)"
# As many as a job with a task for each GPU asks for, whatever this machine has.
cores=$(nproc)
((cores >= 4)) || cores=4
cat >"$folder/slurm.conf" <<END
ClusterName=local
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$control
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
MpiDefault=none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MailProg=/bin/true
ReturnToService=2
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
SlurmctldPidFile=$folder/controller.pid
SlurmdPidFile=$folder/node-%n.pid
SlurmctldLogFile=$folder/controller.log
SlurmdLogFile=$folder/node-%n.log
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=$first CPUs=$cores RealMemory=4000 Gres=gpu:4
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=$second CPUs=$cores RealMemory=4000 Gres=gpu:4
PartitionName=local Nodes=n1,n2 Default=YES State=UP OverSubscribe=YES
END
touch "$folder"/gpu{0..3}
echo "NodeName=n1,n2 Name=gpu File=$folder/gpu[0-3]" >"$folder/gres.conf"
echo "PMIxCliTmpDirBase=$folder/pmix" >"$folder/mpi.conf"

export SLURM_CONF=$folder/slurm.conf
slurmctld -f "$SLURM_CONF"
slurmd -N n1 -f "$SLURM_CONF"
unshare --mount --propagation private bash -c \
  'mount --bind "$0/pmix-n2" "$0/pmix" && exec slurmd -N n2 -f "$0/slurm.conf"' "$folder"
for _ in $(seq 60); do
  if [[ "$(sinfo -h -t idle -o %D 2>/dev/null)" == 2 ]]; then
    "$@"
    exit
  fi
  sleep 0.5
done
tail -n 20 "$folder"/*.log >&2
skip "the two nodes did not come up (their logs are above)"
