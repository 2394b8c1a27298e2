#!/usr/bin/env bash
# Replaces the chart library in third_party/uplot by that of a package: an archive (.tgz, .tar.gz, .whl, .zip) that holds
# uPlot.iife.min.js and uPlot.min.css. Prints the version and the SHA-256 digests, and writes these to SHA256SUMS.
#
#   scripts/update_uplot.sh uplot-1.6.32.tgz
#   scripts/update_uplot.sh --check             # only compares the files with SHA256SUMS
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly folder=third_party/uplot
readonly files=(uPlot.iife.min.js uPlot.min.css)
fail() { printf 'update_uplot: %s\n' "$*" >&2; exit 1; }

[[ $# == 1 ]] || fail "expected one argument: an archive with ${files[*]}, or --check"
if [[ $1 == --check ]]; then
  cd "$folder"
  sha256sum --check --strict SHA256SUMS
  exit
fi
[[ -f $1 ]] || fail "'$1' is no file: expected an archive, such as npm pack uplot writes"

unpacked=$(mktemp -d)
trap 'rm -rf "$unpacked"' EXIT
case $1 in
  *.tgz | *.tar.gz) tar -xzf "$1" -C "$unpacked" ;;
  *.whl | *.zip) python3 -m zipfile -e "$1" "$unpacked" ;;
  *) fail "'$1': expected a name that ends in .tgz, .tar.gz, .whl or .zip" ;;
esac
for file in "${files[@]}"; do
  mapfile -t found < <(find "$unpacked" -type f -name "$file")
  [[ ${#found[@]} == 1 ]] || fail "'$1' holds ${#found[@]} files called $file: expected one"
  head -c 300 "${found[0]}" | grep -qi uplot || fail "'$1': $file does not begin as uPlot's does"
done
version=$(head -c 300 "$(find "$unpacked" -type f -name "${files[0]}")" | grep -oE 'v[0-9]+\.[0-9]+\.[0-9]+' | head -1)
[[ -n $version ]] || fail "'$1': ${files[0]} does not say its version"
for file in "${files[@]}"; do cp "$(find "$unpacked" -type f -name "$file")" "$folder/$file"; done
cd "$folder"
sha256sum "${files[@]}" | tee SHA256SUMS
printf 'update_uplot: %s is uPlot %s; write that into %s/README.md\n' "$folder" "$version" "$folder"
