#!/usr/bin/env bash
# Usage: scripts/setup.sh build|test|bench|lint|fuzz|docs|package
#
# Makes sure that what the profile needs is there: Debian packages, then
# LibTorch (not for fuzz and docs). Silent when nothing is to do. Everything is looked at before
# anything is changed, and the user's own Python is never changed.
#
# Leaves behind, each rewritten only when it changes:
#   build/torch-root     LibTorch's folder, with include/ and lib/
#   build/torch-version  its version
#   build/python         a python3 with torch, for torchrun and the like; empty
#                        where Torch_DIR names a LibTorch and no Python has one
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

profile="${1:-}"
case "$profile" in
  build | test | bench | lint | fuzz | docs | package) ;;
  *)
    echo "usage: scripts/setup.sh build|test|bench|lint|fuzz|docs|package" >&2
    exit 2
    ;;
esac

say() { echo "setup: $*"; }
die() {
  printf 'setup: %s\n' "$1" >&2
  shift
  printf '  %s\n' "$@" >&2
  exit 1
}

# ---- System packages -------------------------------------------------------

missing=()       # packages to install
missing_lines=() # "package: what for", one each

# need PACKAGE WHAT-FOR CHECK...: PACKAGE is missing if CHECK fails.
need() {
  local package="$1" why="$2"
  shift 2
  if ! "$@"; then
    missing+=("$package")
    missing_lines+=("$package: $why")
  fi
}

has_command() { command -v "$1" >/dev/null; }

# Where CMake will look, and the folder made by `make offline-deps`.
has_header() {
  local prefix
  local -a prefixes
  IFS=: read -ra prefixes <<<".deps:/usr:/usr/local:${CMAKE_PREFIX_PATH:-}"
  for prefix in "${prefixes[@]}"; do
    if [[ -n "$prefix" && -e "$prefix/include/$1" ]]; then
      return 0
    fi
  done
  return 1
}

new_enough_for_us() { printf '3.24\n%s\n' "$1" | sort -VC; }
has_cmake() {
  has_command cmake || return 1
  local first_line
  read -r first_line < <(cmake --version)
  new_enough_for_us "${first_line##* }"
}

has_openmpi() { compgen -G '/usr/lib/*/openmpi/include/mpi.h' >/dev/null || [[ -e /usr/lib64/openmpi/include/mpi.h ]]; }

has_chromium() { has_command chromium-headless-shell || has_command chromium; }

has_libfuzzer() { compgen -G '/usr/lib/llvm-14/lib/clang/*/lib/linux/libclang_rt.fuzzer-*.a' >/dev/null; }

# Of the Python that Debian's mkdocs runs on.
has_pygments() { /usr/bin/python3 -c 'import pygments' 2>/dev/null; }

can_make_venv() { [[ "$python_makes_venv" == yes ]]; }

# Whatever LibTorch comes with: TensorBoard has an environment of its own.
has_venv() { [[ -e .tensorboard/version.txt ]] || python3 -c 'import ensurepip, venv' 2>/dev/null; }

list_missing() {
  missing=()
  missing_lines=()
  need python3 "finds LibTorch and runs the scripts" has_command python3
  if [[ "$profile" != docs ]]; then
    need g++ "the C++ compiler" has_command "${CXX:-g++}"
    need cmake "configures the build (3.24 or newer)" has_cmake
    need ninja-build "runs the build" has_command ninja
    need libgloo-dev "Gloo's headers, which LibTorch leaves out" has_header gloo/algorithm.h
    need libxxhash-dev "checksums" has_header xxhash.h
    need nlohmann-json3-dev "JSON, in checkpoints" has_header nlohmann/json.hpp
    need libcli11-dev "the command line" has_header CLI/CLI.hpp
  fi
  if [[ "$profile" == test || "$profile" == lint ]]; then
    need libgtest-dev "the tests" has_header gtest/gtest.h
    need libgmock-dev "the tests" has_header gmock/gmock.h
    need librapidcheck-dev "property tests" has_header rapidcheck.h
    need clang-format-14 "the layout check" has_command clang-format-14
  fi
  if [[ "$profile" == lint ]]; then
    need clang-tidy-14 "the look for mistakes" has_command clang-tidy-14
  fi
  if [[ "$profile" == test ]]; then
    need openmpi-bin "tests under mpirun" has_command mpirun
    need libopenmpi-dev "tests of programs with an MPI of their own" has_openmpi
    need chromium-headless-shell "tests of the report and the site, in a browser" has_chromium
    need nodejs "runs html-validate, which checks the report and the site" has_command node
    need npm "installs axe-core and html-validate into .checkers" has_command npm
    need zsh "tests of its completion" has_command zsh
    need mandoc "checks manual pages" has_command mandoc
    need iproute2 "tests with network namespaces" has_command ip
    need python3-venv "makes .tensorboard for the tests" has_venv
  fi
  if [[ "$profile" == bench ]]; then
    need openmpi-bin "OpenMPI's collectives beside ours" has_command mpirun
    need libopenmpi-dev "OpenMPI's collectives beside ours" has_openmpi
  fi
  if [[ "$profile" == test || "$profile" == package ]]; then
    need patchelf "makes packages that do not name folders of this host" has_command patchelf
    need binutils "strips programs" has_command strip
  fi
  if [[ "$profile" == test ]]; then
    need fakeroot "installs the .deb into a folder" has_command fakeroot
  fi
  if [[ "$profile" == test || "$profile" == fuzz ]]; then
    need clang-14 "libFuzzer" has_command clang++-14
    need libclang-rt-14-dev "libFuzzer's library" has_libfuzzer
  fi
  if [[ "$profile" == test || "$profile" == docs ]]; then
    # Debian's mkdocs brings no fonts and scripts from a network, and its version
    # stays what it is.
    need mkdocs "the documentation as a site" has_command mkdocs
    need python3-pygments "colours in its code" has_pygments
    need doxygen "the pages of the API" has_command doxygen
  fi
  if [[ "$torch_from" == new-venv && " ${missing[*]} " != *" python3-venv "* ]]; then
    need python3-venv "makes .venv for LibTorch" can_make_venv
  fi
  # Worth having, not worth failing for: it comes along with the others.
  if ((${#missing[@]})) && [[ "$profile" != docs ]]; then
    need ccache "makes rebuilds fast" has_command ccache
  fi
}

# The one message when packages are missing and cannot be installed.
give_up() {
  die "these packages are missing: $1" "${missing_lines[@]/#/  }" \
    "As root: apt-get install ${missing[*]}" \
    "(or what your system calls them), then run make again. Headers and test" \
    "libraries can also come from another machine: see 'make offline-deps'."
}

install_missing() {
  has_command apt-get || give_up "there is no apt-get here."
  local -a as_root=()
  if ((EUID != 0)); then
    if ! has_command sudo; then
      give_up "not root, and there is no sudo."
    elif ! sudo -n true 2>/dev/null; then
      [[ -t 0 ]] || give_up "not root, and sudo wants a password."
      say "sudo may ask for your password, to install ${missing[*]}"
    fi
    as_root=(sudo)
  fi
  as_root+=(env DEBIAN_FRONTEND=noninteractive)

  # What update cannot fetch, the dry run or the installation will report.
  local log status=0
  log="$("${as_root[@]}" apt-get update -q 2>&1)" || true
  local -a install=(apt-get install -y -q --no-install-recommends
    -o DPkg::Lock::Timeout=120)
  log+=$'\n'"$("${as_root[@]}" "${install[@]}" --simulate "${missing[@]}" 2>&1)" || status=$?
  if ((status == 0)) && [[ " ${missing[*]} " == *" cmake "* ]]; then
    local offered
    offered="$(apt-cache policy cmake | sed -n 's/^  Candidate: //p')"
    if ! new_enough_for_us "$offered"; then
      give_up "this system offers cmake $offered, and 3.24 is needed."
    fi
  fi
  if ((status == 0)); then
    local line
    for line in "${missing_lines[@]}"; do
      say "installing $line"
    done
    log="$("${as_root[@]}" "${install[@]}" "${missing[@]}" 2>&1)" || status=$?
  fi
  if ((status != 0)); then
    give_up "apt-get failed: $(sed '/^$/d' <<<"$log" | tail -n 1)"
  fi
}

# ---- LibTorch --------------------------------------------------------------

torch_from=""   # given, python, venv, or new-venv: to be made
torch_root=""
torch_version=""
torch_python=""
skipped=""      # a torch that was found and cannot be used, and why
python_makes_venv=no

is_torch_root() { [[ -d "$1/include/torch" && -e "$1/lib/libtorch.so" ]]; }

is_tested_version() { [[ "$1" =~ ^2\.1[123]\. ]]; }

# probe PYTHON...: sets probed to its path, torch's folder and version, and whether
# it can make a virtual environment. Nothing is imported: torch takes seconds.
probe() {
  mapfile -t probed < <("$@" - 2>/dev/null <<'PYTHON'
import importlib.util, pathlib, re, sys
spec = importlib.util.find_spec("torch")
root = pathlib.Path(spec.submodule_search_locations[0]) if spec and spec.origin else None
version = root / "version.py" if root else None
found = None
if version and version.is_file():
    found = re.search(r"^__version__.*?['\"]([^'\"]+)", version.read_text(), re.M)
venv = importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip")
print(sys.executable, root or "", found[1] if found else "", "yes" if venv else "no", sep="\n")
PYTHON
  )
  probed+=("" "" "" "")
}

# A downloaded LibTorch has no version.py, so its header is read.
version_of_root() {
  if [[ -e "$1/version.py" ]]; then
    sed -nE "s/^__version__[^'\"]*['\"]([^'\"]+).*/\\1/p" "$1/version.py"
    return
  fi
  local header
  for header in headeronly/version.h csrc/api/include/torch/version.h; do
    header="$1/include/torch/$header"
    if [[ -e "$header" ]]; then
      sed -nE 's/^#define TORCH_VERSION_(MAJOR|MINOR|PATCH) ([0-9]+).*/\2/p' "$header" |
        paste -sd.
      return
    fi
  done
}

# -E: a PYTHONPATH would come before what is in .venv.
venv_python=(.venv/bin/python -E)

venv_is_complete() {
  # pip writes RECORD last: without it the installation was interrupted.
  [[ -x .venv/bin/python ]] &&
    compgen -G '.venv/lib/python*/site-packages/torch-*.dist-info/RECORD' >/dev/null
}

# Sets torch_python to a Python for a LibTorch that Torch_DIR names: the one it
# belongs to, else any with a tested torch, since torchrun only starts programs.
find_python_for_given() {
  torch_python=""
  local python
  for python in python3 .venv/bin/python; do
    has_command "$python" || continue
    probe "$python"
    if [[ "${probed[1]}" == "$torch_root" ]]; then
      torch_python="${probed[0]}"
      return
    elif [[ -z "$torch_python" ]] && is_tested_version "${probed[2]}"; then
      torch_python="${probed[0]}"
    fi
  done
}

find_torch() {
  torch_from=new-venv
  skipped=""
  if [[ -n "${Torch_DIR:-}" ]]; then
    local candidate
    for candidate in "$Torch_DIR" "$Torch_DIR/../../.."; do
      if is_torch_root "$candidate"; then
        torch_from=given
        torch_root="$(cd "$candidate" && pwd)"
        torch_version="$(version_of_root "$torch_root")"
        is_tested_version "$torch_version" ||
          die "Torch_DIR is LibTorch ${torch_version:-of unknown version} in $torch_root;" \
            "Tessera is built with 2.11 to 2.13. Point it at one of these or unset it."
        find_python_for_given
        return
      fi
    done
    die "Torch_DIR is $Torch_DIR, which has no include/torch and lib/libtorch.so." \
      "Set it to LibTorch's folder or its share/cmake/Torch, or unset it."
  fi
  if has_command python3; then
    probe python3
    python_makes_venv="${probed[3]}"
    if [[ -n "${probed[1]}" ]]; then
      if ! is_tested_version "${probed[2]}"; then
        skipped="torch ${probed[2]} in ${probed[1]} is not used: Tessera is built with 2.11 to 2.13"
      elif ! is_torch_root "${probed[1]}"; then
        skipped="torch ${probed[2]} in ${probed[1]} is not used: it has no headers or no libtorch.so"
      else
        take_probed python
        return
      fi
    fi
  fi
  if venv_is_complete; then
    probe "${venv_python[@]}"
    if is_tested_version "${probed[2]}" && is_torch_root "${probed[1]}"; then
      take_probed venv
    fi
  fi
}

take_probed() {
  torch_from="$1"
  torch_python="${probed[0]}"
  torch_root="${probed[1]}"
  torch_version="${probed[2]}"
}

# A .venv that is not ours and holds more than pip is the user's.
venv_is_ours() {
  [[ -e .venv/made-by-tessera ]] && return
  local info
  while IFS= read -r info; do
    case "${info##*/}" in
      pip-* | setuptools-* | wheel-*) ;;
      *) return 1 ;;
    esac
  done < <(compgen -G '.venv/lib/python*/site-packages/*.dist-info' || true)
}

check_venv() {
  venv_is_ours || die ".venv has no torch 2.11 to 2.13 and was not made here, so it is left alone." \
    "Install torch 2.13.0 in it, move it away, or set Torch_DIR, then run make again."
}

install_in_venv() {
  PIP_USER=0 PIP_TARGET='' PIP_PREFIX='' PIP_DISABLE_PIP_VERSION_CHECK=1 \
    "${venv_python[@]}" -m pip install -q "$@"
}

make_venv() {
  say "installing torch 2.13.0 into .venv: LibTorch (some minutes, your Python is not changed)"
  rm -rf .venv
  mkdir .venv
  touch .venv/made-by-tessera
  local log
  log="$(python3 -m venv --system-site-packages .venv 2>&1)" ||
    die "python3 -m venv failed: $(tail -n 1 <<<"$log")" \
      "Mend that, or set Torch_DIR to a LibTorch 2.11 to 2.13."
  local wanted
  for wanted in 2.13.0+cpu 2.13.0; do
    if log="$(install_in_venv "torch==$wanted" 2>&1)"; then
      return
    fi
    # Only an index of CPU builds has the first one.
    [[ "$log" == *"No matching distribution found for torch=="* ]] || break
  done
  die "pip could not install torch $wanted: $(grep -m 1 ERROR <<<"$log" || tail -n 1 <<<"$log")" \
    "With a network, run make again. Without one, set Torch_DIR to a LibTorch 2.11 to 2.13."
}

# PyTorch's distributed programs, which ours are compared with, need numpy; torch
# does not bring it.
need_numpy() {
  [[ -n "$torch_python" ]] || return 0
  if "$torch_python" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("numpy"))'; then
    return
  fi
  if [[ "$torch_from" != venv && "$profile" == bench ]]; then
    say "$torch_python has no numpy: some of Python's benchmarks will fail"
    return
  elif [[ "$torch_from" != venv ]]; then
    die "$torch_python has torch but no numpy, which PyTorch's distributed programs need;" \
      "the tests run some. Install it ($torch_python -m pip install numpy), then run make" \
      "again."
  fi
  say "installing numpy into .venv: PyTorch's programs, which ours are compared with"
  local log
  log="$(install_in_venv numpy 2>&1)" ||
    die "pip could not install numpy: $(grep -m 1 ERROR <<<"$log" || tail -n 1 <<<"$log")" \
      "With a network, run make again."
}

# ---- Main ------------------------------------------------------------------

# record FILE TEXT: returns 0 if FILE changed.
record() {
  if [[ -e "$1" && "$(<"$1")" == "$2" ]]; then
    return 1
  fi
  printf '%s\n' "$2" >"$1.new"
  mv "$1.new" "$1"
}

# The documentation and the fuzzers are built without it.
wants_torch() { [[ "$profile" != docs && "$profile" != fuzz ]]; }

look_for_torch() {
  if wants_torch; then
    find_torch
  fi
}

look_for_torch
list_missing
if [[ "$torch_from" == new-venv ]]; then
  check_venv
fi
if ((${#missing[@]})); then
  install_missing
  look_for_torch
  list_missing
  if ((${#missing[@]})); then
    give_up "apt-get installed them, and they still do not work from this PATH."
  fi
fi
if ! wants_torch; then
  exit
fi
if [[ "$torch_from" == new-venv ]]; then
  [[ -z "$skipped" ]] || say "$skipped"
  make_venv
  find_torch
  if [[ "$torch_from" != venv ]]; then
    die "pip installed torch into .venv, and it has no headers or no libtorch.so." \
      "Set Torch_DIR to a LibTorch 2.11 to 2.13."
  fi
fi

if [[ "$profile" == test || "$profile" == bench ]]; then
  need_numpy
fi
if [[ "$profile" == test ]]; then
  scripts/fetch_launchers.sh || say "the tests under Slurm and MPICH will be skipped"
  scripts/fetch_tensorboard.sh || say "the tests with TensorBoard will be skipped"
  scripts/fetch_transformers.sh "$torch_python" || say "the tests with Hugging Face's models will be skipped"
  scripts/fetch_page_checkers.sh || say "the tests of the report and the site that need axe-core and html-validate will fail"
fi

mkdir -p build
record build/python "$torch_python" || true
changed=no
record build/torch-version "$torch_version" && changed=yes
record build/torch-root "$torch_root" && changed=yes
if [[ "$changed" == yes ]]; then
  say "using LibTorch $torch_version in $torch_root"
fi
