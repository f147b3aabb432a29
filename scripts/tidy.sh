#!/usr/bin/env bash
# Usage: scripts/tidy.sh [--changed BASE | --self-test | FILE...]
#
# Runs clang-tidy 14 with .clang-tidy on the library, on sources that changed since
# BASE, or on FILEs. A changed header is looked at through the source of its name.
# Nearly all the time goes into LibTorch's headers, so a run over the library reads
# the sources of a room of src/ together, as the build does. How sources are
# compiled is in build/tidy and build/tidy-whole, which are configured and never
# built: precompiled headers are read as text there.
#
# clang also checks that fields are touched only while their mutex is held
# (src/base/mutex.h); TESSERA_GUARDED_BY on a field says which one. --self-test
# shows that a field without its mutex is found.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if ! command -v clang-tidy-14 >/dev/null; then
  echo "tidy: clang-tidy 14 is needed. Install clang-tidy-14." >&2
  exit 1
fi

# The flags are g++'s; clang does not know all of its warnings and parameters.
flags=(--quiet --extra-arg=-Wno-unknown-warning-option
  --extra-arg=-Wno-unused-command-line-argument --extra-arg=-Wthread-safety)

self_test() {
  local source
  source="$(mktemp --suffix=.cpp)"
  trap 'rm -f "$source"' RETURN
  local begin='#include "base/mutex.h"
    struct Counter {
      tessera::Mutex mutex;
      int count TESSERA_GUARDED_BY(mutex) = 0;
      void add() {'
  local run=(clang-tidy-14 "${flags[@]}" "--config-file=$PWD/.clang-tidy" "$source" -- -std=c++20 "-I$PWD/src")
  echo "$begin const tessera::MutexLock lock(mutex); ++count; } };" >"$source"
  if ! "${run[@]}" >/dev/null 2>&1; then
    echo "tidy: a field that is touched with its mutex held was refused" >&2
    return 1
  fi
  echo "$begin ++count; } };" >"$source"
  if "${run[@]}" >/dev/null 2>&1; then
    echo "tidy: a field that is touched without its mutex was not found" >&2
    return 1
  fi
  echo "tidy: a field that is touched without its mutex is found"
}

folders=(src tests examples bench)
database=build/tidy
unity=OFF
case "${1:-}" in
  "")
    database=build/tidy-whole
    unity=ON
    ;;
  --changed)
    base="${2:?usage: scripts/tidy.sh --changed BASE}"
    if ! since="$(git merge-base "$base" HEAD 2>/dev/null)"; then
      echo "tidy: there is no $base here to compare with; nothing was looked at. Give BASE=commit."
      exit 0
    fi
    mapfile -t files < <({
      git diff --name-only --diff-filter=d "$since" -- include "${folders[@]}"
      git ls-files --others --exclude-standard -- include "${folders[@]}"
    } | sed -nE 's|^include/tessera/|src/|; s/\.(h|cpp)$/.cpp/p' | sort -u)
    ;;
  --self-test)
    self_test
    exit
    ;;
  -*)
    echo "usage: scripts/tidy.sh [--changed BASE | --self-test | FILE...]" >&2
    exit 2
    ;;
  *) files=("$@") ;;
esac

if [[ ! -e "$database/compile_commands.json" || -n "$(find CMakeLists.txt cmake ./*/CMakeLists.txt -newer "$database/compile_commands.json")" ]]; then
  cmake -S . -B "$database" -G Ninja -DCMAKE_BUILD_TYPE=Release "-DTESSERA_UNITY=$unity" \
    -DCMAKE_EXPORT_COMPILE_COMMANDS=ON "-DTESSERA_TORCH_ROOT=$(<build/torch-root)" >/dev/null
  touch "$database/compile_commands.json"
fi

# Sources that this build has: not those of another backend, nor of other projects.
known="$(sed -n "s|^ *\"file\": \"$PWD/\(.*\)\",\{0,1\}$|\1|p" "$database/compile_commands.json" | sort -u)"
if [[ "$unity" == ON ]]; then # not what the build generates
  mapfile -t files < <(grep -E "^src/|/src/CMakeFiles/.*/Unity/" <<<"$known")
else
  mapfile -t files < <(printf '%s\n' "${files[@]}" | grep -Fx "$known" || true)
fi
if ((${#files[@]} == 0)); then
  echo "tidy: nothing to look at"
  exit 0
fi

if ! printf '%s\0' "${files[@]}" | xargs -0 -n 1 -P "${JOBS:-$(nproc)}" \
  clang-tidy-14 "${flags[@]}" -p "$database" 2>/dev/null; then
  echo "tidy: mend the places above, or say there why they are right: NOLINT(check): reason" >&2
  exit 1
fi
echo "tidy: ${#files[@]} sources are clean"
