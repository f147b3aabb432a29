#!/usr/bin/env bash
# Usage: scripts/format.sh [--check]
#
# Lays out the C++ sources; with --check only says which ones are not. Releases
# of clang-format differ in what they write, so exactly 14 is used.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

clang_format=""
for candidate in clang-format-14 clang-format; do
  if command -v "$candidate" >/dev/null && [[ "$("$candidate" --version)" == *" version 14."* ]]; then
    clang_format="$candidate"
    break
  fi
done
if [[ -z "$clang_format" ]]; then
  found="$(clang-format --version 2>/dev/null || echo none)"
  echo "format: clang-format 14 is needed, found: $found. Install clang-format-14." >&2
  exit 1
fi

case "${1:-}" in
  --check) mode=(--dry-run -Werror --ferror-limit=1) ;;
  "") mode=(-i) ;;
  *)
    echo "usage: scripts/format.sh [--check]" >&2
    exit 2
    ;;
esac

if ! find include src tests examples bench -type f \( -name '*.h' -o -name '*.cpp' \) -print0 |
  xargs -0 -r -n 16 -P "$(nproc)" "$clang_format" --style=file "${mode[@]}"; then
  echo "format: run 'make format' to lay out the files above." >&2
  exit 1
fi
