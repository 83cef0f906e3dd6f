#!/bin/sh
# Run the tests of the CPU kernels with the kernels built under AddressSanitizer and UndefinedBehaviorSanitizer. They are
# built into a copy of the package, so an installed or editable one is left as it is. Needs GCC and CMake.
#
#     scripts/test_sanitized.sh [pytest arguments; tests/cpu by default]
#
# ThreadSanitizer is not among them: it must watch the OpenMP runtime too, and that is torch's, built without it.
set -eu

cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cmake -S . -B "$work/build" -DWARMATTN_SANITIZE=address,undefined
cmake --build "$work/build" --parallel
cp -r src/warmattn "$work/warmattn"
cp "$work/build/_native.so" "$work/warmattn/backend/cpu/_native.so"

[ $# -gt 0 ] || set -- tests/cpu
# The runtime of the sanitizer must come first in a process that was not built with it, and the C++ runtime right after,
# or exceptions of torch end in the sanitizer. Python and torch leave memory to the end of the process: no leak check.
# A report ends the process, so pytest may not keep what is written to the descriptors.
LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libstdc++.so)" \
ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} \
PYTHONPATH="$work" "$python" -m pytest -p no:cacheprovider --capture=sys "$@"
