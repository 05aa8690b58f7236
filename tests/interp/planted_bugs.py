"""Plant one bug at a time into the Triton kernels and see that the cases notice. Run by tests/test_kernels_interp.py with TRITON_INTERPRET=1."""
import importlib.util
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
import triton_tools as tools
from attention_cases import CASES, check

SOURCE = (Path(__file__).resolve().parents[2] / "kernels/paged_attention.py").read_text(encoding="utf-8").replace("from .reference", "from litevllm.kernels.reference")

BUGS = [  # what is wrong then, the line as it is, the line with the bug, the check that must notice
    ("slot -1 is written", "    if slot < 0:", "    if slot < -1:", "slot -1"),
    ("the newest key is not seen", "n[None, :] <= pos[:, None]", "n[None, :] < pos[:, None]", "window 3"),
    ("the next key is seen too", "n[None, :] <= pos[:, None]", "n[None, :] <= pos[:, None] + 1", "group 3"),
    ("the window is one too wide", "pos[:, None] - n[None, :] < WINDOW", "pos[:, None] - n[None, :] <= WINDOW", "window 3"),
    ("pages behind the window are read", "live = (n >= oldest) & (n < end)", "live = n < end", "pages that slid"),
    ("the table is read behind its end", "live = (n >= oldest) & (n < end)", "live = n >= oldest", "exact-width"),
    ("a fully masked tile gives inf - inf", 'base = tl.where(m_new == float("-inf"), 0.0, m_new)', "base = m_new", "window 3"),
    ("the accumulator is not rescaled", "acc * shrink[:, None], input", "acc, input", "group 3"),
    ("the sum is not rescaled", "l * shrink + tl.sum(weight, 1)", "l + tl.sum(weight, 1)", "group 3"),
    ("spare rows of a group of 3 are written", "(t < query_len) & (i < BLOCK_Q * GROUP)", "(t < query_len)", "group 3"),
    ("the neighbour's rows are written", "(t < query_len) & (i < BLOCK_Q * GROUP)", "(i < BLOCK_Q * GROUP)", "group 3"),
    ("all key heads serve the first group", "kv_head * GROUP + i % GROUP", "i % GROUP", "group 3"),
    ("a tile goes to the request before its own", "tl.load(start_ptr + mid) // BLOCK_Q + mid <= tile",
     "tl.load(start_ptr + mid) // BLOCK_Q + mid < tile", "group 3"),
    ("queries sit one place too early", "context = seq_len - query_len", "context = seq_len - query_len - 1", "exact-width"),
    ("page size taken for a power of two", "offset = n % BLOCK_SIZE", "offset = n & (BLOCK_SIZE - 1)", "block size 24"),
    ("key columns behind the head are read", "mask=live[None, :] & head_mask[:, None]", "mask=live[None, :]", "head dim 40"),
    ("value columns behind the head are read", "mask=live[:, None] & head_mask[None, :]", "mask=live[:, None]", "head dim 40"),
    ("splits overlap", "end = tl.minimum(end, start + share)", "end = end", "padding requests without"),
    ("splits are joined without their weights", "acc * weight[:, None], 0)", "acc, 0)", "padding requests without"),
    ("padding rows get an answer", "    if token >= tl.load(start_ptr + num_seqs):", "    if token < 0:", "padding requests without"),
    ("an empty row divides by zero", "acc = acc / tl.where(l > 0, l, 1.0)[:, None]", "acc = acc / l[:, None]", "padding requests with a"),
    ("the soft cap does not bend", "score = cap * tanh(score)", "score = cap * score", "soft cap 50"),
    ("tanh overflows", "t = tl.exp2(tl.abs(x) *", "t = tl.exp2(x *", "soft cap 50"),
    ("page * stride in 32 bits", "other=0).to(tl.int64)  #", "other=0)  #", "big pool"),
]


def named(start): return next(c for c in CASES if c.name.startswith(start))


def big_pool(module):
    "Two tokens in a page beyond 2**31 elements"
    heads, dim, block = 2, 64, 16
    keys, values = (torch.empty(2**31 // (block * heads * dim) + 8, block, heads, dim, dtype=torch.float16) for _ in range(2))
    page = len(keys) - 1
    k, v = torch.ones(2, 2, heads, dim).half()
    module.reshape_and_cache_flash(k, v, keys, values, torch.tensor([page * block, page * block + 1]))
    out = torch.zeros(1, 2, dim).half()
    module.unified_attention(out + 1, keys, values, out, torch.tensor([0, 1]).int(), 1, torch.tensor([2]).int(), 2, 0.1,
                             block_table=torch.tensor([[page]]).int())
    assert (out == 1).all()


SMALL = {"window 3": (16, 16, 4, 2, 1), "padding requests without": (16, 16, 4, 2, 4), "group 3": (16, 16, 4, 2, 1), "pages that slid": (16, 64, 4, 2, 1)}


def run(module, name):
    "One check, by the start of the case's name; raises if the module fails it"
    if name == "big pool": return big_pool(module)
    tiles = module.Tiles(*SMALL.get(name, (16, 32, 4, 2, 1)))
    case = replace(named(name), query_lens=(12, 1, 7), seq_lens=(40, 29, 7)) if name == "group 3" else named(name)
    check(module, case, lambda q, k, v, out, starts, max_q, lens, max_k, scale, window_size, block_table, softcap: module.launch_attention(
        tiles, q, k, v, out, starts, lens, scale, window_size, block_table, softcap))


def load(source, folder, name):
    "A module from source text; the interpreter wants to read it from a file"
    path = Path(folder) / f"{name}.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main():
    tools.install()
    with tempfile.TemporaryDirectory() as folder:
        sound = load(SOURCE, folder, "sound")
        for name in dict.fromkeys(name for *_, name in BUGS): run(sound, name)
        missed = []
        for n, (what, line, bug, name) in enumerate(BUGS):
            assert line in SOURCE, f"planted_bugs.py is out of date: {line!r} is not in the kernels"
            began = time.perf_counter()
            try: run(load(SOURCE.replace(line, bug, 1), folder, f"bug{n}"), name)
            except Exception as e: print(f"found   {what}: {type(e).__name__} ({time.perf_counter() - began:.1f} s)", flush=True)
            else:
                missed.append(what)
                print(f"MISSED  {what}", flush=True)
    print(f"{len(BUGS) - len(missed)} of {len(BUGS)} planted bugs found")
    return len(missed)


if __name__ == "__main__": sys.exit(main())
