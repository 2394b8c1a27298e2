#!/usr/bin/env bash
# docs/lecture.md, the output of `phalanx lecture`. Measured numbers stand behind a ~, facts of the machine behind "~ ", to
# the end of their line; neither is compared.
#
#   scripts/lecture_page.sh [--program build/release/bin/phalanx]          fails where the page is not up to date (a test)
#   scripts/lecture_page.sh [--program build/release/bin/phalanx] --fix    writes the page
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly longest=9000  # words
program=build/release/bin/phalanx
fix=
while [[ $# -gt 0 ]]; do
  case $1 in
    --program) program=$2; shift 2 ;;
    --fix) fix=yes; shift ;;
    *) echo "$0: unknown argument '$1'; known are --program, --fix" >&2; exit 2 ;;
  esac
done

page=$(mktemp)
trap 'rm -f "$page"' EXIT
"$program" lecture --device cpu --ranks 4 --markdown "$page"
words=$(wc -w <"$page")
if ((words > longest)); then
  cp "$page" "${LECTURE_PAGE_KEPT:-/dev/null}"
  echo "$0: the page has $words words; expected at most $longest" >&2
  exit 1
fi

# Ranks that measured the same are one line, so lines that hold measured numbers alone are one here.
masked() {
  sed -E 's/ *~[0-9.-]+/ ~/g; s/ ~ .*/ ~/' "$1" |
    awk '/^  ranks? [0-9, -]+:( ~)+$/ { if (!same) print "  ranks: ~"; same = 1; next } { same = 0; print }'
}
if [[ -n $fix ]]; then
  cat "$page" >docs/lecture.md
elif ! diff -u <(masked docs/lecture.md) <(masked "$page"); then
  echo "$0: docs/lecture.md is not what the program says (above); run scripts/lecture_page.sh --fix" >&2
  exit 1
else
  echo "docs/lecture.md is what the program says: $words words"
fi
