#!/usr/bin/env bash
# Usage: scripts/check_packages.sh FOLDER
#
# Installs each package of FOLDER as a user would, in a place of its own, and uses
# it: doctor first, then a program that finds Tessera with CMake, on two ranks.
# Each must refuse another LibTorch by its version.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

packages="$(realpath "$1")"
torch="$(<build/torch-root)"
place="$PWD/build/package-check"
rm -rf "$place"
mkdir -p "$place"
unset LD_LIBRARY_PATH Torch_DIR TESSERA_TORCH_ROOT

# fails TEXT COMMAND...: it fails, and TEXT is in what it prints.
fails() {
  local text="$1" output
  shift
  if output="$("$@" 2>&1)" || [[ "$output" != *"$text"* ]]; then
    echo "$output"
    echo "This should have failed and printed \"$text\": $*"
    return 1
  fi
}

# use NAME TESSERA: doctor, a project of CMake, two ranks.
use() {
  local name="$1" tessera="$2" project="$place/$1-project" output
  echo "-- $name"
  "$tessera" doctor
  cmake -S examples/cmake_project -B "$project" -G Ninja -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_PREFIX_PATH="$("$tessera" --prefix)" "${@:3}" >/dev/null
  cmake --build "$project" >/dev/null
  output="$("$tessera" run -n 2 "$project/uses_tessera")"
  echo "$output"
  [[ "$output" == *"rank 1 of 2, sum 2"* ]]
}

# A folder that looks like another LibTorch.
other="$place/other/torch"
mkdir -p "$other/lib" "$other/include/torch/headeronly"
touch "$other/lib/libtorch_cpu.so"
printf '#define TORCH_VERSION_%s\n' 'MAJOR 2' 'MINOR 99' 'PATCH 0' \
  >"$other/include/torch/headeronly/version.h"

mkdir "$place/tar" "$place/deb"
tar -xzf "$packages"/tessera-*.tar.gz -C "$place/tar" --strip-components 1
dpkg-deb -x "$packages"/tessera_*.deb "$place/deb"
for prefix in "$place/tar" "$place/deb/usr"; do
  program="$prefix/bin/tessera"
  fails "has LibTorch 2.99.0" env TESSERA_TORCH_ROOT="$other" "$program" doctor
  fails "there is no LibTorch in" env TESSERA_TORCH_ROOT=/nowhere "$program" doctor
  TESSERA_TORCH_ROOT="$torch" use "$(basename "$(dirname "$prefix")")-$(basename "$prefix")" \
    "$program" -DTESSERA_TORCH_ROOT="$torch"
done

# In the wheel's environment torch lies beside tessera, as pip puts it.
python3 -m venv "$place/venv"
site="$(echo "$place"/venv/lib/python3*/site-packages)"
"$place/venv/bin/pip" install -q --no-deps "$packages"/tessera-*.whl
fails "there is no torch" "$place/venv/bin/tessera" doctor
mkdir "$site/torch-2.99.0.dist-info"
printf 'Metadata-Version: 2.1\nName: torch\nVersion: 2.99.0\n' >"$site/torch-2.99.0.dist-info/METADATA"
ln -s "$other" "$site/torch"
fails "has torch 2.99.0" "$place/venv/bin/tessera" doctor
rm -r "$site/torch-2.99.0.dist-info" "$site/torch"
version="$(<build/torch-version)"
mkdir "$site/torch-$version.dist-info"
printf 'Metadata-Version: 2.1\nName: torch\nVersion: %s\n' "$version" \
  >"$site/torch-$version.dist-info/METADATA"
ln -s "$torch" "$site/torch"
use wheel "$place/venv/bin/tessera"

# As a part of another project: nothing but the library is added.
echo "-- FetchContent"
mkdir "$place/parent"
cat >"$place/parent/CMakeLists.txt" <<CMAKE
cmake_minimum_required(VERSION 3.24)
project(parent LANGUAGES CXX)
include(FetchContent)
set(TESSERA_TORCH_ROOT "$torch")
FetchContent_Declare(tessera SOURCE_DIR "$PWD")
FetchContent_MakeAvailable(tessera)
add_library(mine mine.cpp)
target_link_libraries(mine PRIVATE tessera::tessera)
CMAKE
echo '#include <tessera/version.h>' >"$place/parent/mine.cpp"
cmake -S "$place/parent" -B "$place/parent/build" -G Ninja -DCMAKE_EXPORT_COMPILE_COMMANDS=ON >/dev/null
targets="$(ninja -C "$place/parent/build" -t targets all)"
if grep -E '_test:|_bench:|gpt:' <<<"$targets"; then
  echo "Tests, benchmarks or examples are built in a project that only uses Tessera."
  exit 1
fi
# The flags of its own sources are not the parent's.
if python3 - "$place/parent/build/compile_commands.json" <<'PYTHON'
import json, sys
mine = [c for c in json.load(open(sys.argv[1])) if c["file"].endswith("mine.cpp")]
sys.exit(0 if any(f in mine[0]["command"] for f in ("-Werror", "-Wall", "-fvisibility")) else 1)
PYTHON
then
  echo "Tessera's own flags reach a source of the parent."
  exit 1
fi
ninja -C "$place/parent/build" CMakeFiles/mine.dir/mine.cpp.o >/dev/null
echo "packages: all of them work"
