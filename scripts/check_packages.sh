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

# fake FOLDER MINOR: a folder that looks like LibTorch 2.MINOR.99.
fake() {
  mkdir -p "$1/lib" "$1/include/torch/headeronly" "$1/include/torch/csrc/api/include/torch"
  touch "$1/lib/libtorch_cpu.so" "$1/lib/libtorch.so" "$1/include/torch/csrc/api/include/torch/torch.h"
  printf '#define TORCH_VERSION_%s\n' 'MAJOR 2' "MINOR $2" 'PATCH 99' \
    >"$1/include/torch/headeronly/version.h"
}
newer="$place/newer/torch" older="$place/older/torch"
fake "$newer" 98
fake "$older" 11

mkdir "$place/tar"
tar -xzf "$packages"/tessera-*.tar.gz -C "$place/tar" --strip-components 1
# Into a root of its own, which lacks the C library that dpkg would look for there; the
# host has it, and apt says whether what the package depends on can be had.
apt-get install --simulate "$packages"/tessera_*.deb >/dev/null
mkdir -p "$place/deb/var/lib/dpkg"/{info,updates,triggers}
touch "$place/deb/var/lib/dpkg"/{status,available}
fakeroot dpkg --root="$place/deb" --log="$place/dpkg.log" --force-depends,not-root \
  --install "$packages"/tessera_*.deb >/dev/null 2>"$place/dpkg.err" || { cat "$place/dpkg.err"; exit 1; }
for prefix in "$place/tar" "$place/deb/usr"; do
  program="$prefix/bin/tessera"
  fails "has LibTorch 2.98.99" env TESSERA_TORCH_ROOT="$newer" "$program" doctor
  fails "there is no LibTorch in" env TESSERA_TORCH_ROOT=/nowhere "$program" doctor
  TESSERA_TORCH_ROOT="$torch" use "$(basename "$(dirname "$prefix")")-$(basename "$prefix")" "$program"
  fails "found 2.11.99" cmake -S examples/cmake_project -B "$place/refused" -G Ninja \
    -DCMAKE_PREFIX_PATH="$prefix" -DTESSERA_TORCH_ROOT="$older"
done

# In the wheel's environment torch lies beside tessera, as pip puts it.
python3 -m venv "$place/venv"
site="$(echo "$place"/venv/lib/python3*/site-packages)"
"$place/venv/bin/pip" install -q --no-deps "$packages"/tessera-*.whl
fails "there is no torch" "$place/venv/bin/tessera" doctor
# beside FOLDER VERSION: as if pip had installed that torch.
beside() {
  rm -rf "$site"/torch-*.dist-info "$site/torch"
  mkdir "$site/torch-$2.dist-info"
  printf 'Metadata-Version: 2.1\nName: torch\nVersion: %s\n' "$2" >"$site/torch-$2.dist-info/METADATA"
  ln -s "$1" "$site/torch"
}
beside "$newer" 2.98.99
fails "has torch 2.98.99" "$place/venv/bin/tessera" doctor
# pip itself refuses that torch, and takes the one that the wheel was built with.
"$place/venv/bin/pip" uninstall -q -y tessera
fails "torch==" "$place/venv/bin/pip" --isolated install --no-index "$packages"/tessera-*.whl
beside "$torch" "$(<build/torch-version)"
"$place/venv/bin/pip" --isolated install -q --no-index "$packages"/tessera-*.whl
use wheel "$place/venv/bin/tessera"

# As a part of another project, from an archive: nothing but the library and the
# program is added.
echo "-- FetchContent"
mkdir "$place/parent"
git ls-files -z --cached --others --exclude-standard |
  tar --null --files-from=- --ignore-failed-read --transform 's|^|tessera/|' -czf "$place/parent/tessera.tar.gz" 2>/dev/null
cp examples/cmake_project/main.cpp "$place/parent"
cat >"$place/parent/CMakeLists.txt" <<CMAKE
cmake_minimum_required(VERSION 3.24)
project(parent LANGUAGES CXX)
include(FetchContent)
set(TESSERA_TORCH_ROOT "$torch")
FetchContent_Declare(tessera URL "$place/parent/tessera.tar.gz")
FetchContent_MakeAvailable(tessera)
add_executable(uses_tessera main.cpp)
target_link_libraries(uses_tessera PRIVATE tessera::tessera)
CMAKE
cmake -S "$place/parent" -B "$place/parent/build" -G Ninja -DCMAKE_EXPORT_COMPILE_COMMANDS=ON >/dev/null
targets="$(ninja -C "$place/parent/build" -t targets all)"
if grep -E '_test:|_bench:|gpt:' <<<"$targets"; then
  echo "Tests, benchmarks or examples are built in a project that only uses Tessera."
  exit 1
fi
# The flags of its own sources are not the parent's.
if python3 - "$place/parent/build/compile_commands.json" <<'PYTHON'
import json, sys
mine = [c for c in json.load(open(sys.argv[1])) if c["file"].endswith("/parent/main.cpp")]
sys.exit(0 if any(f in mine[0]["command"] for f in ("-Werror", "-Wall", "-fvisibility")) else 1)
PYTHON
then
  echo "Tessera's own flags reach a source of the parent."
  exit 1
fi
if grep -q tessera "$place/parent/build/cmake_install.cmake" 2>/dev/null &&
  cmake --install "$place/parent/build" --prefix "$place/parent/prefix" 2>/dev/null | grep -i tessera; then
  echo "Installing the parent installs Tessera, too."
  exit 1
fi
ninja -C "$place/parent/build" uses_tessera >"$place/parent/build.log" || { tail -n 30 "$place/parent/build.log"; exit 1; }
output="$("$place/venv/bin/tessera" run -n 2 "$(find "$place/parent/build" -name uses_tessera -type f)")"
echo "$output"
[[ "$output" == *"rank 1 of 2, sum 2"* ]]
echo "packages: all of them work"
