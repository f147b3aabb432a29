#!/usr/bin/env bash
# Everything `make test` runs after setup.sh: phases, most of them one after the other, then
# the minutes of each and the count of tests. A failed phase does not hide the
# later ones, except that without a build there is nothing left to run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

jobs="${JOBS:-$(nproc)}"
release=build/release
results=build/test-results
logs=build/test-logs
ctest_report=build/test-logs/ctest.xml

rm -rf "$results" "$logs"
mkdir -p "$results" "$logs"

timings=()

# phase NAME COMMAND...: runs it; a failure is shown, noted and returned.
phase() {
  local name="$1" status=0 started=$SECONDS
  shift
  echo "== $name"
  "$@" 2>&1 | tee "$logs/$name.log" || status=$?
  ended "$name" "$status" $((SECONDS - started))
}

# ended NAME STATUS SECONDS: notes how a phase ended, and returns the status.
ended() {
  local name="$1" status="$2" seconds="$3" result=ok
  if ((status != 0)); then
    result=FAILED
    echo "== $name FAILED (exit $status), log in $logs/$name.log"
  fi
  timings+=("$(printf '%-9s %5s min  %s' "$name" "$(minutes "$seconds")" "$result")")
  phase_seconds=$seconds
  return "$status"
}

minutes() { printf '%d.%d' $(($1 / 60)) $(($1 % 60 / 6)); }

# counted NAME COMMAND...: a phase that is itself one test in the results.
counted() {
  if phase "$@"; then
    note_success "$1"
  else
    note_failure "$1"
  fi
}

# together NAME=COMMAND...: counted phases beside each other, since each often leaves a
# core idle. They are shown one after the other when all have ended.
together() {
  local pair name status seconds
  local -a groups=()
  set -m # each in a process group of its own, which Ctrl-C ends as a whole
  for pair in "$@"; do
    name="${pair%%=*}"
    (
      status=0
      started=$SECONDS
      "${pair#*=}" </dev/null >"$logs/$name.log" 2>&1 || status=$?
      echo "$status $((SECONDS - started))" >"$logs/$name.end"
    ) &
    groups+=("-$!")
  done
  set +m
  trap 'kill -- "${groups[@]}" 2>/dev/null; exit 130' INT TERM
  wait
  trap - INT TERM
  for pair in "$@"; do
    name="${pair%%=*}"
    read -r status seconds <"$logs/$name.end"
    echo "== $name"
    cat "$logs/$name.log"
    if ended "$name" "$status" "$seconds"; then
      note_success "$name"
    else
      note_failure "$name"
    fi
  done
}

note_success() {
  scripts/junit_summary.py "$results" --add "$1" --seconds "$phase_seconds"
}

note_failure() {
  scripts/junit_summary.py "$results" --add "$1" --seconds "$phase_seconds" --failed "$logs/$1.log"
}

finish() {
  echo "== minutes"
  printf '%s\n' "${timings[@]}"
  printf '%-9s %5s min\n' total "$(minutes "$SECONDS")"
  exec scripts/junit_summary.py "$results" "$@"
}

# Scripts that check are shown able to fail before their word is taken.
check_includes() {
  scripts/check_parity.py --self-test && scripts/build_times.py --self-test &&
    scripts/check_includes.py --self-test && scripts/check_includes.py
}

# Where the time went is shown after a failure, too.
build() {
  local status=0
  scripts/configure.sh release tests bench && cmake --build "$release" -j "$jobs" || status=$?
  scripts/build_times.py "$release" || true
  return "$status"
}

# Three programs at a time, whatever the cores: each runs several ranks of its own, but
# a test of timeouts or of dead ranks mostly waits.
run_tests() {
  ctest --test-dir "$release" --output-on-failure --no-tests=error -j 3 \
    --timeout 5400 --output-junit "$PWD/$ctest_report"
}

# What a user does: installs Tessera, looks whether it works, builds a project of
# their own, runs it alone and on two ranks. A file left over from an earlier run
# could hide that it is not installed, and LD_LIBRARY_PATH that a program does not
# find LibTorch by itself.
check_install() (
  prefix="$PWD/build/install-check" project="$PWD/build/install-check-project"
  rm -rf "$prefix" "$project"
  unset LD_LIBRARY_PATH
  cmake --install "$release" --prefix "$prefix" >/dev/null &&
    "$prefix/bin/tessera" doctor &&
    ls "$prefix"/share/{man/man1/tessera-ckpt-inspect.1,bash-completion/completions/tessera} \
      "$prefix/share/zsh/site-functions/_tessera" &&
    cmake -S examples/cmake_project -B "$project" -G Ninja -DCMAKE_BUILD_TYPE=Release \
      -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_RUNTIME_OUTPUT_DIRECTORY="$project/bin" &&
    cmake --build "$project" -j "$jobs" &&
    prints "rank 0 of 1, sum 1" "$project/bin/uses_tessera" &&
    prints "rank 1 of 2, sum 2" "$prefix/bin/tessera" run -n 2 "$project/bin/uses_tessera"
)

# prints TEXT COMMAND...: it ends well, and TEXT is in what it prints.
prints() {
  local text="$1" output
  shift
  if ! output="$("$@" 2>&1)" || [[ "$output" != *"$text"* ]]; then
    echo "$output"
    echo "This should have ended well and printed \"$text\": $*"
    return 1
  fi
  echo "$output"
}

# What `make package` makes, installed and used as a user would.
check_packages() {
  scripts/make_packages.py --build "$release" --out build/packages &&
    scripts/check_packages.sh build/packages
}

# The site, in a browser too, and that the documents tell the truth. Their C++ is in
# doc_code, one of the tests. A browser that does not answer must not hold up the rest.
check_docs() {
  scripts/check_docs.py --self-test && scripts/doc_programs.py --self-test &&
    scripts/doc_shell.py --self-test && scripts/docs/doxygen_filter.py --self-test &&
    scripts/docs/pictures.py --check &&
    scripts/build_docs.sh --self-test && scripts/build_docs.sh &&
    timeout 1800 tests/docs/site_check.py build/site &&
    scripts/check_docs.py --program "$release/bin/tessera" &&
    scripts/doc_shell.py --bin "$release/bin" --python "$(<build/python)"
}

check_headers() {
  scripts/check_headers.py --self-test && scripts/check_headers.py --jobs "$jobs"
}

# Each benchmark once, short, so that it never rots; and what the documents say
# of speed is what the records have.
check_bench() {
  python3 bench/mfu.py --self-test && bench/record.py --self-test && bench/record.py --check &&
    bench/run.py --build "$release" --quick --without-peers --out build/bench/quick.jsonl
}

# All formats of checkpoints at once, a quarter of a minute each.
run_fuzzers() {
  FOR=15 JOBS="$jobs" scripts/fuzz.sh
}

counted format scripts/format.sh --check
counted includes check_includes
if ! phase build build; then
  note_failure build
  finish
fi
# A failed test is counted from its own XML, or from ctest's report.
phase tests run_tests || true
counted fuzz run_fuzzers
counted install check_install
together packages=check_packages docs=check_docs bench=check_bench headers=check_headers
finish --ctest "$ctest_report"
