#!/bin/sh
# Build the sdist and, from it, the wheel, check both, and run a part of the tests on the wheel in a new environment
# that has no compiler. The sdist must install there too, without the compiled kernels. Needs GCC and the package
# registries.
#
#     scripts/check_wheel.sh [directory that receives both once all is well]
#
# PYTHON (default .venv/bin/python) is a Python with the packages of the dependency group "wheel".
set -eu

cd "$(dirname "$0")/.."
root=$PWD
python=${PYTHON:-.venv/bin/python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_QUIET=1

PIP_CONSTRAINT="$root/constraints.txt" "$python" -m build --sdist --outdir "$work/sdist" . >/dev/null
sdist=$(echo "$work"/sdist/*.tar.gz)
"$python" -m pip wheel --no-deps --no-cache-dir --build-constraint constraints.txt --wheel-dir "$work/linux" "$sdist"

# The kernels may ask for nothing but the C library, in a version as old as the policy's. The OpenMP runtime is torch's.
PATH="$(dirname "$python"):$PATH" "$python" -m auditwheel show "$work"/linux/*.whl
PATH="$(dirname "$python"):$PATH" "$python" -m auditwheel repair --wheel-dir "$work/wheel" "$work"/linux/*.whl
wheel=$(echo "$work"/wheel/*.whl)
"$python" -m twine check --strict "$sdist" "$wheel"

"$python" - "$wheel" src/warmattn <<'EOF'
import sys
import zipfile
from pathlib import Path

wheel, package = Path(sys.argv[1]), Path(sys.argv[2])
files = {info.filename: info.compress_size for info in zipfile.ZipFile(wheel).infolist() if not info.is_dir()}
assert "manylinux" in wheel.name, f"{wheel.name} is for this machine alone"
strays = [name for name in files if not name.startswith(("warmattn/", "warmattn-"))]
assert not strays, f"not the package's own: {strays}"

expected = {
    f"warmattn/{path.relative_to(package).as_posix()}"
    for path in package.rglob("*")
    if path.is_file() and path.suffix not in {".cpp", ".h", ".pyc", ".so"}
}
got = {name for name in files if name.startswith("warmattn/")}
assert got == expected | {"warmattn/backend/cpu/_native.so"}, f"differ: {sorted(got ^ expected)}"

demo = sum(size for name, size in files.items() if name.startswith("warmattn/demo_model/"))
kernels = files["warmattn/backend/cpu/_native.so"]
rest = wheel.stat().st_size - demo
print(f"{wheel.name}: {wheel.stat().st_size:,} bytes; {rest:,} without the demo's model, {kernels:,} of them kernels")
assert rest < 2_000_000, "2 MB without the demo's model is the limit"
EOF

"$python" -m venv "$work/env"
"$work/env/bin/python" -m pip install --upgrade 'pip>=25.3'
"$work/env/bin/python" -m pip install --constraint constraints.txt torch
"$work/env/bin/python" -m pip install --constraint constraints.txt \
    "$wheel" pytest pytest-timeout pytest-xdist hypothesis

# Nothing outside the environment is found from here on, and so no compiler.
(
    export PATH="$work/env/bin"
    unset CC CXX PYTHONPATH
    cd "$work"
    for compiler in cc c++ gcc g++ clang clang++; do
        if command -v "$compiler"; then exit 1; fi
    done
    case $(python -c 'import warmattn; print(warmattn.__file__)') in
        "$work"/env/*) ;;
        *) echo "the tests would not run on the wheel" && exit 1 ;;
    esac
    python -m warmattn info
    OMP_NUM_THREADS=1 python -m pytest --config-file "$root/pyproject.toml" -p no:cacheprovider -q -n 2 \
        "$root/tests/cpu" "$root/tests/codec/test_encode.py" "$root/tests/codec/test_decode.py"

    python -m pip wheel --no-deps --no-cache-dir --build-constraint "$root/constraints.txt" --wheel-dir plain "$sdist"
    case $(echo plain/*.whl) in
        *-py3-none-any.whl) echo "without a compiler: $(echo plain/*)" ;;
        *) echo "without a compiler, a wheel with kernels?" && exit 1 ;;
    esac
)

[ $# -eq 0 ] || { mkdir -p "$1" && cp "$sdist" "$wheel" "$1"; }
