#!/usr/bin/env bash
# The compiler gates of tests/test_kernels_aot.py on triton 3.6, the oldest that the package asks for. Optional: it makes a virtual environment of its own
# (about 1.5 GB; torch and pytest are taken from the project's) and takes some minutes.
#   tests/aot_triton36.sh [folder for the environment]
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
env=${1:-${TMPDIR:-/tmp}/litevllm-triton36}
python=${PYTHON:-$root/.venv/bin/python}
[ -x "$env/bin/python" ] || "$python" -m venv "$env"
"$env/bin/python" -c 'import triton, sys; sys.exit(triton.__version__ != "3.6.0")' 2>/dev/null || "$env/bin/python" -m pip install --quiet "triton==3.6.0"
site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
own=$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
cd "$root"
# the environment's own packages (triton 3.6) come first, everything else from the project's
PYTHONPATH="$own:$root:$root/tests:$site" "$env/bin/python" -c 'import triton; print("triton", triton.__version__, "from", triton.__file__); assert triton.__version__ == "3.6.0"'
PYTHONPATH="$own:$root:$root/tests:$site" "$env/bin/python" -m pytest -q -p no:cacheprovider tests/test_kernels_aot.py "${@:2}"
