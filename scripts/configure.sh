#!/usr/bin/env bash
# Usage: scripts/configure.sh PRESET [tests] [bench]
#
# Configures build/PRESET with the LibTorch that setup.sh found. Does nothing if
# that is done already. Tests and benchmarks need packages of their own: a fresh
# folder leaves them off unless they are named, and a later call turns them on.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

preset="$1"
shift
folder="build/$preset"
stamp="$folder/configured-with"
torch="$(<build/torch-root) $(<build/torch-version)"

options=()
for part in tests bench; do
  name="TESSERA_BUILD_${part^^}"
  if [[ " $* " == *" $part "* ]]; then
    if ! grep -qs "^$name:BOOL=ON" "$folder/CMakeCache.txt"; then
      options+=("-D$name=ON")
    fi
  elif [[ ! -e "$folder/CMakeCache.txt" ]]; then
    options+=("-D$name=OFF")
  fi
done

if [[ ! -e "$folder/build.ninja" || ! -e "$stamp" || "$(<"$stamp")" != "$torch" ]]; then
  # Forget the headers that came with another LibTorch.
  options+=("-DTESSERA_TORCH_ROOT=$(<build/torch-root)" -U 'TESSERA_*_INCLUDE')
fi
if ((${#options[@]})); then
  rm -f "$stamp"
  cmake --preset "$preset" "${options[@]}"
  echo "$torch" >"$stamp"
fi
