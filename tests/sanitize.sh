#!/bin/sh
# Builds, in build-PRESET/, the test programs that a sanitizer is worth its time for, and runs them. Usage:
# tests/sanitize.sh tsan|asan
set -eu
cd "$(dirname "$0")/.."
preset=$1
started=$(date +%s)
case $preset in
  # Everything that has threads of its own. libtorch is not instrumented: programs that link it would be noise.
  tsan) programs="runtime_device_test runtime_threads_test" ;;
  # The executor with libtorch, and what reads files that others wrote.
  asan) programs="runtime_exec_test runtime_io_test" ;;
  *)
    echo "sanitize: error: no preset $preset; tsan and asan are there" >&2
    exit 2
    ;;
esac
# A few plans of every kind are enough here: the plan matrix runs without sanitizers.
tests_of() {
  case $1 in
    runtime_exec_test) echo '*:-PlanMatrix*:*/PlanMatrix*:*/SameUpdate*' ;;
    *) echo '*' ;;
  esac
}

mkdir -p "build-$preset"
log=build-$preset/sanitize.log
# The programs are words.
{ cmake --preset "$preset" && cmake --build "build-$preset" --target $programs; } >"$log" 2>&1 || {
  cat "$log" >&2
  exit 1
}
echo "sanitize: $preset: built in $(($(date +%s) - started)) s"

# Tests ask for more memory than there is.
export TSAN_OPTIONS="halt_on_error=1:second_deadlock_stack=1:allocator_may_return_null=1"
export ASAN_OPTIONS="allocator_may_return_null=1"
export UBSAN_OPTIONS="print_stacktrace=1"
export OMP_NUM_THREADS=1
# g++ 12's ThreadSanitizer cannot live with the address randomisation of newer kernels (mmap_rnd_bits above 28).
fixed=""
setarch -R true 2>/dev/null && fixed="setarch -R"
started=$(date +%s)
for program in $programs; do
  $fixed "build-$preset/tests/$program" --gtest_brief=1 --gtest_filter="$(tests_of "$program")"
done
echo "sanitize: $preset: passed in $(($(date +%s) - started)) s"
