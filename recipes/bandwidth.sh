#!/usr/bin/env bash
# The bandwidth of every collective over sizes, with 2 and with 4 ranks: a table, a JSON file and a picture for each.
#
#   recipes/bandwidth.sh PHALANX FOLDER [options of phalanx bench comm]
#   recipes/bandwidth.sh build/release/bin/phalanx bandwidth --backends shm,c10d --max-bytes 64M
#
#   $ recipes/bandwidth.sh phalanx bandwidth --sizes 64K --rounds 1 --iters 3
#   [phalanx] <date and time> - info - rank 0 of 2, from phalanx launch
#   [phalanx] <date and time> - info - security: <who may join>
#   [phalanx] <date and time> - info - device: cpu, backend: shm, 2 ranks on this node, <where they meet>
#   # 2 ranks on <host: processor, cores>; times are the slowest rank's, GB = 1e9 bytes
#   op               bytes  type     reduce backend place p50 us p99 us min us cpu us slow algbw busbw wrong copy % copy
#   all_reduce       64K    float32  sum    shm     in       <us> <us> <us> <us> <rank> <GB/s> <GB/s> 0 <GB/s> <%>
#   all_gather       64K    float32  -      shm     out      <us> <us> <us> <us> <rank> <GB/s> <GB/s> 0 <GB/s> <%>
#   reduce_scatter   64K    float32  sum    shm     out      <us> <us> <us> <us> <rank> <GB/s> <GB/s> 0 <GB/s> <%>
#   broadcast        64K    float32  -      shm     in       <us> <us> <us> <us> <rank> <GB/s> <GB/s> 0 <GB/s> <%>
#   reduce           64K    float32  sum    shm     in       <us> <us> <us> <us> <rank> <GB/s> <GB/s> 0 <GB/s> <%>
#   gather           64K    float32  -      shm     out      <us> <us> <us> <us> <rank> <GB/s> <GB/s> 0 <GB/s> <%>
#   scatter          64K    float32  -      shm     out      <us> <us> <us> <us> <rank> <GB/s> <GB/s> 0 <GB/s> <%>
#   all_to_all       64K    float32  -      shm     out      <us> <us> <us> <us> <rank> <GB/s> <GB/s> 0 <GB/s> <%>
#   sendrecv         64K    float32  -      shm     out      <us> <us> <us> <us> <rank> <GB/s> <GB/s> 0 <GB/s> <%>
#   pingpong         64K    float32  -      shm     in       <us> <us> <us> <us> <rank> <GB/s> <GB/s> 0 <GB/s> <%>
#   barrier          0      -        -      shm     in       <us> <us> <us> <us> <rank> - - 0 - -
#   [phalanx] <date and time> - info - rank 0 of 4, from phalanx launch
#   [phalanx] <date and time> - info - security: <who may join>
#   [phalanx] <date and time> - info - device: cpu, backend: shm, 4 ranks on this node, <where they meet>
#   # 4 ranks on <host: processor, cores>; times are the slowest rank's, GB = 1e9 bytes
#   op               bytes  type     reduce backend place p50 us p99 us min us cpu us slow algbw busbw wrong copy % copy
#   all_reduce       64K    float32  sum    shm     in       <us> <us> <us> <us> <rank> <GB/s> <GB/s> 0 <GB/s> <%>
#   all_gather       64K    float32  -      shm     out      <us> <us> <us> <us> <rank> <GB/s> <GB/s> 0 <GB/s> <%>
#   reduce_scatter   64K    float32  sum    shm     out      <us> <us> <us> <us> <rank> <GB/s> <GB/s> 0 <GB/s> <%>
#   broadcast        64K    float32  -      shm     in       <us> <us> <us> <us> <rank> <GB/s> <GB/s> 0 <GB/s> <%>
#   reduce           64K    float32  sum    shm     in       <us> <us> <us> <us> <rank> <GB/s> <GB/s> 0 <GB/s> <%>
#   gather           64K    float32  -      shm     out      <us> <us> <us> <us> <rank> <GB/s> <GB/s> 0 <GB/s> <%>
#   scatter          64K    float32  -      shm     out      <us> <us> <us> <us> <rank> <GB/s> <GB/s> 0 <GB/s> <%>
#   all_to_all       64K    float32  -      shm     out      <us> <us> <us> <us> <rank> <GB/s> <GB/s> 0 <GB/s> <%>
#   sendrecv         64K    float32  -      shm     out      <us> <us> <us> <us> <rank> <GB/s> <GB/s> 0 <GB/s> <%>
#   pingpong         64K    float32  -      shm     in       <us> <us> <us> <us> <rank> <GB/s> <GB/s> 0 <GB/s> <%>
#   barrier          0      -        -      shm     in       <us> <us> <us> <us> <rank> - - 0 - -
#   written: bandwidth/comm-{2,4}.{json,csv,svg}
#
# In < > stands what differs from machine to machine, a word for each column. docs/bench_comm.md says what they mean.
set -euo pipefail

# shellcheck source=scripts/options.bash
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/options.bash"
if [[ ${1:-} == -h || ${1:-} == --help ]]; then take_only_options -- --help; fi
if [[ $# -lt 2 ]]; then
  echo "usage: $0 PHALANX FOLDER [options of phalanx bench comm]" >&2
  exit 2
fi
phalanx=$1
folder=$2
shift 2
if [[ $# -eq 0 ]]; then set -- --min-bytes 4K --max-bytes 16M --step-factor 16; fi
mkdir -p "$folder"
for ranks in 2 4; do
  "$phalanx" bench comm -n "$ranks" --ops all \
    --json "$folder/comm-$ranks.json" --csv "$folder/comm-$ranks.csv" --plot "$folder/comm-$ranks.svg" "$@"
done
echo "written: $folder/comm-{2,4}.{json,csv,svg}"
