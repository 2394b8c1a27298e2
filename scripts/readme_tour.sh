#!/usr/bin/env bash
# Runs the shell blocks of the README and of the quick starts as they stand: each page in an empty folder that has this
# one's files, with a home of its own.
#
#   scripts/readme_tour.sh FOLDER      FOLDER/home/.local has the installed programs (`make tour` puts them there)
#
# Blocks below a comment "<!-- not run: why -->" are left out, and `make install`, which has been done. Training and
# benchmarks are cut short: of "--training.steps N" 4 are done, a validation has 2 batches, and `bench train` measures two
# layouts.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=$(realpath "$1")
fail() { echo "readme_tour: $*" >&2; exit 1; }
[[ -x "$folder/home/.local/bin/phalanx" ]] || fail "no $folder/home/.local/bin/phalanx: run \`make tour\`"

run_page() {  # <page> <what at least one of its blocks begins with>
  local page=$1 work
  work=$folder/work/$(basename "$page" .md)
  mkdir -p "$work"
  for name in README.md docs phalanx configs recipes build; do ln -s "$PWD/$name" "$work/$name"; done

  # The blocks, one file each, in their order.
  awk -v out="$work/block" '
    /^<!-- not run:/ { skip = 1 }
    /^```sh$/ { inside = !skip; skip = 0; if (inside) { ++count; file = sprintf("%s-%02d.sh", out, count); next } }
    /^```$/ { inside = 0 }
    inside { print > file }' "$page"
  ls "$work"/block-*.sh >/dev/null 2>&1 || fail "$page has no shell blocks to run"
  {
    echo 'set -euo pipefail'
    for block in "$work"/block-*.sh; do
      echo "echo '== $page: $(basename "$block" .sh)'"
      sed -E -e '/^make install/d' -e 's/(--training\.steps) [0-9]+/\1 4 --validation.steps 2/' \
        -e 's/(bench train .* --steps) [0-9]+/\1 1 --warm-up 0 --layouts "dp_replicate=2 dp_shard=2"/' "$block"
    done
  } >"$work/tour.sh"
  grep -q "^$2" "$work/tour.sh" || fail "no block of $page begins with '$2'"
  (cd "$work" && HOME="$folder/home" bash tour.sh </dev/null)
  echo "readme_tour: $(ls "$work"/block-*.sh | wc -l) blocks of $page work as they stand"
}

rm -rf "$folder/work"
run_page README.md 'phalanx train'
run_page docs/quickstart_library.md 'phalanx launch'
run_page docs/quickstart_cluster.md 'phalanx train'
run_page docs/quickstart_student.md 'phalanx launch'
