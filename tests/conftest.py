"""Shared by all tests. One thread per process unless told otherwise: the test machine has two cores and most tests start processes."""
import os
import signal
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")       # before torch is imported; children inherit it
os.environ["NUMBA_NUM_THREADS"] = "2"               # at most: torch's number decides, and the tests of two threads set that
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"   # compile in the process that asks: a pool of workers would outlive its test, and others count children
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "agg")

import pytest  # noqa: E402

signal.signal(signal.SIGINT, signal.default_int_handler)   # started as a shell's background job we would ignore it, and the Ctrl-C tests' children too

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    "The root of the repository."
    return ROOT


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory) -> str:
    "A two-layer Llama checkpoint with a tokenizer and a chat template, made once for the session."
    from litevllm.tiny import write_tiny_model
    return write_tiny_model(tmp_path_factory.mktemp("tiny")/"llama", "llama")


@pytest.fixture(scope="session")
def working_copy(tmp_path_factory) -> Path:
    "A copy of the files that git has or would add, for what writes into the tree; links stay links."
    target = tmp_path_factory.mktemp("copy")/"litevllm"
    names = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True,
                           capture_output=True, timeout=60).stdout.decode().split("\0")
    for name in filter(None, names):
        source, dest = ROOT/name, target/name
        if not os.path.lexists(source): continue       # deleted here, not yet for git
        dest.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink(): dest.symlink_to(os.readlink(source))
        else: dest.write_bytes(source.read_bytes())
    return target


@pytest.fixture
def empty_triton_cache(tmp_path, monkeypatch):
    "Every kernel is really compiled: triton's cache starts empty."
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.fixture(scope="session")
def run_python():
    "run_python(code_or_args, cwd=, timeout=, **env): a Python of its own; CompletedProcess with text, asserting exit code 0."
    def run(args, cwd=ROOT, timeout=120, check=True, **env):
        args = ["-c", args] if isinstance(args, str) else [str(a) for a in args]
        done = subprocess.run([sys.executable, *args], cwd=cwd, timeout=timeout, capture_output=True, text=True,
                              stdin=subprocess.DEVNULL, env={**os.environ, **env})
        assert done.returncode == 0 or not check, f"exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        return done
    return run
