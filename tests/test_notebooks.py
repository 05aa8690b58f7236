"""The runners of notebooks and tests: what `make test` relies on when it says that all of them passed."""
import json
import re
import shutil
import time

import pytest

import run_all
from run_notebooks import left_behind, run

CHILD = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)"


@pytest.fixture
def repo(tmp_path, root):
    "An nbdev project without notebooks; repo(name, *cells) adds one and returns its path."
    (tmp_path/"nbs").mkdir()
    shutil.copy(root/"settings.ini", tmp_path/"settings.ini")
    def write(name: str, *cells: str):
        cells = [{"cell_type": "code", "id": f"c{i}", "metadata": {}, "execution_count": None, "outputs": [], "source": s} for i, s in enumerate(cells)]
        nb = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
        (tmp_path/"nbs"/f"{name}.ipynb").write_text(json.dumps(nb), encoding="utf-8")
        return tmp_path/"nbs"/f"{name}.ipynb"
    write.root = tmp_path
    return write


def test_pass_and_fail(repo, capfd):
    fine, fails = repo("fine", "1 + 1"), repo("fails", "1/0")
    gpu = repo("gpu", "#| gpu\nraise SystemError('not here')")
    assert run([fine, gpu], root=repo.root) == 0 and "2 passed, 0 failed" in capfd.readouterr().out
    assert run([fine, fails], root=repo.root) == 1
    out = capfd.readouterr().out
    assert "ZeroDivisionError" in out and "fails.ipynb failed with exit code 1" in out and "1 passed, 1 failed" in out


def test_none_is_a_failure(repo, capfd):
    assert run([], root=repo.root) == 1 and "no notebooks" in capfd.readouterr().out
    fine = repo("fine", "1 + 1")
    (repo.root/"nbs"/".notest").touch()     # nbdev_test then finds no file eligible, and that is exit code 0
    assert run([fine], root=repo.root) == 1 and "fine.ipynb was not run" in capfd.readouterr().out


def test_a_hang_ends_with_all_it_started(repo, capfd):
    hangs = repo("hangs", "import subprocess, sys, time", CHILD, "time.sleep(60)")
    started = time.monotonic()
    assert run([hangs], limit=6, root=repo.root) == 1 and time.monotonic() - started < 30
    assert "hangs.ipynb not done after 6 s" in capfd.readouterr().out


def test_a_process_left_behind_is_a_failure(repo, capfd):
    leaves = repo("leaves", "import subprocess, sys", CHILD)
    assert run([leaves], root=repo.root, patience=0.5) == 1
    assert "leaves.ipynb left processes behind: [" in capfd.readouterr().out


def test_an_error_beside_a_live_engine_ends(repo, tiny_llama, capfd):
    "A notebook that fails while its engine runs: the test ends, says so, and the engine's process goes with it."
    engine = repo("engine", "from litevllm import LLM", f"llm = LLM({tiny_llama!r}, max_model_len=64, num_gpu_blocks_override=16)",
                  "assert llm.generate(['a'], use_tqdm=False)[0].finished", "import os", f"open('{repo.root}/mark', 'w').write(os.environ['LITEVLLM_NOTEBOOK_RUN'])",
                  "raise KeyError('in the middle')")
    assert run([engine], limit=120, root=repo.root) == 1
    out = capfd.readouterr().out
    assert "in the middle" in out and "engine.ipynb failed with exit code 1" in out, out[-2000:]
    assert left_behind((repo.root/"mark").read_text(), 5) == []


def test_left_behind_sees_only_its_own():
    assert left_behind("no such mark", 0) == []


# --- tests and notebooks beside each other

def test_all_are_run_and_one_that_fails_is_seen(repo, capfd):
    "One failure of a test, of a notebook, or a file that is no Python: each is exit code 1, and the last line counts as pytest does."
    def write(name, text):
        (repo.root/name).write_text(text, encoding="utf-8")
        return repo.root/name
    good = [write(f"test_{name}.py", "import pytest\n@pytest.mark.parametrize('i', range(3))\ndef test(i): pass") for name in "abc"]
    fine, fails = repo("fine", "1 + 1"), repo("fails", "1/0")
    assert run_all.run(good, [fine], 2, repo.root) == 0
    out = capfd.readouterr().out
    assert "notebooks: 1 passed, 0 failed" in out and re.fullmatch(r"9 passed in \d+\.\d\ds \(0:\d\d:\d\d\)", out.splitlines()[-1]), out
    assert run_all.run(good[:1], [fine, fails], 2, repo.root) == 1
    out = capfd.readouterr().out
    assert "ZeroDivisionError" in out and out.splitlines()[-1].startswith("3 passed in")
    worse = [write("test_d.py", "def test(): assert 0\ndef test_well(): pass"), write("test_e.py", "import nowhere_at_all")]
    assert run_all.run([*good, *worse], [fine], 2, repo.root) == 1
    out = capfd.readouterr().out
    assert "nowhere_at_all" in out and out.splitlines()[-1].startswith("1 failed, 4 passed, 1 error in"), out     # b and d; what cannot be read stops a, c, e
    assert run_all.run([], [fine], 1, repo.root) == 1 and "no tests ran in" in capfd.readouterr().out.splitlines()[-1]
    assert run_all.report([], [], 0.0)     # no notebook is a failure


def test_every_file_is_dealt_out_once(root):
    files = sorted((root/"tests").glob("test_*.py"))
    for hands in (1, 2, 3, 4, 100): assert sorted(sum(run_all.deal(files, hands), [])) == files and len(run_all.deal(files, hands)) <= hands
