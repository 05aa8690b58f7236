"""Every Triton kernel, compiled for GPUs that are not there, in the configurations that `unified_attention` would launch."""
from types import SimpleNamespace

import pytest
import torch
import triton
from aot_tools import (ITEMSIZE, MULTIPROCESSORS, SHARED_LIMIT, W, attention_source, compile_attention, compile_kernel, count, flash_source,
                       reduce_source, wide_loads, write_old_source, write_source, zero_source)

import litevllm.kernels.paged_attention as K

pytestmark = pytest.mark.usefixtures("empty_triton_cache")
ARCHS = [80, 90, 100, "gfx942"]
PREFILL, DECODE = dict(max_query_len=2048, num_seqs=4), dict(max_query_len=1, num_seqs=4)
ATTENTION = {  # name: dtype, query heads, key heads, head dim, batch, what else the kernel is compiled for
    "Llama-3 8B prefill": ("bfloat16", 32, 8, 128, PREFILL, {}),
    "Llama-3 8B decode": ("bfloat16", 32, 8, 128, DECODE, {}),
    "SmolLM2 prefill": ("bfloat16", 9, 3, 64, PREFILL, {}),
    "SmolLM2 decode": ("bfloat16", 9, 3, 64, DECODE, dict(one_request=True)),
    "Llama-3 8B prefill, fp8 cache": ("bfloat16", 32, 8, 128, PREFILL, dict(kv_dtype="fp8")),
    "Llama-3 8B decode, fp8 cache": ("bfloat16", 32, 8, 128, DECODE, dict(kv_dtype="fp8")),
    "SmolLM2 in float32": ("float32", 9, 3, 64, PREFILL, {}),
    "one query head a key head, in float32": ("float32", 8, 8, 128, PREFILL, {}),
    "window and soft cap, eight query heads a key head, in float32": ("float32", 64, 8, 128, PREFILL, dict(window_size=1000, softcap=30.0)),
    "window and soft cap, head size 64, in float32": ("float32", 8, 8, 64, DECODE, dict(window_size=1000, softcap=30.0)),
    "OPT 2.7B prefill": ("float16", 32, 32, 80, PREFILL, {}),
    "window and soft cap, pages of 24": ("float16", 16, 8, 256, PREFILL, dict(window_size=4096, softcap=50.0, block_size=24)),
    "window and soft cap, fp8 cache": ("bfloat16", 16, 8, 128, PREFILL, dict(window_size=4096, softcap=50.0, kv_dtype="fp8")),
    "head size 256 decode": ("bfloat16", 16, 8, 256, DECODE, {}),
    "two heads share a key head, decode": ("bfloat16", 16, 8, 128, DECODE, dict(window_size=4096)),
    "window and soft cap in float32": ("float32", 8, 2, 128, DECODE, dict(window_size=1000, softcap=30.0)),
}


def tiles_for(arch, name):
    dtype, num_q_heads, num_kv_heads, head_dim, batch, extra = ATTENTION[name]
    return K.choose_tiles(arch, MULTIPROCESSORS[arch], ITEMSIZE[dtype], ITEMSIZE[extra.get("kv_dtype", dtype)], head_dim, num_q_heads // num_kv_heads,
                          num_kv_heads, max_seq_len=4096, **batch)


def gate(report, arch):
    "No spill, no stack, and the shared memory that the chip has"
    seen = {k: v for k, v in report.items() if k != "opcodes"}
    print(arch, seen)
    assert report["spills"] == 0 and report["stack"] == 0, (arch, seen)
    assert report["shared"] <= SHARED_LIMIT[arch], (arch, seen)


EVERYWHERE = {"Llama-3 8B prefill", "Llama-3 8B decode", "Llama-3 8B prefill, fp8 cache", "Llama-3 8B decode, fp8 cache", "SmolLM2 decode",
              "window and soft cap, pages of 24", "window and soft cap, eight query heads a key head, in float32"}
JOBS = [(arch, name) for arch in ARCHS for name in ATTENTION
        if arch == 90 or name in EVERYWHERE or arch == 80 and name in ("SmolLM2 prefill", "SmolLM2 in float32")]


@pytest.mark.parametrize("arch, name", JOBS)
def test_attention(arch, name):
    dtype, num_q_heads, num_kv_heads, head_dim, batch, extra = ATTENTION[name]
    args = arch, dtype, tiles_for(arch, name), num_q_heads, num_kv_heads, head_dim
    if arch == 80 and "kv_dtype" in extra:  # refused before the launch (test_fp8_is_refused): the compiler has no such conversion
        with pytest.raises(Exception, match="fp8e4nv not supported in this architecture"): compile_attention(*args, **extra)
        return
    report = compile_attention(*args, **extra)
    assert (tiles_for(arch, name).num_splits > 1) == (batch is DECODE)
    gate(report, arch)
    ops = report["opcodes"]
    if arch == "gfx942": assert count(ops, "v_mfma") > 0
    elif dtype == "float32": assert count(ops, "FFMA") > 0 and count(ops, "HMMA") == 0  # exact, not tf32
    elif arch == 90 and batch is PREFILL: assert count(ops, "HGMMA") > 0
    elif arch == 100 and batch is PREFILL: assert count(ops, "UTCHMMA") > 0
    else: assert count(ops, "HMMA") > 0
    if arch != "gfx942": assert wide_loads(ops) > 0, "no 128-bit loads"


@pytest.mark.parametrize("arch", ARCHS)
def test_the_small_kernels(arch):
    "Every shape on one chip, every kernel on every chip"
    some = slice(None if arch == 90 else 1)
    for dtype, heads, dim in (("bfloat16", 8, 128), ("float32", 3, 64), ("float16", 32, 80))[some]:
        warps = W.write_warps(triton.next_power_of_2(heads * dim))
        sources = [write_source(dtype, heads, dim), write_old_source(dtype, heads, dim)]
        if arch != 80: sources.append(write_source(dtype, heads, dim, kv_dtype="fp8"))
        for source in sources:
            report = compile_kernel(source, arch, warps)
            gate(report, arch)
            if arch != "gfx942": assert wide_loads(report["opcodes"]) > 0, "no 128-bit loads"
    for dtype, heads, dim, splits in (("bfloat16", 32, 128, K.MAX_SPLITS), ("bfloat16", 16, 256, K.MAX_SPLITS), ("float32", 9, 64, 8))[some]:
        gate(compile_kernel(reduce_source(dtype, heads, dim, splits, **({"num_seqs": 1} if splits == 8 else {})), arch, 4), arch)
    for element in (triton.language.int32, triton.language.int8)[some]:
        report = compile_kernel(zero_source(element), arch, 4)
        gate(report, arch)
        if element == triton.language.int32:
            wide = [op for op in report["opcodes"] if op.startswith("STG.") and ".128" in op or op.endswith("_store_dwordx4")]
            assert wide, "no 128-bit stores"


@pytest.mark.parametrize("arch", ARCHS)
def test_flash_attention(arch):
    for dtype, heads, dim, m, n, warps, stages, ones in (("bfloat16", (32, 8), 128, 128, 32 if arch == 80 else 64, 8, 3, {}),
                                                         ("float16", (8, 8), 64, 64, 64, 4, 2, dict(q_len=1, kv_len=1))):
        if arch == "gfx942": m, warps, stages = 64, 4, 2
        report = compile_kernel(flash_source(dtype, m, n, *heads, dim, **ones), arch, warps, stages)
        gate(report, arch)
        assert count(report["opcodes"], {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA", "gfx942": "v_mfma"}[arch]) > 0


@pytest.mark.parametrize("arch", ARCHS[1:2])
def test_the_gate_can_fail(arch):
    "Float32 tiles of 64 rows on four warps do spill, and the report says so"
    report = compile_kernel(attention_source("float32", K.Tiles(64, 64, 4, 2, 1), 9, 3, 64), arch, 4, 2)
    with pytest.raises(AssertionError): gate(report, arch)


def test_tiles_are_what_the_hardware_wants():
    for arch in (80, 90, 100, 120, "gfx942", "gfx950"):
        for head_dim in (16, 40, 64, 80, 96, 128, 192, 256):
            for group in (1, 3, 4, 5, 7, 24):
                for itemsize, kv_itemsize in ((2, 2), (2, 1), (4, 4), (4, 1)):
                    args = arch, 132, itemsize, kv_itemsize, head_dim, group, 8
                    prefill = K.choose_tiles(*args, max_query_len=2048, num_seqs=3, max_seq_len=4096)
                    one = K.choose_tiles(*args, max_query_len=1, num_seqs=1, max_seq_len=4096)
                    many = K.choose_tiles(*args, max_query_len=1, num_seqs=256, max_seq_len=4096)
                    short = K.choose_tiles(*args, max_query_len=1, num_seqs=1, max_seq_len=40)
                    assert prefill.num_splits == many.num_splits == short.num_splits == 1 and one.num_splits > 1
                    assert itemsize == 4 or prefill.block_m >= 64  # Hopper's matrix unit takes 64 rows
                    for t in (prefill, one, many): assert t.block_m >= group and all(n & (n - 1) == 0 for n in t._replace(num_stages=2))


def test_the_number_of_splits():
    "Four programs a multiprocessor, 256 keys a program, a power of two, never more than MAX_SPLITS; more requests never mean more splits"
    assert [K.num_splits(132, n, 8, 100_000) for n in (1, 2, 4, 8, 16, 32, 64, 256)] == [32, 32, 16, 8, 4, 2, 1, 1]
    assert [K.num_splits(132, 1, 8, n) for n in (1, 255, 512, 1023, 4096, 100_000)] == [1, 1, 2, 2, 16, 32]
    assert K.num_splits(1, 1, 1, 10**6) == 4  # one core, as in the interpreter


def test_fp8_is_refused_where_the_chip_cannot_convert(monkeypatch):
    class Fake:  # what check_device asks of a tensor
        def __init__(self, dtype): self.dtype, self.device = dtype, torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    for capability in ((8, 0), (8, 6), (8, 9), (9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        W.check_device(Fake(torch.bfloat16), Fake(torch.bfloat16))
        if capability >= (8, 9): W.check_device(Fake(torch.bfloat16), Fake(torch.float8_e4m3fn))
        else:
            with pytest.raises(ValueError, match=rf"needs compute capability 8.9 or more, NVIDIA A100 has 8.{capability[1]}"):
                W.check_device(Fake(torch.bfloat16), Fake(torch.float8_e4m3fn))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    for arch, works in (("gfx90a:sramecc+:xnack-", False), ("gfx942:sramecc+:xnack-", True), ("gfx1100", False), ("gfx1201", True)):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName=arch))
        if works: W.check_device(Fake(torch.bfloat16), Fake(torch.float8_e4m3fn))
        else:
            with pytest.raises(ValueError, match=f"gfx94.* this is {arch.split(':')[0]}$"): W.check_device(Fake(torch.bfloat16), Fake(torch.float8_e4m3fn))


def test_without_a_gpu_and_without_the_interpreter_the_error_says_what_to_do():
    x, pool = torch.zeros(1, 2, 16), torch.zeros(4, 16, 2, 16)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"): K.reshape_and_cache_flash(x, x, pool, pool, torch.zeros(1, dtype=torch.int64))
    one = torch.ones(1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        K.unified_attention(x, pool, pool, x.clone(), torch.tensor([0, 1], dtype=torch.int32), 1, one, 1, 1.0, block_table=one[None])
