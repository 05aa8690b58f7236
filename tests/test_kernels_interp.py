"""Runs tests/interp in a process of its own: TRITON_INTERPRET=1 must be set before triton is imported, and the AOT tests need it unset."""
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(*args, timeout):
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run([sys.executable, *args], cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout)
    print(done.stdout[-6000:], done.stderr[-3000:])
    return done


def test_kernels_in_the_interpreter():
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5", "tests/interp/paged_attention_checks.py", timeout=900)
    assert done.returncode == 0
    passed = int(re.search(r"(\d+) passed", done.stdout).group(1))
    assert passed >= 105 and not re.search("skipped|deselected|xfail", done.stdout), done.stdout[-500:]


def test_planted_bugs_are_found():
    "A test suite that cannot fail proves nothing: each of these changes to the kernels must make it fail"
    done = run("tests/interp/planted_bugs.py", timeout=900)
    assert done.returncode == 0
    assert re.search(r"(\d+) of \1 planted bugs found", done.stdout)
