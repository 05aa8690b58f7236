"""Everything that must pass, on all cores until the end: pytest in as many processes as there are workers, and the notebooks wherever one is free.

    python tests/run_all.py [--workers N]

The files of tests are dealt out, and each process runs its own in order: tests that count processes, wait for signals or take time are alone in theirs.
Exit code 0 only if every file and every notebook passed; the last line sums up what pytest said in its own words."""
import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from run_notebooks import ROOT, report, run_one

WORDS = "failed", "passed", "skipped", "deselected", "xfailed", "xpassed", "warning", "error"   # in pytest's order; the last two have a plural


def deal(files: list[Path], hands: int) -> list[list[Path]]:
    "The files in `hands` parts of about the same length, those next to each other in different ones."
    return [part for part in (files[i::hands] for i in range(hands)) if part]


def run_pytest(files: list[Path], root: Path) -> tuple[int, str]:
    "(exit code, output) of pytest on the files, in a process of its own."
    with tempfile.TemporaryFile("w+") as output:     # no pipe: a process left behind would hold it open
        code = subprocess.call([sys.executable, "-m", "pytest", "-q", *map(str, files)], cwd=root, stdin=subprocess.DEVNULL, stdout=output,
                               stderr=subprocess.STDOUT)
        output.seek(0)
        return code, output.read()


def counts(text: str) -> Counter:
    "What the closing line of pytest counts."
    last = next((line for line in reversed(text.splitlines()) if re.search(r" in \d+(\.\d+)?s\b", line)), "")
    return Counter({word.removesuffix("s"): int(n) for n, word in re.findall(r"(\d+) (\w+)", last.partition(" in ")[0])})


def closing_line(total: Counter, seconds: float) -> str:
    "One line as pytest writes it."
    said = ", ".join(f"{total[word]} {word}{'s' * (word in WORDS[-2:] and total[word] > 1)}" for word in WORDS if total[word])
    return f"{said or 'no tests ran'} in {seconds:.2f}s ({int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02})"


def run(files: list[Path], notebooks: list[Path], workers: int, root: Path = ROOT, limit: float = 180) -> int:
    "0 if all passed; prints what each process said, the notebooks' line, and the closing line."
    started = time.monotonic()
    with ThreadPoolExecutor(workers) as pool:     # first come the tests: a notebook is short, so that the last ones end together
        tests = [pool.submit(run_pytest, part, root) for part in deal(files, workers)]
        pages = [pool.submit(run_one, nb.resolve(), limit, root, 8.0) for nb in notebooks]
        done = [future.result() for future in tests]
        for _, text in done: print(text, flush=True)
        bad = report(notebooks, [future.result() for future in pages], time.monotonic() - started)
    total = sum((counts(text) for _, text in done), Counter())
    print(closing_line(total, time.monotonic() - started), flush=True)
    return int(bad or not done or any(code for code, _ in done))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)   # a shell's background job ignores it, and so would what tries Ctrl-C
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=min(os.cpu_count() or 1, 4))
    subprocess.run([sys.executable, "-c", "import litevllm.kernels.cpu_layer"], cwd=ROOT)   # numba compiles half a minute, once, not in every process at once
    sys.exit(run(sorted((ROOT/"tests").glob("test_*.py")), sorted((ROOT/"nbs").glob("*.ipynb")), parser.parse_args().workers))
