#!/usr/bin/env bash
# Usage: scripts/build_docs.sh [--self-test]
#
# Builds the documentation into build/site: the pages by mkdocs, the API by Doxygen
# into build/site/api. A broken link, a page that is not in the list of pages, an
# undocumented call, something loaded from a network: each is an error.
# --self-test shows that both programs can fail with the settings used here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

die() {
  printf 'build_docs: %s\n' "$@" >&2
  exit 1
}

build() {
  mkdir -p build
  local log
  log="$(mkdocs build --strict --clean 2>&1)" || die "mkdocs failed:" "$log"
  # mkdocs only mentions it.
  [[ "$log" != *'not included in the "nav"'* ]] || die "add these pages to the nav of mkdocs.yml:" "$log"
  doxygen scripts/docs/Doxyfile
  scripts/check_docs.py --site build/site
  echo "build_docs: open build/site/index.html"
}

# doxygen_takes TEXT: whether Doxygen takes it as a header without a warning.
doxygen_takes() {
  printf '/// Ours.\nnamespace tessera {\n%s\nvoid call();\n}\n' "$1" >"$folder/call.h"
  {
    cat scripts/docs/Doxyfile
    printf 'INPUT = %s\nOUTPUT_DIRECTORY = %s\n' "$folder/call.h" "$folder"
  } | doxygen - >/dev/null 2>&1
}

# mkdocs_takes TEXT: whether mkdocs takes it as a page.
mkdocs_takes() {
  printf '# Page\n\n%s\n' "$1" >"$folder/docs/index.md"
  mkdocs build --strict --quiet -f "$folder/mkdocs.yml" >/dev/null 2>&1
}

self_test() {
  folder=build/docs-self-test
  rm -rf "$folder"
  mkdir -p "$folder/docs"
  printf 'site_name: Test\nstrict: true\nplugins: []\n' >"$folder/mkdocs.yml"
  doxygen_takes '/// A contract.' || die "self-test: Doxygen refuses a documented call"
  ! doxygen_takes '' || die "self-test: Doxygen takes an undocumented call"
  ! doxygen_takes '/// See \ref gone.' || die "self-test: Doxygen takes a broken reference"
  mkdocs_takes '[here](index.md)' || die "self-test: mkdocs refuses a link"
  ! mkdocs_takes '[gone](gone.md)' || die "self-test: mkdocs takes a broken link"
  rm -rf "$folder"
  echo "build_docs self-test: Doxygen and mkdocs refuse what they should"
}

case "${1:-}" in
  --self-test) self_test ;;
  "") build ;;
  *) die "usage: scripts/build_docs.sh [--self-test]" ;;
esac
