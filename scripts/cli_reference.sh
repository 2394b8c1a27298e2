#!/usr/bin/env bash
# The pages that the program writes about itself: docs/cli.md, the help texts of all commands, and docs/configuration.md,
# the keys of a configuration.
#
#   scripts/cli_reference.sh [--program build/release/bin/phalanx]          fails where a page is not up to date (a test)
#   scripts/cli_reference.sh [--program build/release/bin/phalanx] --fix    writes the pages
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

program=build/release/bin/phalanx
fix=
while [[ $# -gt 0 ]]; do
  case $1 in
    --program) program=$2; shift 2 ;;
    --fix) fix=yes; shift ;;
    *) echo "$0: unknown argument '$1'; known are --program, --fix" >&2; exit 2 ;;
  esac
done

page=$(mktemp) keys=$(mktemp)
trap 'rm -f "$page" "$keys"' EXIT
"$program" train --print-config-reference >"$keys"
{
  echo '# Command line'
  echo
  echo 'What `phalanx --help` and `phalanx COMMAND --help` print. Written by `scripts/cli_reference.sh --fix`; a test holds it'
  echo 'against the program. Keys of configuration files, which are flags of `train` and `verify`, are in'
  echo '[configuration.md](configuration.md).'
  echo
  echo '    phalanx --help'
  echo
  "$program" --help | sed 's/^\(.\)/    \1/'
  # The commands are the lines of two blanks and a name.
  for command in $("$program" --help | sed -n 's/^  \([a-z]*\) .*/\1/p' | grep -vx -e phalanx -e version); do
    printf '\n## phalanx %s\n\n' "$command"
    "$program" "$command" --help | sed 's/^\(.\)/    \1/'
  done
} >"$page"

if [[ -n $fix ]]; then
  cat "$page" >docs/cli.md
  cat "$keys" >docs/configuration.md
elif ! diff -u docs/cli.md "$page" || ! diff -u docs/configuration.md "$keys"; then
  echo "$0: these pages are not what the program says (above); run scripts/cli_reference.sh --fix" >&2
  exit 1
else
  echo "docs/cli.md and docs/configuration.md are what the program says"
fi
