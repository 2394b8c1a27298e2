#!/usr/bin/env bash
# Every C++ file in the repository is as clang-format writes it. --fix rewrites those that are not.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Releases of clang-format differ in details: 14 (Debian 12, Ubuntu 22.04) is the one that decides.
readonly deciding=14
tool=clang-format
if command -v "clang-format-$deciding" >/dev/null; then tool=clang-format-$deciding; fi
version=$("$tool" --version | sed 's/.*version \([0-9]*\).*/\1/')

mapfile -t files < <(git ls-files --cached --others --exclude-standard '*.h' '*.cc' '*.cu' '*.cpp' | while read -r f; do
  [[ -e "$f" ]] && echo "$f"
done)

if [[ "${1:-}" == --fix ]]; then
  "$tool" -i "${files[@]}"
  echo "check_format: formatted ${#files[@]} files with clang-format $version"
  exit 0
fi
wrong=()
for file in "${files[@]}"; do
  if ! "$tool" "$file" | cmp -s - "$file"; then wrong+=("$file"); fi
done
if [[ ${#wrong[@]} -gt 0 ]]; then
  printf 'check_format: not as clang-format %s writes it: %s\n' "$version" "${wrong[@]}" >&2
  if [[ "$version" != "$deciding" ]]; then
    echo "check_format: clang-format $deciding decides and is not installed here; taken as a remark" >&2
    exit 0
  fi
  echo "check_format: make format rewrites them" >&2
  exit 1
fi
echo "check_format: ${#files[@]} files, all as clang-format $version writes them"
