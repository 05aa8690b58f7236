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
import litevllm.kernels.reference as reference
from litevllm.kernels.flash_attention import flash_attention
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


FEW_TILES = replace(CASES[1], heads=(2, 1), query_lens=(1, 1), seq_lens=(17, 129))


@pytest.mark.parametrize("case", [FEW_TILES, replace(FEW_TILES, window=50, head_dim=80, dtype=torch.float16)], ids=["plain", "window"])
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
    case = replace(CASES[0], heads=(6, 2), query_lens=(1, 7, 12), seq_lens=(40, 7, 33), window=30)
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


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("name, case", [
    ("bytes of 16 bits", replace(CASES[1], heads=(4, 1), head_dim=128, dtype=torch.float16, seq_lens=(130, 257, 64, 400))),
    ("fp8", replace(CASES[1], heads=(4, 1), head_dim=128, dtype=torch.bfloat16, seq_lens=(130, 257, 64, 400), scales=(0.1, 0.2))),
    ("narrow heads in fp8", replace(CASES[1], heads=(2, 1), head_dim=32, dtype=torch.bfloat16, seq_lens=(130, 300), query_lens=(1, 1), scales=(0.1, 0.2)))])
def test_decode_reads_each_live_key_once(name, case, splits):
    "What is loaded is at most 1.10 x the bytes of queries, live keys and live values; a page's number is loaded once per key head, in the tile before its own"
    b = build(case)
    out = torch.empty_like(b.q)
    heads, group, width = case.heads[1], case.heads[0] // case.heads[1], case.head_dim
    n = triton_kernels.decode_tiles(90, b.q.element_size(), b.pool.element_size(), width, group).block_n
    scales = dict(zip(("k_scale", "v_scale"), case.scales)) if case.scales else {}
    with tools.metered() as meter:
        with_tiles(16, n, 4, 4, splits)(b.q, *b.want_pool.unbind(0), out, b.starts, 1, b.seq_lens, 400, 0.1, 0, b.table, 0.0, **scales)
    tokens, of = sum(case.seq_lens), meter["of"]
    assert of["k_cache_ptr"] == of["v_cache_ptr"] == tokens * heads * width * b.pool.element_size()
    pages = sum(-(-length // case.block_size) for length in case.seq_lens)
    assert of["table_ptr"] <= 4 * heads * pages * (1 if splits == 1 else 2), "page numbers are loaded more than once"
    assert of["q_ptr"] == b.q.nbytes * splits
    ideal = 2 * of["k_cache_ptr"] + b.q.nbytes
    if splits == 1: assert ideal <= meter["loaded"] <= 1.10 * ideal and meter["stored"] == out.nbytes, meter


def test_a_split_without_keys_leaves_no_accumulator():
    "What the splits store is in proportion to the keys that there are, and the reduction reads no more than that"
    case = replace(CASES[1], heads=(4, 1), query_lens=(1,), seq_lens=(40,))
    b = build(case)
    out = torch.empty_like(b.q)
    with tools.metered() as meter: with_tiles(16, 16, 4, 2, 16)(b.q, *b.want_pool.unbind(0), out, b.starts, 1, b.seq_lens, 40, 0.125, 0, b.table, 0.0)
    assert meter["stored"] == 4 * 4 * (3 * case.head_dim + 2 * 16 + case.head_dim)  # 4 heads: 3 accumulators, (m, l) of 16 splits, the answer
    assert meter["of"]["part_ptr"] == 4 * 4 * 3 * case.head_dim


def test_page_numbers_are_loaded_once_a_page():
    "Prefill in tiles of four pages, in tiles within a page, and pages that tiles do not fit: entries of the table loaded by the only program"
    for block_size, n, loads in ((16, 64, 13), (64, 32, 7), (24, 16, 200)):
        case = replace(CASES[0], heads=(1, 1), block_size=block_size, query_lens=(8,), seq_lens=(200,), table_slack=0)
        b = build(case)
        out = torch.empty_like(b.q)
        with tools.metered() as meter: with_tiles(16, n, 4, 2, 1)(b.q, *b.want_pool.unbind(0), out, b.starts, 8, b.seq_lens, 200, 0.125, 0, b.table, 0.0)
        assert meter["of"]["table_ptr"] == 4 * loads, block_size


@pytest.mark.parametrize("case", FP8, ids=lambda c: c.name)
def test_the_reference_in_fp8(case): assert check(reference, case) <= 1.6e-2


@pytest.mark.parametrize("splits", [1, 4])
def test_fp8_with_small_tiles(splits): check(triton_kernels, replace(FP8[2], seq_lens=(70, 133)), with_tiles(16, 16, 4, 4, splits))


def test_fp8_numbers_are_stored_as_torch_rounds_them():
    "Both ends of the range, ties, subnormal numbers, NaN and random bits, with a scale that is no power of two"
    gen = torch.Generator().manual_seed(0)
    ties = torch.arange(0, 126).to(torch.uint8).view(torch.float8_e4m3fn).float()
    odd = torch.tensor([float("nan"), 1e30, -1e30, float("inf"), 448.0, 464.0, 465.0, 1e-30])
    x = torch.cat([(ties[1:] + ties[:-1]) / 2, -ties, odd, torch.randn(253, generator=gen) * 100])
    x = x.view(1, 4, 128)
    for scale in (1.0, 0.37, 1e-3):
        pools = torch.zeros(2, 1, 1, 4, 128, dtype=torch.float8_e4m3fn)
        triton_kernels.reshape_and_cache_flash(x, x, *pools.unbind(0), torch.zeros(1, dtype=torch.int64), "fp8_e4m3", scale, scale)
        want = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        for pool in pools: assert same_bits(pool.view(1, 4, 128), want), scale


@pytest.mark.parametrize("as_list", [False, True])
def test_zeroing_takes_one_launch_for_all_layers(as_list):
    shapes = [((2, 7, 16, 2, 64), torch.float16), ((2, 7, 16, 1, 80), torch.float8_e4m3fn), ((2, 7, 4, 3, 40), torch.float32)]
    pools = [torch.full(shape, float("nan"), dtype=dtype) for shape, dtype in shapes]
    blocks = [6, 0, 3]
    with tools.reachable(*pools), tools.metered() as meter: triton_kernels.zero_blocks(pools, blocks if as_list else torch.tensor(blocks, dtype=torch.int32))
    assert meter["programs"] == 3 * 2 * 3 and meter["stored"] == sum(pool[:, 0].nbytes for pool in pools) * 3
    for pool in pools:
        assert (pool[:, blocks].float() == 0).all() and pool[:, [1, 2, 4, 5]].float().isnan().all()
    odd = torch.ones(2, 5, 1, 1, 10, dtype=torch.float16)  # 20 bytes a block
    with tools.reachable(odd): triton_kernels.zero_blocks([odd], [4])
    assert (odd[:, 4] == 0).all() and (odd[:, :4] == 1).all()
    triton_kernels.zero_blocks(pools, [])
    with tools.reachable(odd), pytest.raises(tools.OutOfBounds): triton_kernels.zero_blocks([odd], [5])
    with pytest.raises(ValueError, match="without gaps"): triton_kernels.zero_blocks([torch.ones(2, 4, 3, 2).transpose(2, 3)], [1])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("q_len, kv_len, heads, head_dim, block_m, block_n", [
    (70, 70, (4, 2), 64, 32, 16), (7, 50, (2, 2), 40, 16, 16), (33, 71, (3, 1), 80, 16, 32), (1, 64, (4, 1), 16, 16, 64)])
def test_flash_attention(q_len, kv_len, heads, head_dim, block_m, block_n, causal):
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, h, head_dim, generator=gen) for n, h in ((q_len, heads[0]), (kv_len, heads[1]), (kv_len, heads[1])))
    got = flash_attention(q, k, v, causal=causal, block_m=block_m, block_n=block_n)
    plain = [x.double().transpose(1, 2) for x in (q, *(y.repeat_interleave(heads[0] // heads[1], 2) for y in (k, v)))]
    mask = torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len) if causal else None
    want = torch.nn.functional.scaled_dot_product_attention(*plain, attn_mask=mask).transpose(1, 2)
    assert (got - want).abs().max() < 3e-6


def test_padding_slots_write_nothing():
    b = build(CASES[0])
    triton_kernels.reshape_and_cache_flash(b.key, b.value, *b.pool.unbind(0), torch.full((5,), -1))
    triton_kernels.reshape_and_cache_flash(b.key, b.value, *b.pool.unbind(0), torch.empty(0, dtype=torch.int64))
    assert b.pool.isnan().all()


def test_scales_are_inert_in_16_bits_and_a_dtype_that_does_not_fit_is_refused_by_name():
    b, c = build(HALF[4]), build(HALF[4])
    triton_kernels.reshape_and_cache_flash(b.key, b.value, *b.pool.unbind(0), b.slots, "auto", 0.5, 3.0)
    triton_kernels.reshape_and_cache_flash(c.key, c.value, *c.pool.unbind(0), c.slots)
    assert same_bits(b.pool, c.pool)
    for wrong, pool in (("fp8", b.pool), ("auto", b.pool.to(torch.float8_e4m3fn)), ("fp8_e5m2", b.pool)):
        with pytest.raises(ValueError, match=wrong): triton_kernels.reshape_and_cache_flash(b.key, b.value, *pool.unbind(0), b.slots, wrong)
    outs = [torch.empty_like(b.q) for _ in range(2)]
    for out, scales in zip(outs, ({}, dict(k_scale=0.5, v_scale=3.0))):
        triton_kernels.unified_attention(b.q, *b.want_pool.unbind(0), out, b.starts, 20, b.seq_lens, 40, 0.125, block_table=b.table, **scales)
    assert torch.equal(*outs)


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
