#!/bin/sh
# Starts tessera with the LibTorch of this host. Looked for, in this order:
# $TESSERA_TORCH_ROOT, $Torch_DIR, the torch of the python3 on PATH.
wanted="@TORCH_VERSION@"
self=$(readlink -f "$0")
prefix=$(dirname "$(dirname "$self")")

version_of() {
  for header in "$1/include/torch/headeronly/version.h" "$1/include/torch/csrc/api/include/torch/version.h"; do
    if [ -e "$header" ]; then
      sed -n 's/^#define TORCH_VERSION_\(MAJOR\|MINOR\|PATCH\) \([0-9]*\).*/\2/p' "$header" | paste -s -d . -
      return
    fi
  done
}

if [ -n "$TESSERA_TORCH_ROOT" ]; then
  root=$TESSERA_TORCH_ROOT
elif [ -n "$Torch_DIR" ]; then
  root=$Torch_DIR
  [ -e "$root/lib/libtorch_cpu.so" ] || root=$Torch_DIR/../../..
else
  root=$(python3 -c "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')" 2>/dev/null)
fi
if [ ! -e "$root/lib/libtorch_cpu.so" ]; then
  echo "tessera: there is no LibTorch in \"$root\". Set TESSERA_TORCH_ROOT to a folder with LibTorch $wanted, or install it: pip install torch==$wanted" >&2
  exit 1
fi
found=$(version_of "$root")
if [ "$found" != "$wanted" ]; then
  echo "tessera: this Tessera was built with LibTorch $wanted, and $root has LibTorch $found. Set TESSERA_TORCH_ROOT to LibTorch $wanted, or rebuild Tessera." >&2
  exit 1
fi
LD_LIBRARY_PATH="$root/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export LD_LIBRARY_PATH
exec "$prefix/libexec/tessera/tessera" "$@"
