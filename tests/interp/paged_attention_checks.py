"""The Triton kernels in Triton's interpreter, sanitizer and race detector on. Run by tests/test_kernels_interp.py in a process of its own."""
import random
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
import triton_tools as tools
from attention_cases import CASES, FP8, HALF, UNTOUCHED, build, check, same_bits

import litevllm.kernels.paged_attention as triton_kernels
from litevllm.kernels.paged_attention import Tiles, launch_attention

tools.install()


def with_tiles(*tiles):
    "`unified_attention` with these tiles in place of the chosen ones"
    def attention(q, k, v, out, starts, max_q, seq_lens, max_k, scale, window_size, block_table, softcap, **scales):
        launch_attention(Tiles(*tiles), q, k, v, out, starts, seq_lens, scale, window_size, block_table, softcap, **scales)
    return attention


@pytest.mark.parametrize("case", CASES + HALF + FP8, ids=lambda c: c.name)
def test_case_with_the_tiles_it_would_get(case): check(triton_kernels, case)


# tiles so small that a short context has several of them, and splits that find no tile at all
SMALL = [c for c in CASES if c.name.startswith(("mixed", "window 3", "pages that", "exact", "padding", "only", "block size 24", "group 24"))]


@pytest.mark.parametrize("case, splits", [(c, n) for c in SMALL for n in (1, 4)] + [(c, 1) for c in CASES if c.name.startswith("group 3")])
def test_case_with_small_tiles(case, splits):
    check(triton_kernels, case, with_tiles(32 if case.heads[0] == 24 else 16, 16, 4, 2, splits))


@pytest.mark.parametrize("case", [CASES[1], replace(CASES[1], window=50, head_dim=80, dtype=torch.float16)], ids=["plain", "window"])
def test_more_splits_than_tiles(case): check(triton_kernels, case, with_tiles(16, 64, 4, 3, 16))


def test_half_precision_tiles_of_a_prompt():
    "The tiles that a GPU gets for a long prompt in bfloat16 (128 rows), on a short one"
    check(triton_kernels, HALF[4], with_tiles(128, 64, 8, 2, 1))


def test_bfloat16_canary():
    "The interpreter's own bfloat16 is wrong; with the repair it rounds as torch does. If the first assert fails, triton was mended"
    @triton.jit
    def product(a, b, c, N: tl.constexpr):
        i = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
        tl.store(c + i, tl.dot(tl.load(a + i), tl.load(b + i)).to(tl.bfloat16))
    a, b = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    want, got = (a.float() @ b.float()).bfloat16(), [torch.zeros(16, 16, dtype=torch.bfloat16) for _ in range(2)]
    tools.install(bf16=False)
    try: product[(1,)](a, b, got[0], N=16)
    finally: tools.install()
    product[(1,)](a, b, got[1], N=16)
    assert not torch.equal(got[0], want) and torch.equal(got[1], want)


def test_the_sanitizer_and_the_race_detector_bite():
    @triton.jit
    def copy(x, y, first, N: tl.constexpr): tl.store(y + tl.arange(0, N), tl.load(x + first + tl.arange(0, N)))
    pool = torch.zeros(2, 64)
    x, y = pool[0, :32], torch.zeros(16)
    copy[(1,)](x, y, 16, N=16)
    for first in (17, -1, 32):  # inside the storage, but not inside the tensor
        with pytest.raises(tools.OutOfBounds, match="of x"): copy[(1,)](x, y, first, N=16)
    with pytest.raises(tools.OutOfBounds, match="store"): copy[(1,)](x, y[:8], 0, N=16)
    with pytest.raises(tools.WriteRace): copy[(2,)](x, y, 0, N=16)


@pytest.mark.parametrize("splits", [1, 4])
def test_the_order_of_programs_does_not_matter(splits):
    case = replace(CASES[0], heads=(6, 2), window=30)
    results = []
    for order in ("given", "reversed", "shuffled"):
        b = build(case)
        out = torch.full_like(b.q, UNTOUCHED)
        with tools.grid_order(order):
            triton_kernels.reshape_and_cache_flash(b.key, b.value, *b.pool.unbind(0), b.slots)
            with_tiles(16, 16, 4, 2, splits)(b.q, *b.pool.unbind(0), out, b.starts, 20, b.seq_lens, 40, 0.125, case.window, b.table, 0.0)
        assert same_bits(b.pool, b.want_pool)
        results.append(out)
    assert all(torch.equal(results[0], r) for r in results[1:])


@pytest.mark.parametrize("splits", [1, 4])
def test_a_request_gets_the_same_bits_alone_and_in_a_batch_of_nine(splits):
    "With the tiles fixed: what is chosen by batch size is the tiles, and nothing else"
    case = replace(CASES[0], heads=(3, 1), query_lens=(1, 9, 1, 12, 1, 2, 1, 7, 1), seq_lens=(70, 9, 1, 30, 33, 40, 16, 17, 50))
    b = build(case)
    def read(q, starts, seq_lens, table):
        out = torch.empty_like(q)
        with_tiles(16, 16, 4, 2, splits)(q, *b.want_pool.unbind(0), out, starts, 20, seq_lens, 40, 0.125, 0, table, 0.0)
        return out
    whole = read(b.q, b.starts, b.seq_lens, b.table)
    for r in range(9):
        part = slice(b.starts[r], b.starts[r + 1])
        alone = read(b.q[part], torch.tensor([0, case.query_lens[r]], dtype=torch.int32), b.seq_lens[r:r + 1], b.table[r:r + 1])
        assert torch.equal(whole[part], alone), r


def test_slot_beyond_two_to_the_31_elements():
    "Pools of 4 GiB of address space each; a 32-bit offset would wrap into another tensor or nowhere"
    heads, dim, block = 2, 64, 16
    blocks = 2**31 // (block * heads * dim) + 8
    keys, values = (torch.empty(blocks, block, heads, dim, dtype=torch.float16) for _ in range(2))
    table = torch.tensor([[blocks - 1, blocks - 3]], dtype=torch.int32)
    pos = torch.arange(20)
    slots = table[0].long()[pos // block] * block + pos % block
    gen = torch.Generator().manual_seed(0)
    k, v, q = (torch.randn(n, h, dim, generator=gen).half() for n, h in ((20, heads), (20, heads), (2, 4)))
    starts, seq_lens = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
    small, got, want = torch.zeros(2, 2, block, heads, dim, dtype=torch.float16), torch.empty_like(q), torch.empty_like(q)
    for pool, slot, blocks_of, out in (((keys, values), slots, table, got), (small.unbind(0), pos, torch.tensor([[0, 1]], dtype=torch.int32), want)):
        triton_kernels.reshape_and_cache_flash(k, v, *pool, slot)
        triton_kernels.unified_attention(q, *pool, out, starts, 2, seq_lens, 20, 0.125, block_table=blocks_of)
    assert torch.equal(got, want) and got.isfinite().all()


def test_decode_reads_each_live_key_once():
    "The bytes loaded are at most 1.10 x those of queries, live keys, live values and one table entry a key"
    case = replace(CASES[1], heads=(4, 1), head_dim=128, dtype=torch.float16, seq_lens=(130, 257, 64, 400))
    b = build(case)
    out = torch.empty_like(b.q)
    with tools.metered() as meter:
        with_tiles(16, 64, 4, 3, 1)(b.q, *b.want_pool.unbind(0), out, b.starts, 1, b.seq_lens, 400, 0.1, 0, b.table, 0.0)
    tokens = sum(case.seq_lens)
    ideal = 2 * (2 * tokens * 128 + b.q.numel())
    assert ideal <= meter["loaded"] <= 1.10 * ideal, meter
    assert meter["stored"] == 2 * out.numel()


def test_padding_slots_write_nothing():
    b = build(CASES[0])
    triton_kernels.reshape_and_cache_flash(b.key, b.value, *b.pool.unbind(0), torch.full((5,), -1))
    triton_kernels.reshape_and_cache_flash(b.key, b.value, *b.pool.unbind(0), torch.empty(0, dtype=torch.int64))
    assert b.pool.isnan().all()


def test_scales_are_inert_and_fp8_is_refused_by_name():
    b, c = build(HALF[4]), build(HALF[4])
    triton_kernels.reshape_and_cache_flash(b.key, b.value, *b.pool.unbind(0), b.slots, "auto", 0.5, 3.0)
    triton_kernels.reshape_and_cache_flash(c.key, c.value, *c.pool.unbind(0), c.slots)
    assert same_bits(b.pool, c.pool)
    with pytest.raises(ValueError, match="fp8"): triton_kernels.reshape_and_cache_flash(b.key, b.value, *b.pool.unbind(0), b.slots, "fp8")


def test_no_tokens(): # an empty batch launches nothing
    b = build(CASES[0])
    triton_kernels.unified_attention(b.q[:0], *b.want_pool.unbind(0), b.q[:0].clone(), torch.zeros(1, dtype=torch.int32), 0,
                                     b.seq_lens[:0], 0, 0.1, block_table=b.table[:0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_older_layout_holds_the_same_numbers(dtype):
    case = replace(CASES[0], dtype=dtype)
    b, x = build(case), 16 // dtype.itemsize
    blocks, block, heads, dim = b.pool.shape[1:]
    keys = torch.full((blocks, heads, dim // x, block, x), float("nan"), dtype=dtype)
    values = torch.full((blocks, heads, dim, block), float("nan"), dtype=dtype)
    triton_kernels.reshape_and_cache(b.key, b.value, keys, values, b.slots.where(torch.arange(len(b.slots)) != 5, -1))
    want = b.want_pool.clone()
    want.view(2, -1, heads, dim)[:, b.slots[5]] = float("nan")
    assert same_bits(keys.permute(0, 3, 1, 2, 4).reshape(want[0].shape), want[0])
    assert same_bits(values.permute(0, 3, 1, 2), want[1])
    with pytest.raises(ValueError): triton_kernels.reshape_and_cache(b.key, b.value, keys[:2], values, b.slots)


def test_random_batches():
    seed = random.SystemRandom().randrange(10**6)
    rng = random.Random(seed)
    print("seed", seed)
    for _ in range(4):
        n = rng.randrange(1, 5)
        lens = [rng.choice((1, 1, rng.randrange(1, 24))) for _ in range(n)]
        group, heads = rng.choice((1, 2, 3, 4)), rng.choice((1, 2))
        case = replace(CASES[0], name=f"random batch of seed {seed}", heads=(group * heads, heads), head_dim=rng.choice((16, 40, 64)),
                       block_size=rng.choice((1, 4, 16, 24)), query_lens=tuple(lens), seq_lens=tuple(q + rng.choice((0, rng.randrange(60))) for q in lens),
                       window=rng.choice((0, 0, rng.randrange(1, 40))), softcap=rng.choice((0.0, 0.0, 20.0)), table_slack=rng.randrange(2))
        check(triton_kernels, case, with_tiles(16, rng.choice((16, 32)), 4, 2, rng.choice((1, 2, 4))), seed=seed)
