"""Cases of public bug reports, by their ids: the child process and what runs it (I2 I4 B1 B3)."""
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import uuid

import psutil
import pytest
from case_tools import check_drained, generate, greedy, ids, solo
from run_notebooks import MARK, left_behind

from litevllm import LLM

pytestmark = pytest.mark.timeout(60)
ARGS = dict(num_gpu_blocks_override=64, max_num_seqs=8)


def cores():
    "Engine processes below this one."
    found = []
    for p in psutil.Process().children(recursive=True):
        try: found += [p] if "litevllm.engine.core" in p.cmdline() else []
        except psutil.Error: pass
    return found


# ---- I2: interrupts at any moment, with n > 1, through the child too, are in tests/test_life.py; here chat() and a real model

@pytest.mark.timeout(180)   # ten seconds alone; beside another process of tests it takes several times that
@pytest.mark.parametrize("how", ["generate", "chat"])
def test_I2_after_ctrl_c_the_next_call_is_its_own(tiny_llama, monkeypatch, how):
    "A real signal after 0.2 s, three times; the next call has one output for one prompt, and nothing of the old one is left."
    monkeypatch.setenv("LITEVLLM_ENABLE_MULTIPROCESSING", "0")
    want = solo(tiny_llama, [9, 8, 7], 6)
    with LLM(tiny_llama) as llm:
        talk = [{"role": "user", "content": "Hello"}]
        many = {"generate": [[5 + i, 6, 7] for i in range(200)], "chat": [talk] * 200}[how]
        said = ids(llm.chat(talk, greedy(6), use_tqdm=False)[0])
        for _ in range(3):
            timer = threading.Timer(0.2, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                while True: getattr(llm, how)(many, greedy(200), use_tqdm=False)
            timer.join()
            out, = generate(llm, [[9, 8, 7]], greedy(6))
            assert (out.prompt_token_ids, ids(out)) == ([9, 8, 7], want)
            again, = llm.chat(talk, greedy(6), use_tqdm=False)
            assert ids(again) == said
            check_drained(llm)


# ---- I4: wrong shapes, unknown architectures, cut files and too little memory are in tests/test_ipc_llm.py

@pytest.mark.parametrize("kind", ["no such directory", "a file", "an empty directory", "no config.json"])
def test_I4_a_bad_model_path_is_named_at_once(tiny_llama, tmp_path, kind):
    path = tmp_path / "model"
    if kind == "a file": path.write_text("no model")
    elif kind == "an empty directory": path.mkdir()
    elif kind == "no config.json": shutil.copytree(tiny_llama, path), (path / "config.json").unlink()
    started = time.monotonic()
    with pytest.raises((ValueError, OSError)) as e: LLM(str(path), **ARGS)
    assert str(path) in str(e.value) and time.monotonic() - started < 20
    assert not cores()


def test_I4_an_import_error_deep_in_the_child_is_the_message(tiny_llama, tmp_path, monkeypatch):
    "The front process has its modules; in the child numba can't be loaded, long after the first message."
    (tmp_path / "numba").mkdir()
    (tmp_path / "numba" / "__init__.py").write_text("raise ImportError('libllvmlite.so.7 cannot be opened')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RuntimeError, match="failed to start: .*libllvmlite.so.7 cannot be opened"): LLM(tiny_llama, attention_backend="CPU_ATTN", **ARGS)
    assert not cores()


# ---- B1

ENGINE = """
from ipc_fakes import *
from litevllm.engine.core_client import EngineCoreClient
client = EngineCoreClient.make_client(make_config(), executor_class=FakeExecutor)
client.add_request(make_request("a", [7], max_tokens=3))
tokens = []
while len(tokens) < 3: tokens += [t for o in client.get_output().outputs for t in o.new_token_ids]
assert tokens == [7001, 7002, 7003]
"""


def nbdev_test(root, notebooks, workers, seconds=40):
    """(exit code, output, processes and socket directories left behind) of `nbdev_test --n_workers` on notebooks {name: cells}.

    A ZMQ context with a socket in use is made before it forks. One that is not done after `seconds` is killed and fails."""
    (root / "nbs").mkdir()
    shutil.copy(os.path.join(os.path.dirname(__file__), "..", "settings.ini"), root)
    for name, sources in notebooks.items():
        cells = [{"cell_type": "code", "id": f"c{i}", "metadata": {}, "execution_count": None, "outputs": [], "source": s} for i, s in enumerate(sources)]
        (root / "nbs" / f"{name}.ipynb").write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    code = textwrap.dedent(f"""
        import zmq
        a, b = (zmq.Context.instance().socket(kind) for kind in (zmq.PUSH, zmq.PULL))
        a.connect("tcp://127.0.0.1:%d" % b.bind_to_random_port("tcp://127.0.0.1"))
        a.send(b"before"), b.recv()
        from nbdev.test import nbdev_test
        try: nbdev_test(n_workers={workers}, do_print=True)
        finally: a.send(b"after"), print("socket", b.recv(), flush=True)""")
    mark, tmp = uuid.uuid4().hex, tempfile.mkdtemp(prefix="b1", dir="/tmp")
    env = os.environ | {"PYTHONPATH": os.path.dirname(__file__), "TMPDIR": tmp, MARK: mark}
    child = subprocess.Popen([sys.executable, "-c", code], cwd=root / "nbs", env=env, stdin=subprocess.DEVNULL, stdout=(root / "out").open("w"),
                             stderr=subprocess.STDOUT, start_new_session=True)
    try: child.wait(seconds)
    finally:
        left = left_behind(mark, 5)
        for p in left: psutil.Process(p).kill()
        left += os.listdir(tmp)
        shutil.rmtree(tmp)
    return child.returncode, (root / "out").read_text(), left


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_B1_nbdev_test_with_an_engine_in_a_cell(tmp_path, workers):
    """Notebooks that start an engine and close it, leave it open, and fail beside it: the test ends, fails because of the last alone, and leaves
    no process. (A real LLM, in a process for each notebook: tests/test_notebooks.py.)"""
    notebooks = {"closes": [ENGINE, "client.shutdown()"], "leaves": [ENGINE], "raises": [ENGINE, "raise KeyError('beside the engine')"]}
    code, text, left = nbdev_test(tmp_path, notebooks, workers)
    assert code == 1 and "beside the engine" in text, text[-3000:]
    assert "nbdev Tests Failed On The Following Notebooks" in text and "raises.ipynb" in text.split("Following Notebooks")[1], text[-3000:]
    assert not any(name in text.split("Following Notebooks")[1] for name in ("closes.ipynb", "leaves.ipynb"))
    assert "socket b'after'" in text and left == []


def test_B1_nbdev_test_passes_where_all_is_well(tmp_path):
    code, text, left = nbdev_test(tmp_path, {"closes": [ENGINE, "client.shutdown()"], "leaves": [ENGINE]}, 4)
    assert code == 0 and "Success" in text and left == [], text[-3000:]


# ---- B3: valid notebooks without widget state are in tests/test_house.py, the built pages in tests/test_docs.py, odd streams in tests/test_ipc.py

@pytest.mark.parametrize("mp", ["0", "1"])
def test_B3_an_llm_where_stdout_has_no_file_number(tiny_llama, monkeypatch, mp):
    monkeypatch.setenv("LITEVLLM_ENABLE_MULTIPROCESSING", mp)
    out, err = io.StringIO(), io.StringIO()
    for name, stream in (("stdout", out), ("stderr", err)):
        with pytest.raises(io.UnsupportedOperation): stream.fileno()
        monkeypatch.setattr(sys, name, stream)
    with LLM(tiny_llama, **ARGS) as llm:
        [answer] = llm.generate([[5, 6, 7]], greedy(6), use_tqdm=True)
    assert out.getvalue() == "" and "Processed prompts: 100%" in err.getvalue()
    if mp == "1": assert "(EngineCore pid=" in err.getvalue()      # the child's log came through
    monkeypatch.setenv("LITEVLLM_ENABLE_MULTIPROCESSING", "0")
    assert ids(answer) == solo(tiny_llama, [5, 6, 7], 6) and not cores()
