#!/usr/bin/env bash
# Gathers in .launchers/ what the tests start ranks with and nobody wants to
# install for that: Slurm with munge, and MPICH, with its headers and library for
# the program of docs/mpi.md. Debian's packages are downloaded
# and unpacked, not installed, so nothing outside of this folder changes, no
# daemon starts, and no root is needed. Silent when there is nothing to do.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# With the libraries that a small system may lack.
packages=(
  munge libmunge2 slurmctld slurmd slurm-client slurm-wlm-basic-plugins libslurm38
  liblua5.1-0 mpich libhwloc15 libnuma1 libmpich12 libmpich-dev libucx0 libibverbs1
  librdmacm1 libgfortran5 libquadmath0 libnl-3-200 libnl-route-3-200)

# The list is written last, so a folder that has it is whole.
list=.launchers/packages.txt
if [[ -e "$list" && "$(cut -d_ -f1 "$list")" == "$(printf '%s\n' "${packages[@]}" | sort)" ]]; then
  exit 0
fi

give_up() {
  echo "setup: no Slurm and no MPICH for the tests: $1" >&2
  exit 1
}
for tool in apt-get apt-cache dpkg-deb; do
  command -v "$tool" >/dev/null || give_up "$tool is not there"
done

mkdir -p build
work="$(mktemp -d "$PWD/build/launchers.XXXXXX")"
trap 'rm -rf "$work"' EXIT
mkdir "$work/debs" "$work/tree"
echo "setup: downloading Slurm, munge and MPICH into .launchers: the tests run them (nothing is installed)"
# A fresh system has no lists yet.
if [[ -z "$(apt-cache policy slurmd 2>/dev/null | sed -n 's/^  Candidate: //p')" && "$(id -u)" == 0 ]]; then
  apt-get update -q >/dev/null 2>&1 || true
fi
if ! log="$(cd "$work/debs" && apt-get download -q "${packages[@]}" 2>&1)"; then
  give_up "$(grep -m 1 '^E:' <<<"$log" || tail -n 1 <<<"$log")"
fi
for deb in "$work"/debs/*.deb; do
  dpkg-deb -x "$deb" "$work/tree"
done
# Libraries of a small system are in /lib; Fortran's and what links statically stays out.
find "$work/tree/lib" -name 'lib*.so*' -exec mv -t "$(dirname "$work"/tree/usr/lib/*/slurm-wlm)" {} +
rm -rf "$work"/tree/{etc,lib,var} "$work/tree/usr/share" "$work"/tree/usr/lib/*/fortran
find "$work/tree/usr/lib" -name '*.a' -delete
(cd "$work/debs" && printf '%s\n' *.deb | sort) >"$work/tree/packages.txt"
chmod -R u+w,a+rX "$work/tree"
rm -rf .launchers
mv "$work/tree" .launchers
