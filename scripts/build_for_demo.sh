#!/usr/bin/env bash
# Usage: JOBS=jobs scripts/build_for_demo.sh FOLDER
#
# Builds what the demo runs in FOLDER, and says beforehand how long a first build
# takes. On a terminal ninja shows one line of progress, in a log one for each step.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder="$1"
jobs="${JOBS:-$(nproc)}"
cpu_minutes=8 # of a first build, measured: docs/building.md

if [[ ! -e "$folder/bin/gpt" ]]; then
  cores=$((jobs < $(nproc) ? jobs : $(nproc)))
  echo "Building the library, the command line and the trainer: about" \
    "$(((cpu_minutes + cores - 1) / cores)) min" \
    "on $cores core(s) that have nothing else to do, seconds the next time."
fi
NINJA_STATUS='[%f/%t, %e s] ' exec ninja -C "$folder" -j "$jobs" tessera_cli gpt
