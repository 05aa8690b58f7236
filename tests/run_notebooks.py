"""nbdev_test with what it lacks: a time limit, a look at what it really ran, and at what it left behind.

    python tests/run_notebooks.py [--limit SECONDS] [NOTEBOOK_GLOB]

nbdev_test runs every notebook cell by cell and exits 1 if one fails; a notebook that hangs hangs it for ever, and "no files were eligible"
is exit code 0. Cells marked `#| gpu` or `#| slow` are not run (tst_flags in settings.ini). Exit code 0 only if every notebook passed in time."""
import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARK = "LITEVLLM_NOTEBOOK_RUN"
COMMAND = "from nbdev.test import nbdev_test; nbdev_test({path!r}, n_workers={workers}, timing=True, do_print=True)"


def left_behind(mark: str, patience: float) -> list[int]:
    "Processes that carry `mark` in their environment and are still there after `patience` seconds, sessions of their own included."
    import psutil
    deadline = time.monotonic() + patience
    while True:
        found = []
        for p in psutil.process_iter():
            try:
                if p.pid != os.getpid() and p.environ().get(MARK) == mark and p.status() != psutil.STATUS_ZOMBIE: found.append(p.pid)
            except psutil.Error: pass     # gone meanwhile, or not ours to look into
        if not found or time.monotonic() > deadline: return found
        time.sleep(0.3)


def kill(pids: list[int]):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError): os.kill(pid, signal.SIGKILL)


def run(path: str | None, limit: float, workers: int, root: Path = ROOT, patience: float = 8.0) -> int:
    "0 if all notebooks passed within `limit` seconds and left no process; else says why and returns 1."
    expected = sorted((root/"nbs").glob(Path(path).name if path else "*.ipynb"))
    if not expected: return print(f"no notebook matches {path or 'nbs/*.ipynb'}") or 1
    env = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "MPLBACKEND": "agg", **os.environ,
           MARK: uuid.uuid4().hex}
    started = time.monotonic()
    output = tempfile.TemporaryFile("w+")     # no pipe: a process left behind would hold it open
    child = subprocess.Popen([sys.executable, "-c", COMMAND.format(path=path, workers=workers)], cwd=root, env=env,
                             stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    with contextlib.suppress(subprocess.TimeoutExpired): child.wait(limit)
    late = child.poll() is None
    left = left_behind(env[MARK], 0 if late else patience)
    kill(left)
    child.wait()
    output.seek(0)
    text = output.read()
    if late:
        running = sorted(set(re.findall(r"^Starting (.*)$", text, re.M)) - set(re.findall(r"^- Completed (.*)$", text, re.M)))
        print(text[-8000:])
        return print(f"notebooks: not done after {limit:.0f} s; still running: {', '.join(map(os.path.basename, running)) or 'nothing'}") or 1
    completed = {Path(p).name for p in re.findall(r"^- Completed (.*)$", text, re.M)}
    missed = [p.name for p in expected if p.name not in completed]
    if child.returncode or missed or left:
        print(text[-8000:])
        print(f"notebooks: exit code {child.returncode}, never completed: {missed or 'none'}, processes left behind: {left or 'none'}")
        return 1
    slowest = re.findall(r"^(\S+\.ipynb): (\d+) secs$", text, re.M)[:5]
    print(f"notebooks: {len(completed)} passed in {time.monotonic() - started:.0f} s (slowest: "
          f"{', '.join(f'{n} {s} s' for n, s in slowest)})", flush=True)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?")
    parser.add_argument("--limit", type=float, default=600)
    parser.add_argument("--workers", type=int, default=min(os.cpu_count() or 1, 4))
    args = parser.parse_args()
    sys.exit(run(args.path, args.limit, args.workers))
