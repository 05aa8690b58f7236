"""The numba kernels and the float64 reference, held against an oracle that knows nothing of pages (tests/attention_cases.py)."""
import random
import resource
from dataclasses import replace

import pytest
import torch
from attention_cases import CASES, HALF, UNTOUCHED, build, check, same_bits

import litevllm.kernels.cpu_attention as cpu
import litevllm.kernels.cpu_ops  # noqa: F401  compiled with it
import litevllm.kernels.reference as reference

BY_NAME = dict(argvalues=CASES, ids=lambda c: c.name.replace(" ", "_"))


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request):
    "torch's number of threads, which is the kernel's too"
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    assert cpu.num_workers(cpu.SMALL) == request.param
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", **BY_NAME)
def test_numba_case(case, threads): check(cpu, case, seed=threads)


@pytest.mark.parametrize("case", **BY_NAME)
def test_reference_case(case): assert check(reference, case) < 1e-6


@pytest.mark.parametrize("case", HALF, ids=lambda c: c.name)
def test_half_precision_model_over_a_float32_pool(case):
    check(cpu, case, pool_dtype=torch.float32)
    check(reference, case)


def read(module, case, b, rows=None):
    "Attention of the whole batch, or of request `rows` alone"
    q, starts, seq_lens, table = b.q, b.starts, b.seq_lens, b.table
    if rows is not None:
        q, table = q[starts[rows]:starts[rows + 1]], table[rows:rows + 1]
        starts, seq_lens = torch.tensor([0, len(q)], dtype=torch.int32), seq_lens[rows:rows + 1]
    out = torch.full_like(q, UNTOUCHED)
    module.unified_attention(q, *b.want_pool.unbind(0), out, starts, len(q), seq_lens, int(seq_lens.max()), case.head_dim ** -0.5,
                             window_size=case.window, block_table=table, softcap=case.softcap)
    return out


@pytest.mark.parametrize("window", [0, 5])
def test_a_request_gets_the_same_bits_alone_and_in_a_batch_of_nine(window, threads):
    case = replace(CASES[0], heads=(9, 3), query_lens=(1, 9, 1, 30, 1, 2, 1, 17, 1), seq_lens=(70, 9, 1, 50, 33, 80, 16, 17, 129), window=window)
    b = build(case)
    whole = read(cpu, case, b)
    for r in range(9): assert torch.equal(whole[b.starts[r]:b.starts[r + 1]], read(cpu, case, b, r)), r
    torch.set_num_threads(3 - threads)
    assert torch.equal(whole, read(cpu, case, b)), "the number of threads changed the answer"


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("group", [1, 3, 4])
def test_requests_with_a_common_start_get_the_bits_they_get_alone(threads, group, block_size):
    "Runs of decodes behind the same pages, longer and shorter than an item, between prompts and strangers; every one as if it were alone."
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    common, runs = 128 + 4 * rng.randrange(9), [1, 35, 2, 3]
    query_lens = [n for run in runs for n in [1] * run + [rng.choice([0, 3, 20])]]
    seq_lens = [common + rng.randrange(n, 70) if n == 1 else n + rng.randrange(common) for n in query_lens]
    case = replace(CASES[0], heads=(3 * group, 3), query_lens=tuple(query_lens), seq_lens=tuple(seq_lens), block_size=block_size, window=0)
    b, first, found = build(case, seed), 0, []
    for run in runs:
        for r in range(first, first + run): b.table[r, :common // block_size] = b.table[first, :common // block_size]
        found.append(cpu.common_start(b.starts.numpy(), b.seq_lens.numpy(), b.table.numpy(), first, block_size))
        first += run + 1
    shared = common // block_size * block_size // cpu.TILE * cpu.TILE
    assert found == [(run, shared if run > 1 else 0) for run in runs] and shared >= 96
    whole = read(cpu, case, b)
    if group == 3: torch.testing.assert_close(whole, read(reference, case, b), atol=2e-6, rtol=1e-5)
    for r in range(len(query_lens)): assert torch.equal(whole[b.starts[r]:b.starts[r + 1]], read(cpu, case, b, r)), r


def test_two_threads_give_the_bits_of_one(run_python):
    "In a process that may have two (this one was started with one); and one thread works without the pool"
    code = ("import sys, torch; sys.path.insert(0, 'tests')\n"
            "import numba, litevllm.kernels.cpu_attention as k\nfrom attention_cases import CASES, build\n"
            "batch, woken = k.attend_batch, []\n"
            "k.attend_batch = lambda workers, *args: (woken.append((workers, numba.get_num_threads())), batch(workers, *args))\n"
            "def read(case, n):\n"
            "    torch.set_num_threads(n); b = build(case); out = torch.empty_like(b.q)\n"
            "    k.unified_attention(b.q, *b.want_pool.unbind(0), out, b.starts, 1, b.seq_lens, 1000, 0.1, case.window, b.table, case.softcap)\n"
            "    return out\n"
            "for case in CASES[:6]:\n"
            "    one, two = read(case, 1), read(case, 2)\n"
            "    assert woken.pop() == (2, 2) and not woken and torch.equal(one, two), case\n"
            "print('same')")
    assert "same" in run_python(code, OMP_NUM_THREADS="2", NUMBA_NUM_THREADS="2").stdout


def test_a_decode_row_does_not_depend_on_how_its_context_was_computed():
    "The last row of a prompt and a decode step over the same pool agree to rounding"
    case = replace(CASES[0], query_lens=(1, 40), seq_lens=(40, 40))
    b = build(case)
    b.table[0], b.q[0] = b.table[1], b.q[40]
    out = read(cpu, case, b)
    assert torch.allclose(out[0], out[40], atol=1e-6)


@pytest.mark.parametrize("module", [cpu, reference], ids=["numba", "reference"])
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("score,finite", [(-3e38, True), (float("-inf"), False)])
def test_the_lowest_scores_reveal_no_hidden_key(module, score, finite, window):
    "Ten tokens whose scores are all the same and as low as they get; value j is j. Row i is the mean of what it may see, or NaN; nothing of what comes later."
    keys, values = torch.zeros(2, 1, 16, 1, 8)
    keys[0, :10, 0, 0], values[0, :10, 0] = score, torch.arange(10.0)[:, None]
    q, starts, n = torch.zeros(10, 1, 8), torch.tensor([0, 10], dtype=torch.int32), torch.tensor([10], dtype=torch.int32)
    q[..., 0] = 1
    out = torch.empty_like(q)
    module.unified_attention(q, keys, values, out, starts, 10, n, 10, 0.5, window_size=window, block_table=torch.zeros(1, 1, dtype=torch.int32))
    want = torch.tensor([sum(range(max(0, i - window + 1) if window else 0, i + 1)) / min(i + 1, window or 10) for i in range(10)])
    if finite: torch.testing.assert_close(out, want[:, None, None].expand_as(out))
    else: assert out.isnan().all()


def test_slot_beyond_two_to_the_31_elements():
    "Both pools are 8 GiB of address space and a few pages of memory"
    heads, dim, block = 2, 64, 16
    blocks = 2**31 // (block * heads * dim) + 8
    keys, values = (torch.empty(blocks, block, heads, dim) for _ in range(2))
    assert keys[-1].storage_offset() > 2**31 and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 8 * 2**20
    table = torch.tensor([[blocks - 1, blocks - 3]], dtype=torch.int32)
    pos = torch.arange(20)
    slots = table[0].long()[pos // block] * block + pos % block
    k, v = torch.randn(2, 20, heads, dim, generator=torch.Generator().manual_seed(0))
    q = torch.randn(2, 4, dim, generator=torch.Generator().manual_seed(1))
    starts, seq_lens = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
    got, want = torch.empty_like(q), torch.empty_like(q)
    cpu.reshape_and_cache_flash(k, v, keys, values, slots)
    cpu.unified_attention(q, keys, values, got, starts, 2, seq_lens, 20, 0.125, block_table=table)
    small = torch.zeros(2, 2, block, heads, dim)
    reference.reshape_and_cache_flash(k, v, small[0], small[1], pos)
    reference.unified_attention(q, small[0], small[1], want, starts, 2, seq_lens, 20, 0.125, block_table=torch.tensor([[0, 1]]))
    assert torch.allclose(got, want, atol=3e-6)


@pytest.mark.parametrize("module", [cpu, reference], ids=["numba", "reference"])
def test_padding_slots_write_nothing(module):
    case = CASES[0]
    b = build(case)
    module.reshape_and_cache_flash(b.key, b.value, *b.pool.unbind(0), torch.full((5,), -1))
    module.reshape_and_cache_flash(b.key, b.value, *b.pool.unbind(0), torch.empty(0, dtype=torch.int64))
    assert b.pool.isnan().all()


@pytest.mark.parametrize("module", [cpu, reference], ids=["numba", "reference"])
def test_scales_are_inert_and_fp8_is_refused_by_name(module):
    b, c = build(CASES[0]), build(CASES[0])
    module.reshape_and_cache_flash(b.key, b.value, *b.pool.unbind(0), b.slots, "auto", 0.5, 3.0)
    module.reshape_and_cache_flash(c.key, c.value, *c.pool.unbind(0), c.slots)
    assert same_bits(b.pool, c.pool)
    for name in ("fp8", "fp8_e4m3", "int8"):
        with pytest.raises(ValueError, match=name): module.reshape_and_cache_flash(b.key, b.value, *b.pool.unbind(0), b.slots, name)


@pytest.mark.parametrize("module", [cpu, reference], ids=["numba", "reference"])
def test_arguments_that_do_not_fit_are_refused_with_their_numbers(module):
    case, b = CASES[0], build(CASES[0])
    keys, values = b.want_pool.unbind(0)
    args = dict(q=b.q, k_cache=keys, v_cache=values, out=torch.empty_like(b.q), cu_seqlens_q=b.starts, max_seqlen_q=20, seqused_k=b.seq_lens,
                max_seqlen_k=40, softmax_scale=0.1, block_table=b.table)
    module.unified_attention(**args)
    for change, numbers in ((dict(q=b.q[:, :3], out=b.q[:, :3].clone()), "3 .* 2"), (dict(q=b.q[..., :32]), "32"), (dict(out=b.q[:4].clone()), "4"),
                            (dict(block_table=b.table[:3]), "4 requests .* 3"), (dict(block_table=None), "None"),
                            (dict(cu_seqlens_q=b.starts[:4]), "5 cu_seqlens_q.* 4 "), (dict(window_size=-1), "-1")):
        with pytest.raises(ValueError, match=numbers): module.unified_attention(**(args | change))
    for change, numbers in ((dict(slot_mapping=torch.zeros(500, dtype=torch.int64)), "500"), (dict(key=b.key[:, :1]), "1"), (dict(value=b.value[:4]), "4")):
        with pytest.raises(ValueError, match=numbers):
            module.reshape_and_cache_flash(**(dict(key=b.key, value=b.value, key_cache=keys, value_cache=values, slot_mapping=b.slots) | change))
    assert case is CASES[0]


def test_the_numba_pool_is_float32_without_gaps():
    b = build(CASES[0], pool_dtype=torch.float16)
    with pytest.raises(ValueError, match="float16"): cpu.reshape_and_cache_flash(b.key, b.value, *b.pool.unbind(0), b.slots)
    gaps = torch.zeros(8, 16, 2, 128)[..., :64]
    with pytest.raises(ValueError, match="gaps"): cpu.reshape_and_cache_flash(b.key, b.value, gaps, gaps, b.slots)


def test_compiled_code_is_kept_for_the_next_process(run_python):
    "This process has compiled the kernels, or found them compiled by one before it; a new one loads them"
    code = ("import litevllm.kernels.cpu_attention as k, litevllm.kernels.cpu_ops as ops\n"
            "kernels = k.write_tokens, k.attend_batch, ops.norm_batch, ops.turn_and_store_batch, ops.product_batch\n"
            "print(sum(sum(f.stats.cache_hits.values()) for f in kernels), sum(sum(f.stats.cache_misses.values()) for f in kernels))")
    assert run_python(code).stdout.split() == ["5", "0"]
