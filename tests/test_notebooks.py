"""The runner of the notebooks: what `make test` relies on when it says that all of them passed."""
import json
import shutil
import time

import pytest

from run_notebooks import left_behind, run

CHILD = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)"


@pytest.fixture
def repo(tmp_path, root):
    "An nbdev project without notebooks; repo(name, *cells) adds one."
    (tmp_path/"nbs").mkdir()
    shutil.copy(root/"settings.ini", tmp_path/"settings.ini")
    def write(name: str, *cells: str):
        cells = [{"cell_type": "code", "id": f"c{i}", "metadata": {}, "execution_count": None, "outputs": [], "source": s} for i, s in enumerate(cells)]
        nb = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
        (tmp_path/"nbs"/f"{name}.ipynb").write_text(json.dumps(nb), encoding="utf-8")
    write.root = tmp_path
    return write


def test_none_is_a_failure(repo, capfd):
    assert run(None, 60, 0, repo.root) == 1 and "no notebook matches" in capfd.readouterr().out
    repo("fine", "1 + 1")
    assert run("nbs/other.ipynb", 60, 0, repo.root) == 1


def test_pass_and_fail(repo, capfd):
    repo("fine", "1 + 1")
    assert run(None, 60, 0, repo.root) == 0 and "1 passed" in capfd.readouterr().out
    repo("fails", "1/0")
    assert run(None, 60, 2, repo.root) == 1
    out = capfd.readouterr().out
    assert "ZeroDivisionError" in out and "fails.ipynb" in out


def test_a_hang_ends_with_all_it_started(repo, capfd):
    repo("hangs", "import subprocess, sys, time", CHILD, "time.sleep(60)")
    started = time.monotonic()
    assert run(None, 6, 0, repo.root) == 1 and time.monotonic() - started < 30
    assert "still running: hangs.ipynb" in capfd.readouterr().out


def test_a_process_left_behind_is_a_failure(repo, capfd):
    repo("leaves", "import subprocess, sys", CHILD)
    assert run(None, 60, 0, repo.root, patience=0.5) == 1
    assert "never completed: none, processes left behind: [" in capfd.readouterr().out


def test_an_error_beside_a_live_engine_ends(repo, tiny_llama, capfd):
    "A notebook that fails while its engine runs: the test ends, says so, and the engine's process goes with it."
    repo("engine", "from litevllm import LLM", f"llm = LLM({tiny_llama!r}, max_model_len=64, num_gpu_blocks_override=16)",
         "print(llm.generate(['a'], use_tqdm=False)[0].finished)", "raise KeyError('in the middle')")
    assert run(None, 120, 1, repo.root) == 1
    out = capfd.readouterr().out
    assert "in the middle" in out and "processes left behind: none" in out, out[-2000:]


def test_left_behind_sees_only_its_own():
    assert left_behind("no such mark", 0) == []
