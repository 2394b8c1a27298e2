#!/usr/bin/env bash
# No file of the repository holds a path of one machine, or a note about work that is still to do. No line of C++ is
# longer than 120 columns: clang-format leaves comments and literals as they are. No item of a list in a comment is
# broken, its last word to the left of the item.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Brackets keep the patterns from finding themselves.
readonly paths='(^|[^A-Za-z0-9_.+-])/([r]oot|[w]ork|[h]ome/[a-z][a-z0-9_-]*)/'
readonly notes='\b([T]ODO|[F]IXME|[X]XX)\b'

# Test data may be anybody's text.
listed() {
  git ls-files -z --cached --others --exclude-standard -- "$@" ':!LICENSE' ':!**/testdata/**' |
    while IFS= read -rd '' file; do if [[ -e "$file" ]]; then printf '%s\0' "$file"; fi; done
}

status=0
report() {  # <what it is> <pattern>
  local found
  found=$(listed | xargs -0 grep -nIE "$2" -- 2>/dev/null || true)
  if [[ -n "$found" ]]; then
    echo "check_text: $1:" >&2
    echo "$found" | cut -c1-200 >&2
    status=1
  fi
}
report "paths of one machine" "$paths"
report "notes about unfinished work" "$notes"

readonly broken='
  FNR == 1 { item = 0; orphan = "" }
  orphan != "" && /^ *\/\/   +[^ ]/ { print orphan; found = 1 }
  { orphan = item && /^ *\/\/ [^ -]/ && length($0) < 60 ? FILENAME ":" FNR ": " $0 : "" }
  { item = /^ *\/\/( [-*] |   )/ && length($0) > 88 }
  END { exit found }'
if ! listed '*.h' '*.cc' | xargs -0 awk "$broken" >&2; then
  echo "check_text: the comments above are broken" >&2
  status=1
fi

# Bytes that go on with a UTF-8 character are no columns. In tests a raw string literal is data, in its own lines.
readonly wide='
  FNR == 1 { ends = ""; is_test = FILENAME ~ /_test\.cc$|\/testing\/|^tests\// }
  {
    rest = $0
    is_raw = ends != ""
    while (1) {
      if (ends != "") {
        if (!(at = index(rest, ends))) break
        rest = substr(rest, at + length(ends))
        ends = ""
      }
      if (!match(rest, /(^|[^A-Za-z0-9_])R"[^ ()"]*\(/)) break
      is_raw = 1
      ends = substr(rest, RSTART, RLENGTH - 1)
      sub(/^.*"/, "", ends)
      ends = ")" ends "\""
      rest = substr(rest, RSTART + RLENGTH)
    }
    columns = $0
    gsub(/[\200-\277]/, "", columns)
    if (length(columns) <= 120 || (is_test && is_raw) || /^ *\/\/+ [^ ]*:\/\/[^ ]*$/) next
    print FILENAME ":" FNR ": " length(columns) " columns"
    found = 1
  }
  END { exit found }'
if ! listed '*.h' '*.cc' '*.cu' '*.inc' ':!*/unicode_ranges.inc' ':!third_party' | LC_ALL=C xargs -0 awk "$wide" >&2; then
  echo "check_text: the lines above are longer than 120 columns: go on in the next line" >&2
  status=1
fi
[[ $status == 0 ]] && echo "check_text: no paths of one machine, no unfinished work, no long lines, no broken comments"
exit $status
