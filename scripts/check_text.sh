#!/usr/bin/env bash
# No file of the repository holds a path of one machine, or a note about work that is still to do.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Brackets keep the patterns from finding themselves.
readonly paths='(^|[^A-Za-z0-9_.+-])/([r]oot|[w]ork|[h]ome/[a-z][a-z0-9_-]*)/'
readonly notes='\b([T]ODO|[F]IXME|[X]XX)\b'

# Test data may be anybody's text.
listed() { git ls-files -z --cached --others --exclude-standard -- ':!LICENSE' ':!**/testdata/**'; }

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
[[ $status == 0 ]] && echo "check_text: no paths of one machine, no unfinished work"
exit $status
