"""One list of traps for every implementation of the two kernels (design: kernels.md), and an oracle that knows nothing of pages.

A case describes a batch. `build` lays it out: a pool full of NaN, scattered pages, keys and queries as slices of one fused qkv
tensor. `expected` computes the answer from the logical keys in float64. `check` runs a module's two functions and compares."""
import math
import random
from dataclasses import dataclass, replace

import torch

UNTOUCHED = 123.0  # what `out` holds before the call, where nobody should write
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass(frozen=True)
class Case:
    name: str
    heads: tuple = (4, 2)  # query heads, key heads
    head_dim: int = 64
    block_size: int = 16
    query_lens: tuple = (1, 1, 7, 20)
    seq_lens: tuple = (40, 17, 7, 33)
    window: int = 0
    softcap: float = 0.0
    spread: float = 1.0  # factor on the queries: 1e3 and more drives scores to +-1e4
    table_slack: int = 2  # unused columns behind the longest row; they hold -1
    pad_rows: int = 0  # rows of q behind the last request
    skip_slots: int = 0  # every n-th token is stored by a second call; the first has -1 in its place
    dtype: torch.dtype = torch.float32
    scales: tuple | None = None  # (k_scale, v_scale) of an fp8 pool


CASES = [
    Case("mixed batch"),
    Case("decode only", (8, 2), 64, 16, (1,) * 4, (17, 64, 129, 300)),
    Case("one token of context", query_lens=(1, 1), seq_lens=(1, 2)),
    Case("window 3 over a 20-token query: fully masked tiles", (2, 1), 32, 16, (20, 20), (20, 45), window=3),
    Case("pages that slid out of the window", (4, 2), 64, 16, (1, 5, 1), (200, 120, 33), window=40),
    Case("window wider than the context", window=500),
    Case("window 1: every query sees itself", window=1),
    Case("exact-width block table, the last row longest", query_lens=(1, 3, 9), seq_lens=(5, 18, 48), table_slack=0),
    Case("padding requests without and with a row", query_lens=(3, 0, 1, 1, 0), seq_lens=(21, 0, 30, 0, 0), pad_rows=3),
    Case("padding requests with a window", query_lens=(3, 1, 1), seq_lens=(21, 30, 0), window=4, pad_rows=1),
    Case("only padding", query_lens=(1, 1), seq_lens=(0, 0), pad_rows=2),
    Case("slot -1 in the middle", skip_slots=3, pad_rows=4),
    Case("block size 1", block_size=1, query_lens=(1, 6), seq_lens=(19, 9)),
    Case("block size 8", block_size=8),
    Case("block size 24", block_size=24, query_lens=(1, 30), seq_lens=(100, 75)),
    Case("block size 48", block_size=48, query_lens=(1, 30), seq_lens=(100, 75)),
    Case("block size 256", block_size=256, query_lens=(1, 30), seq_lens=(300, 75)),
    Case("head dim 16", (4, 2), 16),
    Case("head dim 36, group 3", (6, 2), 36),
    Case("head dim 40", (4, 2), 40),
    Case("head dim 80", (2, 2), 80),
    Case("head dim 96, window", (4, 2), 96, window=9),
    Case("head dim 128, soft cap", (2, 1), 128, softcap=30.0),
    Case("group 1", (2, 2), 32),
    Case("group 3, query longer than a tile", (9, 3), 64, query_lens=(33, 1, 12), seq_lens=(70, 29, 12)),
    Case("group 5", (5, 1), 64),
    Case("group 7", (14, 2), 64, query_lens=(1, 9), seq_lens=(50, 9)),
    Case("group 24", (24, 1), 64, query_lens=(1, 5), seq_lens=(50, 25)),
    Case("soft cap 50, scores around 1e4", softcap=50.0, spread=1e4),
    Case("soft cap 1e4, small scores", softcap=1e4),
    Case("soft cap 1e4, scores around 1e4", softcap=1e4, spread=1e3),
    Case("no soft cap, scores around 1e3", spread=300.0),
]
HALF = [replace(CASES[0], name=f"{n} {str(dt)[6:]}", dtype=dt, **kw) for dt in (torch.float16, torch.bfloat16) for n, kw in (
    ("mixed", {}), ("window", dict(window=9, head_dim=96)), ("soft cap", dict(softcap=30.0, head_dim=80, heads=(3, 1))),
    ("decode", dict(query_lens=(1, 1), seq_lens=(70, 33))))]
FP8 = [replace(CASES[0], name=f"fp8 {n}", **dict(dict(dtype=torch.bfloat16), **kw)) for n, kw in (
    ("mixed", dict(scales=(0.02, 0.7))), ("scales of 1", dict(scales=(1.0, 1.0))), ("decode", dict(query_lens=(1, 1), seq_lens=(70, 33), scales=(3.0, 0.01))),
    ("out of range", dict(scales=(0.004, 0.003))), ("window, head dim 96, float16", dict(window=9, head_dim=96, dtype=torch.float16, scales=(0.1, 0.2))),
    ("soft cap, group 3, float32", dict(softcap=30.0, head_dim=80, heads=(3, 1), dtype=torch.float32, scales=(0.5, 0.25))),
    ("padding requests", dict(query_lens=(3, 0, 1, 1, 0), seq_lens=(21, 0, 30, 0, 0), pad_rows=3, skip_slots=3, scales=(0.1, 0.2))))]


@dataclass
class Batch:
    key: torch.Tensor
    value: torch.Tensor
    slots: torch.Tensor
    pool: torch.Tensor  # [2, blocks, block_size, heads, head_dim]
    want_pool: torch.Tensor
    q: torch.Tensor
    starts: torch.Tensor
    seq_lens: torch.Tensor
    table: torch.Tensor


def build(case: Case, seed: int = 0, pool_dtype=None) -> Batch:
    "Lay a case out; every number that nobody may read is NaN, every table entry that nobody may read is -1"
    gen, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    (hq, hk), d, bs = case.heads, case.head_dim, case.block_size
    pages = [math.ceil(n / bs) for n in case.seq_lens]
    ids = rng.sample(range(sum(pages) + 2), sum(pages) + 2) + [sum(pages) + 2]  # the pool's last page is in use: nothing lies behind it
    table = torch.full((len(pages), max(1, max(pages)) + case.table_slack), -1, dtype=torch.int32)
    rows = []  # (request, position) of every stored token
    for s, (n, length) in enumerate(zip(case.query_lens, case.seq_lens)):
        oldest = max(0, length - n - case.window + 1) if case.window else 0
        for page in range(oldest // bs, pages[s]): table[s, page] = ids.pop()  # pages wholly out of the window stay -1
        rows += [(s, p) for p in range(oldest, length)]
    total, nq = len(rows), sum(case.query_lens)
    fused = torch.randn(total + 3, (hq + 2 * hk) * d, generator=gen).to(case.dtype)  # 3 rows more than slots, as in a padded batch
    key, value = (fused[:, (hq + i * hk) * d:(hq + (i + 1) * hk) * d].view(-1, hk, d) for i in (0, 1))
    qkv = torch.randn(nq + case.pad_rows, (hq + 2 * hk) * d, generator=gen)
    q = (qkv[:, :hq * d] * case.spread).to(case.dtype) if case.spread != 1 else qkv.to(case.dtype)[:, :hq * d]
    slots = torch.tensor([int(table[s, p // bs]) * bs + p % bs for s, p in rows], dtype=torch.int64)
    pool = torch.full((2, sum(pages) + 3, bs, hk, d), float("nan"), dtype=torch.float8_e4m3fn if case.scales else pool_dtype or case.dtype)
    want = pool.clone()
    for i, x in enumerate((key, value)):
        if case.scales: x = (x.float() / case.scales[i]).clamp(-448, 448)
        want[i].view(-1, hk, d)[slots] = x[:total].to(want.dtype)
    starts = torch.tensor([0, *torch.tensor(case.query_lens).cumsum(0).tolist()], dtype=torch.int32)
    return Batch(key, value, slots, pool, want, q.view(-1, hq, d), starts, torch.tensor(case.seq_lens, dtype=torch.int32), table)


def expected(case: Case, b: Batch, scale: float) -> torch.Tensor:
    "Dense attention in float64 over the logical keys, row by row; UNTOUCHED in rows that belong to no request"
    out = torch.full(b.q.shape, UNTOUCHED, dtype=torch.float64)
    bs, group = case.block_size, case.heads[0] // case.heads[1]
    for s, (n, length) in enumerate(zip(case.query_lens, case.seq_lens)):
        for i in range(n):
            row, pos = int(b.starts[s]) + i, length - n + i
            first = max(0, pos - case.window + 1) if case.window else 0
            seen = [int(b.table[s, p // bs]) * bs + p % bs for p in range(first, pos + 1)]
            if not seen:
                out[row] = 0
                continue
            k, v = (x.flatten(0, 1)[seen].double().repeat_interleave(group, 1) * factor for x, factor in zip(b.want_pool, case.scales or (1, 1)))
            score = torch.einsum("hd,mhd->hm", b.q[row].double(), k) * scale
            if case.softcap: score = case.softcap * torch.tanh(score / case.softcap)
            out[row] = torch.einsum("hm,mhd->hd", score.softmax(-1), v)
    return out


def write(module, case: Case, b: Batch):
    "Store the batch with the module's kernel; with `skip_slots` in two calls, each leaving -1 where the other writes"
    keys, values = b.pool.unbind(0)
    fp8 = ("fp8", *case.scales) if case.scales else ()
    if not case.skip_slots: return module.reshape_and_cache_flash(b.key, b.value, keys, values, b.slots, *fp8)
    later = torch.arange(len(b.slots)) % case.skip_slots == 0
    for part in (~later, later): module.reshape_and_cache_flash(b.key, b.value, keys, values, b.slots.where(part, -1), *fp8)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    "Equal, NaN counting as equal to itself"
    a, b = (x.float() if x.dtype == torch.float8_e4m3fn else x for x in (a, b))
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


def check(module, case: Case, attention=None, pool_dtype=None, seed: int = 0) -> float:
    "Run a case through `module` (reading with `attention` if given); returns the largest error. The seed is in the message of every failure"
    b = build(case, seed, pool_dtype)
    where = f"{case.name!r} (seed {seed})"
    write(module, case, b)
    assert same_bits(b.pool, b.want_pool), f"{where}: the pool is not what the slot map says"
    out = torch.full_like(b.q, UNTOUCHED)
    scale = case.head_dim ** -0.5
    (attention or module.unified_attention)(b.q, *b.pool.unbind(0), out, b.starts, max(case.query_lens), b.seq_lens, max(case.seq_lens), scale,
                                            window_size=case.window, block_table=b.table, softcap=case.softcap,
                                            **(dict(zip(("k_scale", "v_scale"), case.scales)) if case.scales else {}))
    assert same_bits(b.pool, b.want_pool), f"{where}: reading changed the pool"
    want = expected(case, b, scale)
    assert torch.equal(out[b.starts[-1]:], torch.full_like(out[b.starts[-1]:], UNTOUCHED)), f"{where}: padding rows were written"
    assert out.isfinite().all(), f"{where}: {int((~out.isfinite()).sum())} numbers are not finite"
    error = (out.double() - want).abs().max().item()
    # a score is exact to about 2**-22 of its terms' size, and an error in a score is a relative error of its weight
    size = max(1.0, min(case.spread, case.softcap or case.spread) if case.spread > 1 else (case.softcap > 1e3) * 10.0)
    assert error <= TOLERANCE[case.dtype] * size, f"{where}: error {error:.2e}"
    return error
