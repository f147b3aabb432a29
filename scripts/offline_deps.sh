#!/usr/bin/env bash
# Gathers in .deps/ what building and testing Tessera need besides LibTorch and
# the tools, for a host with no network. Debian's packages are downloaded and
# unpacked, not installed, so no root is needed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

packages=(
  libgloo-dev libxxhash-dev libcli11-dev nlohmann-json3-dev
  libgtest-dev libgmock-dev librapidcheck-dev)
limit_mb=64

# The list is written last, so a folder that has it is whole.
if [[ -e .deps/packages.txt && "$(cut -d_ -f1 .deps/packages.txt)" == "$(printf '%s\n' "${packages[@]}" | sort)" ]]; then
  echo "offline-deps: .deps is complete; remove it to gather it again"
  exit 0
fi
for tool in apt-get dpkg-deb; do
  if ! command -v "$tool" >/dev/null; then
    echo "offline-deps: needs $tool. Run it on a Debian 12 host with a network and copy .deps here." >&2
    exit 1
  fi
done

mkdir -p build
work="$(mktemp -d "$PWD/build/offline-deps.XXXXXX")"
trap 'rm -rf "$work"' EXIT
mkdir "$work/debs" "$work/tree" "$work/deps"

echo "offline-deps: downloading ${packages[*]}"
if ! log="$(cd "$work/debs" && apt-get download -q "${packages[@]}" 2>&1)"; then
  echo "offline-deps: apt-get download failed: $(grep -m 1 '^E:' <<<"$log" || tail -n 1 <<<"$log")" >&2
  echo "  If its lists are old or missing, run 'apt-get update' as root and try again." >&2
  exit 1
fi
for deb in "$work"/debs/*.deb; do
  dpkg-deb -x "$deb" "$work/tree"
done

# Gloo's library is inside LibTorch's: a second one must not be linked.
rm -rf "$work"/tree/usr/lib/libgloo* "$work"/tree/usr/lib/*/libgloo* "$work/tree/usr/share/cmake/Gloo"
# Shared libraries are left to the host; only links to them are in here.
find "$work/tree/usr/lib" \( -name '*.so*' -o -name pkgconfig \) -prune -exec rm -rf {} +
mv "$work/tree/usr/include" "$work/tree/usr/lib" "$work/deps/"
# CMake files of the header-only packages.
if [[ -d "$work/tree/usr/share/cmake" ]]; then
  mkdir "$work/deps/share"
  mv "$work/tree/usr/share/cmake" "$work/deps/share/"
fi

cat >"$work/deps/README" <<'TEXT'
Headers and small static libraries that Tessera needs besides LibTorch, taken
from the Debian packages in packages.txt by `make offline-deps`.

To build on a host with no network: copy this folder, as .deps, into the root of
the Tessera checkout there. `make` and CMake find it by themselves. The host
must have the same processor architecture, g++, cmake (3.24 or newer), ninja,
python3 and a LibTorch 2.11 to 2.13 (in its python3, or named by Torch_DIR).
TEXT
(cd "$work/debs" && printf '%s\n' *.deb | sort) >"$work/deps/packages.txt"

size_mb="$(du -sm "$work/deps" | cut -f1)"
if ((size_mb > limit_mb)); then
  echo "offline-deps: ${size_mb} MB gathered, more than the ${limit_mb} MB meant to be carried" >&2
  exit 1
fi
rm -rf .deps
mv "$work/deps" .deps
echo "offline-deps: ${size_mb} MB in .deps; its README says how to carry it"
