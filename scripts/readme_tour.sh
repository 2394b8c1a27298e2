#!/usr/bin/env bash
# Runs the README's shell blocks as they stand, in an empty folder that has this one's files, with a home of its own.
#
#   scripts/readme_tour.sh FOLDER      FOLDER/home/.local has the installed programs (`make tour` puts them there)
#
# Blocks below a comment "<!-- not run: why -->" are left out, and `make install`, which has been done. Training and
# benchmarks are cut short: of "--training.steps N" 4 are done, and `bench train` measures two layouts.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=$(realpath "$1")
fail() { echo "readme_tour: $*" >&2; exit 1; }
[[ -x "$folder/home/.local/bin/phalanx" ]] || fail "no $folder/home/.local/bin/phalanx: run \`make tour\`"

rm -rf "$folder/work"
mkdir -p "$folder/work"
for name in README.md docs phalanx configs; do ln -s "$PWD/$name" "$folder/work/$name"; done

# The blocks, one file each, in their order.
awk -v out="$folder/work/block" '
  /^<!-- not run:/ { skip = 1 }
  /^```sh$/ { inside = !skip; skip = 0; if (inside) { ++count; file = sprintf("%s-%02d.sh", out, count); next } }
  /^```$/ { inside = 0 }
  inside { print > file }' README.md
cd "$folder/work"
ls block-*.sh >/dev/null 2>&1 || fail "README.md has no shell blocks to run"

{
  echo 'set -euo pipefail'
  for block in block-*.sh; do
    echo "echo '== $block'"
    sed -E -e '/^make install/d' -e 's/(--training\.steps) [0-9]+/\1 4/' \
      -e 's/(bench train .* --steps) [0-9]+/\1 1 --warm-up 0 --layouts "dp_replicate=2 dp_shard=2"/' "$block"
  done
} >tour.sh
grep -q '^phalanx train' tour.sh || fail "the blocks of README.md train nothing"
HOME="$folder/home" bash tour.sh </dev/null
echo "readme_tour: $(ls block-*.sh | wc -l) blocks of README.md work as they stand"
