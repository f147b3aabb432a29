#!/usr/bin/env bash
# Usage: scripts/tidy.sh [--changed BASE | FILE...]
#
# Runs clang-tidy 14 with .clang-tidy on the sources of the library and of the command,
# on those of all folders that changed since BASE, or on FILEs. A changed header is
# looked at through the source of its name.
#
# Most of the time goes into LibTorch's headers, so the whole library is looked at as it
# is compiled, a few sources of a folder at a time (build/tidy-together); a source that
# was named is looked at alone (build/tidy). Tests, examples and benchmarks, where names
# clash, are only looked at alone. Both folders are configured and never built:
# precompiled headers are read as text there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if ! command -v clang-tidy-14 >/dev/null; then
  echo "tidy: clang-tidy 14 is needed. Install clang-tidy-14." >&2
  exit 1
fi

folders=(src tests examples bench)
database=build/tidy
together=OFF
case "${1:-}" in
  "")
    database=build/tidy-together
    together=ON
    files=()
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
  -*)
    echo "usage: scripts/tidy.sh [--changed BASE | FILE...]" >&2
    exit 2
    ;;
  *) files=("$@") ;;
esac

if [[ ! -e "$database/compile_commands.json" || -n "$(find CMakeLists.txt cmake ./*/CMakeLists.txt -newer "$database/compile_commands.json")" ]]; then
  cmake -S . -B "$database" -G Ninja -DCMAKE_BUILD_TYPE=Release "-DTESSERA_UNITY=$together" \
    -DCMAKE_EXPORT_COMPILE_COMMANDS=ON "-DTESSERA_TORCH_ROOT=$(<build/torch-root)" >/dev/null
  touch "$database/compile_commands.json"
fi

# Sources that this build has: not those of another backend, nor of other projects.
known="$(sed -n "s|^ *\"file\": \"$PWD/\(.*\)\",\{0,1\}$|\1|p" "$database/compile_commands.json" | sort -u)"
if [[ "$together" == ON ]]; then
  mapfile -t files < <(grep -E "^(src/.*\.cpp|$database/src/.*/Unity/.*)$" <<<"$known")
else
  mapfile -t files < <(printf '%s\n' "${files[@]}" | grep -Fx "$known" || true)
fi
if ((${#files[@]} == 0)); then
  echo "tidy: nothing to look at"
  exit 0
fi

# The flags are g++'s; clang does not know all of its warnings. That a file includes
# sources is what a build together is about.
if ! printf '%s\0' "${files[@]}" | xargs -0 -n 1 -P "${JOBS:-$(nproc)}" \
  clang-tidy-14 --quiet -p "$database" --checks=-bugprone-suspicious-include \
  --extra-arg=-Wno-unknown-warning-option 2>/dev/null; then
  echo "tidy: mend the places above, or say there why they are right: NOLINT(check): reason" >&2
  exit 1
fi
echo "tidy: ${#files[@]} sources are clean"
