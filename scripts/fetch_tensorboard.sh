#!/usr/bin/env bash
# Makes .tensorboard/, a virtual environment with TensorBoard from PyPI: tests
# read with it what EventWriter and the trainer wrote. Nothing outside of this
# folder changes. Silent when there is nothing to do.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

wanted=2.21.0

# The mark is written last, so a folder that has it is whole. An environment
# whose Python has been removed since does not count.
mark=.tensorboard/version.txt
if [[ -e "$mark" && "$(<"$mark")" == "$wanted" ]] && .tensorboard/bin/python -c '' 2>/dev/null; then
  exit 0
fi

give_up() {
  echo "setup: no TensorBoard for the tests: $1" >&2
  exit 1
}

echo "setup: installing tensorboard $wanted into .tensorboard: the tests read event files with it (your Python is not changed)"
rm -rf .tensorboard
log="$(python3 -m venv .tensorboard 2>&1)" || give_up "python3 -m venv failed: $(tail -n 1 <<<"$log")"
# -E: a PYTHONPATH would come before what is in .tensorboard.
log="$(PIP_USER=0 PIP_TARGET='' PIP_PREFIX='' PIP_DISABLE_PIP_VERSION_CHECK=1 \
  .tensorboard/bin/python -E -m pip install -q "tensorboard==$wanted" 2>&1)" ||
  give_up "$(grep -m 1 ERROR <<<"$log" || tail -n 1 <<<"$log")"
echo "$wanted" >"$mark"
