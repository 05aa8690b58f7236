"""Bugs for the attention and cache kernels, and the cases that must notice. Run by tests/test_kernels_interp.py with TRITON_INTERPRET=1."""
from dataclasses import replace

import torch
import triton_tools as tools
from attention_cases import CASES, FP8, check
from planting import plant

tools.install()

BUGS = [  # what is wrong then, the line as it is, the line with the bug, the check that must notice
    ("slot -1 is written", "    if slot < 0:", "    if slot < -1:", "slot -1"),
    ("the newest key is not seen", "(n[None, :] <= pos[:, None])", "(n[None, :] < pos[:, None])", "window 3"),
    ("the next key is seen too", "(n[None, :] <= pos[:, None])", "(n[None, :] <= pos[:, None] + 1)", "group 3"),
    ("the window is one too wide", "pos[:, None] - n[None, :] < WINDOW", "pos[:, None] - n[None, :] <= WINDOW", "window 3"),
    ("pages behind the window are read", "live = (n >= oldest) & (n < end)", "live = n < end", "pages that slid"),
    ("the table is read behind its end", "mask=i * BLOCK_SIZE < end, other", "mask=i >= 0, other", "exact-width"),
    ("page numbers of the tile before", "        pages = ahead", "        pages = pages", "mixed batch"),
    ("page numbers of the tile after the next", "look_up(table_row, n0 + BLOCK_N,", "look_up(table_row, n0 + 2 * BLOCK_N,", "mixed batch"),
    ("the diagonal tile counts as full", "masked = tl.minimum(first + 1, end)", "masked = tl.minimum(first + BLOCK_N, end)", "group 3"),
    ("a full tile may pass the end of its split", "masked = tl.minimum(first + 1, end)", "masked = first + 1", "padding requests without"),
    ("tiles at the window's edge count as full", "full = tl.maximum(end - WINDOW, 0)", "full = tl.maximum(first - WINDOW, 0)", "window wider than a tile"),
    ("no guard where a row has seen no key", 'base = tl.where(m_new == float("-inf"), 0.0, m_new)', "base = m_new", "window 3"),
    ("the accumulator is not rescaled", "acc * shrink[:, None], input", "acc, input", "group 3"),
    ("the sum is not rescaled", "l * shrink + tl.sum(weight, 1)", "l + tl.sum(weight, 1)", "group 3"),
    ("spare rows of a group of 3 are written", "(t < query_len) & (i < BLOCK_Q * GROUP)", "(t < query_len)", "group 3"),
    ("the neighbour's rows are written", "(t < query_len) & (i < BLOCK_Q * GROUP)", "(i < BLOCK_Q * GROUP)", "group 3"),
    ("all key heads serve the first group", "kv_head * GROUP + i % GROUP", "i % GROUP", "group 3"),
    ("a tile goes to the request before its own", "tl.load(start_ptr + mid) // BLOCK_Q + mid <= tile",
     "tl.load(start_ptr + mid) // BLOCK_Q + mid < tile", "group 3"),
    ("queries sit one place too early", "context = seq_len - query_len", "context = seq_len - query_len - 1", "exact-width"),
    ("page size taken for a power of two", "n % BLOCK_SIZE * k_stride_s", "(n & (BLOCK_SIZE - 1)) * k_stride_s", "block size 24"),
    ("key columns behind the head are read", "mask=live[None, :] & (d < HEAD_DIM)[:, None]", "mask=live[None, :]", "head dim 40"),
    ("value columns behind the head are read", "mask=live[:, None] & (d < HEAD_DIM)[None, :]", "mask=live[:, None]", "head dim 40, one tile"),
    ("key columns of full tiles behind the head are read", "k, v = tl.load(k_at, mask=(d < HEAD_DIM)[:, None], other=0.0)", "k, v = tl.load(k_at)",
     "head dim 40"),
    ("splits overlap", "end = tl.minimum(end, start + share)", "end = end", "padding requests without"),
    ("splits are joined without their weights", "acc * weight[:, None], 0)", "acc, 0)", "padding requests without"),
    ("what a split without keys did not store is read", "mask=(l > 0)[:, None] & (d < HEAD_DIM)[None, :]", "mask=(d < HEAD_DIM)[None, :]", "splits over NaN"),
    ("padding rows get an answer", "    if token >= tl.load(start_ptr + num_seqs):", "    if token < 0:", "padding requests without"),
    ("an empty row divides by zero", "(v_scale / tl.where(l > 0, l, 1.0))", "(v_scale / l)", "padding requests with a"),
    ("the soft cap does not bend", "score = cap * tanh(score)", "score = cap * score", "soft cap 50"),
    ("tanh overflows", "t = tl.exp2(tl.abs(x) *", "t = tl.exp2(x *", "soft cap 50"),
    ("page * stride in 32 bits", "mask=i * BLOCK_SIZE < end, other=0).to(tl.int64)", "mask=i * BLOCK_SIZE < end, other=0)", "big pool"),
    ("fp8 keys are stored unscaled", "as_stored(key, k_scale,", "as_stored(key, 1.0,", "fp8 mixed"),
    ("fp8 values get the keys' scale", "as_stored(value, v_scale,", "as_stored(value, k_scale,", "fp8 mixed"),
    ("the scale multiplies on the way in", "tl.div_rn(x.to(tl.float32), scale)", "(x.to(tl.float32) * scale)", "fp8 mixed"),
    ("clamped at another format's limit", ", -448.0, 448.0,", ", -240.0, 240.0,", "fp8 out of range"),
    ("fp8 keys are read unscaled", "softmax_scale * k_scale, math", "softmax_scale, math", "fp8 mixed"),
    ("fp8 values are read unscaled", "acc = acc * (v_scale /", "acc = acc * (1.0 /", "fp8 mixed"),
    ("fp8 values are read unscaled from splits", "* (v_scale / tl.where(total", "* (1.0 / tl.where(total", "fp8 decode"),
    ("a block's tail is not cleared", "mask=i < size)", "mask=i < size - CHUNK)", "zeroing"),
    ("only keys are cleared", "tl.program_id(1) * 3", "tl.program_id(1) // 2 * 6", "zeroing"),
]


def named(start):
    if start == "window wider than a tile": return replace(CASES[0], heads=(2, 1), query_lens=(20, 1), seq_lens=(100, 90), window=40)
    start = start.removesuffix(", one tile")
    return next(c for c in CASES + FP8 if c.name.startswith(start))


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


def zeroing(module):
    pools = [torch.ones(2, 3, 16, heads, 80) for heads in (2, 1)]
    with tools.reachable(*pools): module.zero_blocks(pools, [2])
    assert all((p[:, 2] == 0).all() and (p[:, :2] == 1).all() for p in pools)


def splits_over_nan(module):
    "Memory that nobody has written is not always zero: here fresh tensors are full of NaN"
    empty = torch.empty
    torch.empty = lambda *shape, **kw: empty(*shape, **kw).fill_(float("nan"))
    try: check(module, replace(CASES[1], query_lens=(1, 1), seq_lens=(17, 40)), with_tiles(module, (16, 16, 4, 2, 16)))
    finally: torch.empty = empty


OTHER = {"big pool": big_pool, "zeroing": zeroing, "splits over NaN": splits_over_nan}
SMALL = {"fp8 decode": (16, 16, 4, 2, 4), "mixed batch": (16, 16, 4, 2, 1), "window wider than a tile": (16, 16, 4, 2, 1),
         "exact-width": (16, 64, 4, 2, 1), "head dim 40": (16, 16, 4, 2, 1), "head dim 40, one tile": (16, 64, 4, 2, 1),
         "window 3": (16, 16, 4, 2, 1), "padding requests without": (16, 16, 4, 2, 4), "group 3": (16, 16, 4, 2, 1), "pages that slid": (16, 64, 4, 2, 1)}


def with_tiles(module, tiles):
    return lambda q, k, v, out, starts, max_q, lens, max_k, scale, window_size, block_table, softcap, **scales: module.launch_attention(
        module.Tiles(*tiles), q, k, v, out, starts, lens, scale, window_size, block_table, softcap, **scales)


def run(module, name):
    "One check, by the start of the case's name; raises if the module fails it"
    if name in OTHER: return OTHER[name](module)
    case = replace(named(name), query_lens=(12, 1, 7), seq_lens=(40, 29, 7)) if name == "group 3" else named(name)
    check(module, case, with_tiles(module, SMALL.get(name, (16, 32, 4, 2, 1))))


test_as_they_are, test_planted = plant(("kv_write", "flash_attention", "paged_attention"), BUGS, run)
