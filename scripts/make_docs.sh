#!/usr/bin/env bash
# Builds the site of the documentation into build/docs: the pages by MkDocs, the public headers (those that
# phalanx/phalanx.h includes) by Doxygen. Ends with an error where a link inside the site is dead.
#
#   scripts/make_docs.sh            then open build/docs/index.html, or: python3 -m http.server -d build/docs 8000
#
# Needs doxygen (apt-get install doxygen) and, once, the network for mkdocs-material from PyPI. Status 77: one of them is
# missing, which is said.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly venv=build/docs-venv pin=mkdocs-material==9.6.14
skip() { echo "make_docs: skipped: $*" >&2; exit 77; }

command -v doxygen >/dev/null || skip "there is no doxygen: apt-get install doxygen"
if [[ ! -x $venv/bin/mkdocs ]]; then
  rm -rf "$venv"
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet "$pin" || { rm -rf "$venv"; skip "pip cannot install $pin"; }
fi

log=build/docs.log
NO_MKDOCS_2_WARNING=1 "$venv/bin/mkdocs" build --strict --quiet -f scripts/site/mkdocs.yml >"$log" 2>&1 || { cat "$log" >&2; exit 1; }

headers=$(sed -n 's/^#include "\(.*\)"/\1/p' phalanx/phalanx.h | tr '\n' ' ')
doxygen - <<EOF >>"$log" 2>&1
PROJECT_NAME = Phalanx
INPUT = phalanx/phalanx.h $headers
OUTPUT_DIRECTORY = build/docs
HTML_OUTPUT = api
GENERATE_LATEX = NO
EXTRACT_ALL = YES
JAVADOC_AUTOBRIEF = YES
FULL_PATH_NAMES = YES
STRIP_FROM_PATH = .
QUIET = YES
HAVE_DOT = NO
WARNINGS = NO
EOF
python3 scripts/site/check_site.py build/docs
