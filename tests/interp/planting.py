"""Plant one bug at a time into kernels and see that their checks notice: the tests that every list of bugs (*_planted_bugs.py) gets."""
import importlib.util
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import triton_tools as tools

ROOT = Path(__file__).resolve().parents[2] / "kernels"


class Hangs(Exception): pass


NOTICED = AssertionError, tools.OutOfBounds, tools.WriteRace, Hangs


def load(modules, folder, name, line="", bug=""):
    "The last of `modules` with `bug` for `line`, there or in one before it that it imports; from files, as the interpreter wants to read sources"
    sources = {m: (ROOT / f"{m}.py").read_text(encoding="utf-8").replace("from .", "from litevllm.kernels.") for m in modules}
    where = [m for m, text in sources.items() if line in text]
    assert where, f"out of date: {line!r} is not in the kernels"
    if line: sources[where[-1]] = sources[where[-1]].replace(line, bug)
    for module, text in sources.items():
        for other in modules: text = text.replace(f"from litevllm.kernels.{other} import", f"from {name}_{other} import")
        path = Path(folder) / f"{name}_{module}.py"
        path.write_text(text, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        sys.modules[path.stem] = made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
    return made


@contextmanager
def limited(seconds):
    "Raise `Hangs` in what takes longer: a search that does not end"
    def hangs(*_): raise Hangs(f"not done after {seconds:.0f} s")
    before = signal.signal(signal.SIGALRM, hangs)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try: yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def cause_of(error):
    "The interpreter wraps what goes wrong in a helper"
    while error.__cause__ is not None: error = error.__cause__
    return error


def plant(modules, bugs, run):
    """Two tests: each check passes on the kernels as they are, and each bug makes its check fail.

    `modules`: names in kernels/, the one under test behind those that it imports. `bugs`: what is wrong then, the line as it is, the line with the bug,
    the name of the check that must notice. `run(module, name)` raises if the module fails the check."""
    seconds = {}  # of each check without a bug

    @pytest.mark.parametrize("name", dict.fromkeys(name for *_, name in bugs))
    def test_as_they_are(name, tmp_path):
        module, began = load(modules, tmp_path, "sound"), time.perf_counter()
        run(module, name)
        seconds[name] = time.perf_counter() - began

    @pytest.mark.parametrize("line, bug, name", [b[1:] for b in bugs], ids=[b[0] for b in bugs])
    def test_planted(line, bug, name, tmp_path, request):
        module = load(modules, tmp_path, f"bug{abs(hash(request.node.name))}", line, bug)
        with pytest.raises(Exception) as found, limited(max(2, 4 * seconds.get(name, 5))): run(module, name)
        assert isinstance(cause_of(found.value), NOTICED), found.value

    return test_as_they_are, test_planted
