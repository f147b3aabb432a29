#!/usr/bin/env bash
# Usage: scripts/parity.sh cpu|cuda:N
#
# Builds the tests of PyTorch, runs them with their models on that device, compares
# them with the list (scripts/check_parity.py), and writes the outcome to
# tests/parity/records/cpu.md or cuda.md. Needs what `make build` needs, GoogleTest
# and RapidCheck; nothing else of the tests', so that a host without a network can
# run it after `make offline-deps` elsewhere.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

device="${1:?usage: scripts/parity.sh cpu|cuda:N}"
kind="${device%%:*}"
release=build/release
results="$PWD/build/parity"
mkdir -p "$results" tests/parity/records

scripts/setup.sh build
scripts/configure.sh release tests
cmake --build "$release" -j "${JOBS:-$(nproc)}" --target parity_test

if [[ "$kind" == cuda ]]; then
  export TESSERA_TEST_DEVICE="$device"
  where="$(nvidia-smi --query-gpu=name --format=csv,noheader | paste -sd, | sed 's/,/, /g')"
else
  where="$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), $(nproc) cores"
fi

# A failed test is named by the comparison, too.
"$release/bin/parity_test" --gtest_output="xml:$results/$kind.xml" || true
scripts/check_parity.py tests/parity/checklist.csv "$results/$kind.xml" \
  "$results/checklist_$kind.xml" 000 001 002 003 004 \
  --device "$kind" --sources tests/parity --record "tests/parity/records/$kind.md" \
  --on "$where, LibTorch $(<build/torch-version)" --command "make parity DEVICE=$device"
echo "parity: written to tests/parity/records/$kind.md"
