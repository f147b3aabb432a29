#!/usr/bin/env bash
# Builds the documentation into build/site: the pages by mkdocs, the API by Doxygen
# into build/site/api. A broken link, a page that is not in the list of pages, an
# undocumented call, something loaded from a network: each is an error.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

die() {
  printf 'build_docs: %s\n' "$@" >&2
  exit 1
}

mkdir -p build
log="$(mkdocs build --strict --clean 2>&1)" || die "mkdocs failed:" "$log"
# mkdocs only mentions it.
[[ "$log" != *'not included in the "nav"'* ]] || die "add these pages to the nav of mkdocs.yml:" "$log"
doxygen scripts/docs/Doxyfile
scripts/check_docs.py --site build/site
echo "build_docs: open build/site/index.html"
