#!/usr/bin/env bash
# Usage: FOR=seconds scripts/fuzz.sh
#
# Builds the fuzzers in build/fuzz and runs each. Input that reaches new code is
# kept in build/fuzz/corpus; input that fails is left in build/fuzz and named.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

targets=(pickle metadata safetensors torch_file)
seeds=tests/checkpoint/format/corpus
folder=build/fuzz

cmake --build "$folder" -j "${JOBS:-$(nproc)}" --target "${targets[@]/#/fuzz_}"
for target in "${targets[@]}"; do
  found="$folder/corpus/$target"
  mkdir -p "$found"
  echo "== fuzz_$target, ${FOR:-30} s"
  "$folder/bin/fuzz_$target" -max_total_time="${FOR:-30}" -timeout=10 \
    -rss_limit_mb=2048 -malloc_limit_mb=256 -max_len=65536 -verbosity=0 \
    -print_final_stats=1 -artifact_prefix="$folder/" "$found" "$seeds/$target"
done
