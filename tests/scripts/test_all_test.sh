#!/usr/bin/env bash
# Tests scripts/test_all.sh with a Makefile of its own, in a repository of its own: test_all_test.sh SCRIPT
set -euo pipefail
script=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset MAKEFLAGS MAKELEVEL "${!PHALANX_@}" TEST_SEED FAULTS RUN_FAULTS FUZZ_SECONDS FUZZ_PART LINT_PART

mkdir "$work/scripts"
cp "$script" "$work/scripts/test_all.sh"
cd "$work"
printf '%s\n' '.PHONY: good bad absent' 'good:' '	@echo run >>runs' 'bad:' '	@false' 'absent:' '	@echo "skipped: no network"' >Makefile
printf '%s\n' runs out 'results/' >.gitignore
git init -q
git add .
git -c user.name=test -c user.email=test@localhost commit -qm first

fail() { echo "test_all_test: $*" >&2; cat out >&2; exit 1; }
# STATUS LINE TARGET...: the script ends with STATUS, and its table has LINE.
expect() {
  local expected=$1 line=$2 status=0
  shift 2
  scripts/test_all.sh results "$@" >out 2>&1 || status=$?
  ((status == expected)) || fail "$*: status $status, expected $expected"
  sed -n '/^== results$/,$p' out | grep -qE "$line" || fail "$*: no line '$line' in the table"
}
expect_runs() { [[ $(wc -l <runs) -eq $1 ]] || fail "'good' ran $(wc -l <runs) times, expected $1"; }

expect 0 '^good passed in [0-9]+ s$' good
expect 0 '^good passed before, in [0-9]+ s$' good
expect_runs 1
expect 1 '^bad FAILED after [0-9]+ s: results/bad.log$' bad good
expect 1 '^good passed before' bad good
expect 0 '^absent: skipped: no network$' absent
[[ ! -e results/bad.passed && ! -e results/absent.passed ]] || fail 'what failed or was skipped counts as passed'
expect_runs 1

# Other sources, or settings that choose other cases, are tested again.
echo '# changed' >>Makefile
expect 0 '^good passed in' good
expect_runs 2
echo new >source
expect 0 '^good passed in' good
expect_runs 3
PHALANX_ALL_CASES=1 expect 0 '^good passed in' good
expect_runs 4

status=0
scripts/test_all.sh results >out 2>&1 || status=$?
((status == 2)) && grep -q '^usage: ' out || fail "without targets: status $status, expected 2 and its usage"
echo 'test_all_test: passed'
