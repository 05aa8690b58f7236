"""nbdev_test with what it lacks: a process for each notebook, a time limit, a look at what really ran and at what it left behind.

    python tests/run_notebooks.py [--limit SECONDS] [--workers N] [NOTEBOOK ...]

nbdev_test runs a notebook cell by cell and exits 1 if one fails. A notebook that hangs hangs it for ever, "no files were eligible" is exit
code 0, and its workers run several notebooks each in one process, where the second finds what the first imported and registered. Cells marked
`#| gpu` or `#| slow` are not run (tst_flags in settings.ini). Exit code 0 only if every notebook passed in time and ended what it started."""
import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARK = "LITEVLLM_NOTEBOOK_RUN"
COMMAND = "import sys; from nbdev.test import nbdev_test; nbdev_test(sys.argv[1], n_workers=0, do_print=True)"
QUIET = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "MPLBACKEND": "agg"}


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
        time.sleep(0.2)


def run_one(notebook: Path, limit: float, root: Path, patience: float) -> tuple[str, str, float]:
    "(what is wrong with it or \"\", its output, seconds) of one notebook; all that it started is gone afterwards."
    env = {**QUIET, **os.environ, MARK: uuid.uuid4().hex}
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:     # no pipe: a process left behind would hold it open
        child = subprocess.Popen([sys.executable, "-c", COMMAND, str(notebook)], cwd=root, env=env, stdin=subprocess.DEVNULL, stdout=output,
                                 stderr=subprocess.STDOUT, start_new_session=True)
        with contextlib.suppress(subprocess.TimeoutExpired): child.wait(limit)
        late = child.poll() is None
        left = left_behind(env[MARK], 0 if late else patience)
        for pid in left:
            with contextlib.suppress(ProcessLookupError): os.kill(pid, signal.SIGKILL)
        child.wait()
        output.seek(0)
        text = output.read()
    seconds = time.monotonic() - started
    if late: return f"not done after {limit:.0f} s", text, seconds
    if child.returncode: return f"failed with exit code {child.returncode}", text, seconds
    if f"- Completed {notebook}" not in text: return "was not run", text, seconds
    return f"left processes behind: {left}" if left else "", text, seconds


def run(notebooks: list[Path], limit: float = 180, workers: int = 2, root: Path = ROOT, patience: float = 8.0) -> int:
    "0 if every notebook passed, each within `limit` seconds; else prints what each of the others said and returns 1."
    if not notebooks:
        print(f"no notebooks in {root/'nbs'}")
        return 1
    started = time.monotonic()
    with ThreadPoolExecutor(workers) as pool: results = list(pool.map(lambda nb: run_one(nb.resolve(), limit, root, patience), notebooks))
    return int(report(notebooks, results, time.monotonic() - started))


def report(notebooks: list[Path], results: list[tuple[str, str, float]], seconds: float) -> bool:
    "Print what each notebook said that did not pass, and a line on all; True if there was one, or no notebook at all."
    bad = [(nb, wrong, text) for nb, (wrong, text, _) in zip(notebooks, results) if wrong]
    for nb, wrong, text in bad: print(f"{text[-6000:]}\n{nb.name} {wrong}\n{'='*80}")
    slowest = sorted(zip((s for *_, s in results), (nb.name for nb in notebooks)), reverse=True)[:5]
    print(f"notebooks: {len(notebooks) - len(bad)} passed, {len(bad)} failed in {seconds:.0f} s (slowest: "
          f"{', '.join(f'{name} {s:.0f} s' for s, name in slowest)})", flush=True)
    return bool(bad) or not notebooks


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)   # a shell's background job ignores it, and so would the notebooks that try Ctrl-C
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path, default=sorted((ROOT/"nbs").glob("*.ipynb")))
    parser.add_argument("--limit", type=float, default=180, help="seconds for each notebook")
    parser.add_argument("--workers", type=int, default=min(os.cpu_count() or 1, 4))
    args = parser.parse_args()
    sys.exit(run(args.notebooks, args.limit, args.workers))
