#!/usr/bin/env bash
# Usage: FOR=seconds scripts/fuzz.sh
#        RUNS=inputs scripts/fuzz.sh
#
# Builds the fuzzers in build/fuzz and runs them all at once, each over its part
# of the corpus and then for FOR seconds, or until it has tried RUNS inputs. Input
# that reaches new code is kept in build/fuzz/corpus; input that fails is left in
# build/fuzz and named.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

targets=(pickle metadata safetensors torch_file checksums exported)
seeds=tests/checkpoint/format/corpus
folder=build/fuzz

if [[ -n "${RUNS:-}" ]]; then
  limit=(-runs="$RUNS")
  limit_text="$RUNS inputs for each"
else
  limit=(-max_total_time="${FOR:-30}")
  limit_text="${FOR:-30} s"
fi
# Most of the time went into stacks of allocations and into memory that was held back
# when it was freed: 16 MB are more than an input frees.
export ASAN_OPTIONS="${ASAN_OPTIONS:-malloc_context_size=4:quarantine_size_mb=16}"

if ! grep -qs "^CMAKE_HOME_DIRECTORY:INTERNAL=$PWD/tests/fuzz$" "$folder/CMakeCache.txt"; then
  cmake --fresh -S tests/fuzz -B "$folder" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo \
    -DCMAKE_CXX_COMPILER=clang++-14
fi
cmake --build "$folder" -j "${JOBS:-$(nproc)}"

fuzz() {
  local found="$folder/corpus/$1"
  mkdir -p "$found"
  "$folder/bin/fuzz_$1" "${limit[@]}" -timeout=10 \
    -rss_limit_mb=2048 -malloc_limit_mb=256 -max_len=65536 -verbosity=0 \
    -print_final_stats=1 -artifact_prefix="$folder/" "$found" "$seeds/$1" \
    >"$folder/fuzz_$1.log" 2>&1
}

echo "== $limit_text of ${targets[*]}"
processes=()
for target in "${targets[@]}"; do
  fuzz "$target" &
  processes+=("$!")
done
status=0
for i in "${!targets[@]}"; do
  log="$folder/fuzz_${targets[i]}.log"
  if wait "${processes[i]}"; then
    units="$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")"
    echo "fuzz_${targets[i]}: ${units:?not in $log} inputs, none failed"
  else
    status=1
    cat "$log"
    echo "fuzz_${targets[i]} FAILED"
  fi
done
exit "$status"
