#!/usr/bin/env bash
# Installs in .checkers/ what the tests check the pages of the report and of the site with:
# axe-core and html-validate, in the versions that tests/report/npm/package-lock.json
# pins by their checksums. Nothing outside of this folder changes, and no script
# of a package is run. Silent when there is nothing to do.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source=tests/report/npm
# The lock is written last, so a folder that has it is whole.
if cmp -s "$source/package-lock.json" .checkers/installed-lock.json; then
  exit 0
fi

give_up() {
  echo "setup: no axe-core and no html-validate for the tests: $1" >&2
  exit 1
}
for tool in node npm; do
  command -v "$tool" >/dev/null || give_up "$tool is not there"
done

mkdir -p build
work="$(mktemp -d "$PWD/build/checkers.XXXXXX")"
trap 'rm -rf "$work"' EXIT
echo "setup: installing axe-core and html-validate into .checkers: the tests check the report and the site with them"
cp "$source/package.json" "$source/package-lock.json" "$work"
if ! log="$(cd "$work" && npm ci --ignore-scripts --no-audit --no-fund --loglevel=error 2>&1)"; then
  give_up "npm: $(grep -m 1 'npm error' <<<"$log" || tail -n 1 <<<"$log")"
fi
mv "$work/package-lock.json" "$work/installed-lock.json"
chmod a+rX "$work"
rm -rf .checkers
mv "$work" .checkers
trap - EXIT
