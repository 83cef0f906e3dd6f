#!/bin/sh
# Build the CPU kernels for AArch64 and run their tests on them in an emulator: the tests stay here with torch, every
# call into the kernels goes to a process of QEMU (tests/cpu/emulated_library.py). Needs a cross compiler and QEMU, which
# no Python package brings; on Debian: apt-get install g++-aarch64-linux-gnu qemu-user.
#
#     scripts/test_neon.sh [pytest arguments; by default the tests of the kernels and of bits across processors]
#
# PYTHON (default .venv/bin/python) has the package's requirements, those of the dependency group "test", and CMake.
set -eu

cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
target=aarch64-linux-gnu
for tool in $target-g++ qemu-aarch64; do
    command -v $tool >/dev/null || { echo "no $tool: apt-get install g++-$target qemu-user" >&2 && exit 1; }
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cmake -S . -B "$work/build" -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=$target-g++
cmake --build "$work/build" --parallel
# In a process of Python it is torch that brings the OpenMP runtime, here the server does.
$target-g++ -std=c++17 -O2 -Wall -Wextra -fopenmp -Wl,--no-as-needed -I src/warmattn/backend/cpu/native \
    tests/cpu/emulated_server.cpp -o "$work/server"

[ $# -gt 0 ] || set -- -k "neon or bits_are_those" tests/cpu/test_kernels.py tests/cpu/test_native_codec.py \
    tests/cpu/neon_cases.py
EMULATED_LIBRARY="qemu-aarch64 -L /usr/$target $work/server $work/build/_native.so" WARMATTN_CPU_ISA=neon \
OMP_NUM_THREADS=1 PYTHONPATH="src:tests/cpu" "$python" -m pytest -n auto -p no:cacheprovider -p emulated_library "$@"
