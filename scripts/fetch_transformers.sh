#!/usr/bin/env bash
# Makes .transformers/, a virtual environment with Hugging Face's transformers from
# PyPI and the torch of build/python's Python: tests export its models and train them.
# Usage: scripts/fetch_transformers.sh PYTHON-WITH-TORCH
# Nothing outside of this folder changes. Silent when there is nothing to do.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="$1"
wanted=5.23.0

give_up() {
  echo "setup: no transformers for the tests: $1" >&2
  exit 1
}

[[ -n "$python" ]] || give_up "there is no Python with torch beside this LibTorch"

# Where that Python finds torch and what torch needs.
paths="$("$python" -E -c 'import sys; print("\n".join(p for p in sys.path if p.endswith("-packages")))')"

# The mark is written last, so a folder that has it is whole. An environment whose
# Python has been removed since does not count, nor does one with another torch.
mark=.transformers/version.txt
mark_text="$wanted"$'\n'"$paths"
if [[ -e "$mark" && "$(<"$mark")" == "$mark_text" ]] && .transformers/bin/python -c '' 2>/dev/null; then
  exit 0
fi

echo "setup: installing transformers $wanted into .transformers: the tests export its models (your Python is not changed)"
rm -rf .transformers
log="$("$python" -m venv .transformers 2>&1)" || give_up "$python -m venv failed: $(tail -n 1 <<<"$log")"
# -E: a PYTHONPATH would come before what is in .transformers. numpy and safetensors come
# with transformers; torch does not, and must not: the path below brings the one that
# Tessera is built with.
log="$(PIP_USER=0 PIP_TARGET='' PIP_PREFIX='' PIP_DISABLE_PIP_VERSION_CHECK=1 \
  .transformers/bin/python -E -m pip install -q "transformers==$wanted" 2>&1)" ||
  give_up "$(grep -m 1 ERROR <<<"$log" || tail -n 1 <<<"$log")"
site="$(.transformers/bin/python -E -c 'import site; print(site.getsitepackages()[0])')"
[[ ! -e "$site/torch" ]] || give_up "pip brought a torch of its own into .transformers"
printf '%s\n' "$paths" >"$site/torch-of-tessera.pth"
printf '%s\n' "$mark_text" >"$mark"
