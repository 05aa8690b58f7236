"""Runs tests/interp in processes of their own: TRITON_INTERPRET=1 must be set before triton is imported, and the AOT tests need it unset."""
import re

import pytest

LEAST = {"paged_attention": (105, 40), "fused": (120, 35), "sampling": (40, 36)}  # how many checks and planted bugs there are, or more


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kernels", LEAST)
def test_checks_pass_and_planted_bugs_are_found(kernels, run_python, root):
    "A test suite that cannot fail proves nothing: each planted change to the kernels must make one of the checks fail"
    files = [f"tests/interp/{kernels}_{kind}.py" for kind in ("checks", "planted_bugs")]
    done = run_python(["-m", "pytest", "-v", "-p", "no:cacheprovider", "-o", "timeout=0", "--durations=9", *files], timeout=380,
                      TRITON_INTERPRET="1", PYTHONPATH=str(root/"tests"))
    print(done.stdout[-1500:])
    checks, bugs = (len(re.findall(rf"{file}::.*{test}.* PASSED", done.stdout)) for file, test in zip(files, ("test_", "test_planted")))
    assert checks >= LEAST[kernels][0] and bugs >= LEAST[kernels][1], (checks, bugs)
    assert not re.search("skipped|deselected|xfail", done.stdout.splitlines()[-1]), done.stdout[-500:]
