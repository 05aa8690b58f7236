"""Every Triton kernel, compiled for GPUs that are not there, in the configurations that `unified_attention` would launch."""
import pytest
import torch
import triton
from aot_tools import (ITEMSIZE, MULTIPROCESSORS, SHARED_LIMIT, attention_source, compile_kernel, count, reduce_source, write_old_source,
                       write_source)

import litevllm.kernels.paged_attention as K

ARCHS = [80, 90, "gfx942"]
PREFILL, DECODE = dict(max_query_len=2048, num_seqs=4), dict(max_query_len=1, num_seqs=4)
ATTENTION = {  # name: dtype, query heads, key heads, head dim, batch, what else the kernel is compiled for
    "Llama-3 8B prefill": ("bfloat16", 32, 8, 128, PREFILL, {}),
    "Llama-3 8B decode": ("bfloat16", 32, 8, 128, DECODE, {}),
    "SmolLM2 prefill": ("bfloat16", 9, 3, 64, PREFILL, {}),
    "SmolLM2 decode": ("bfloat16", 9, 3, 64, DECODE, {}),
    "SmolLM2 in float32": ("float32", 9, 3, 64, PREFILL, {}),
    "one query head a key head, in float32": ("float32", 8, 8, 128, PREFILL, {}),
    "window and soft cap, eight query heads a key head, in float32": ("float32", 64, 8, 128, PREFILL, dict(window_size=1000, softcap=30.0)),
    "window and soft cap, head size 64, in float32": ("float32", 8, 8, 64, DECODE, dict(window_size=1000, softcap=30.0)),
    "OPT 2.7B prefill": ("float16", 32, 32, 80, PREFILL, {}),
    "window and soft cap, pages of 24": ("float16", 16, 8, 256, PREFILL, dict(window_size=4096, softcap=50.0, block_size=24)),
    "window and soft cap in float32": ("float32", 8, 2, 128, DECODE, dict(window_size=1000, softcap=30.0)),
}


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    "Every kernel is really compiled: triton's cache starts empty"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def gate(report, arch):
    "No spill, no stack, and the shared memory that the chip has"
    seen = {k: v for k, v in report.items() if k != "opcodes"}
    print(arch, seen)
    assert report["spills"] == 0 and report["stack"] == 0, (arch, seen)
    assert report["shared"] <= SHARED_LIMIT[arch], (arch, seen)


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("arch", ARCHS)
def test_attention(arch, name):
    dtype, num_q_heads, num_kv_heads, head_dim, batch, extra = ATTENTION[name]
    tiles = K.choose_tiles(arch, MULTIPROCESSORS[arch], ITEMSIZE[dtype], head_dim, num_q_heads // num_kv_heads, num_kv_heads,
                           max_seq_len=4096, **batch)
    assert (tiles.num_splits > 1) == (batch is DECODE)
    report = compile_kernel(attention_source(dtype, tiles, num_q_heads, num_kv_heads, head_dim, **extra), arch, tiles.num_warps, tiles.num_stages)
    gate(report, arch)
    ops = report["opcodes"]
    if arch == "gfx942": assert count(ops, "v_mfma") > 0
    elif dtype == "float32": assert count(ops, "FFMA") > 0 and count(ops, "HMMA") == 0  # exact, not tf32
    elif arch == 90 and batch is PREFILL: assert count(ops, "HGMMA") > 0
    else: assert count(ops, "HMMA") > 0
    if arch != "gfx942": assert sum(n for op, n in ops.items() if op.startswith("LDG") and op.endswith(".128")) > 0, "no 128-bit loads"


@pytest.mark.parametrize("arch", ARCHS)
def test_the_small_kernels(arch):
    for dtype, heads, dim in (("bfloat16", 8, 128), ("float32", 3, 64), ("float16", 32, 80)):
        warps = K.write_warps(triton.next_power_of_2(heads * dim))
        for source in (write_source, write_old_source): gate(compile_kernel(source(dtype, heads, dim), arch, warps), arch)
    for dtype, heads, dim, splits in (("bfloat16", 32, 128, 16), ("float32", 9, 64, 8)):
        gate(compile_kernel(reduce_source(dtype, heads, dim, splits), arch, 4), arch)


@pytest.mark.parametrize("arch", ARCHS[:2])
def test_the_gate_can_fail(arch):
    "Float32 tiles of 64 rows on four warps do spill, and the report says so"
    report = compile_kernel(attention_source("float32", K.Tiles(64, 64, 4, 2, 1), 9, 3, 64), arch, 4, 2)
    with pytest.raises(AssertionError): gate(report, arch)


def test_tiles_are_what_the_hardware_wants():
    for arch in (80, 90, 100, 120, "gfx942", "gfx950"):
        for head_dim in (16, 40, 64, 80, 96, 128, 192, 256):
            for group in (1, 3, 4, 5, 7, 24):
                for itemsize in (2, 4):
                    args = arch, 132, itemsize, head_dim, group, 8
                    prefill = K.choose_tiles(*args, max_query_len=2048, num_seqs=3, max_seq_len=4096)
                    one = K.choose_tiles(*args, max_query_len=1, num_seqs=1, max_seq_len=4096)
                    many = K.choose_tiles(*args, max_query_len=1, num_seqs=256, max_seq_len=4096)
                    short = K.choose_tiles(*args, max_query_len=1, num_seqs=1, max_seq_len=40)
                    assert prefill.num_splits == many.num_splits == short.num_splits == 1 and one.num_splits > 1
                    assert itemsize == 4 or prefill.block_m >= 64  # Hopper's matrix unit takes 64 rows
                    for t in (prefill, one, many): assert t.block_m >= group and all(n & (n - 1) == 0 for n in t._replace(num_stages=2))
    assert K.choose_tiles(90, 132, 2, 128, 4, 8, 1, 2, 100_000) == K.choose_tiles(90, 132, 2, 128, 4, 8, 1, 2, 100_000)


def test_without_a_gpu_and_without_the_interpreter_the_error_says_what_to_do():
    x, pool = torch.zeros(1, 2, 16), torch.zeros(4, 16, 2, 16)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"): K.reshape_and_cache_flash(x, x, pool, pool, torch.zeros(1, dtype=torch.int64))
    one = torch.ones(1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        K.unified_attention(x, pool, pool, x.clone(), torch.tensor([0, 1], dtype=torch.int32), 1, one, 1, 1.0, block_table=one[None])
