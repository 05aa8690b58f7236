"""The fused Triton kernels as code for GPUs that are not there; test_kernels_interp.py has their numerics and planted bugs."""
import pytest
import torch
from aot_tools import SHARED_LIMIT, TRITON_TYPE, compile_kernel, count, source

import litevllm.kernels.fused as K

pytestmark = pytest.mark.usefixtures("empty_triton_cache")
ARCHS = [80, 90, 100, "gfx942"]
FP8 = "*fp8e4nv"

# --- code for GPUs: each with the elements of a tile, by which the launcher chooses its warps

def norm(dtype, size, heads=1):
    tile, p = K.norm_tile(size), TRITON_TYPE[dtype]
    types = dict(x_ptr=p, out_ptr=p, weight_ptr=p, num_rows="i32", eps="fp32")
    return source(K.norm_kernel, types, dict(HEADS=heads, **tile)), tile["ROWS"] * tile["BLOCK"]


def add_norm(dtype, size):
    tile, p = K.norm_tile(size), TRITON_TYPE[dtype]
    types = dict(x_ptr=p, residual_ptr=p, weight_ptr=p, num_rows="i32", eps="fp32")
    return source(K.add_norm_kernel, types, tile), tile["ROWS"] * tile["BLOCK"]


def silu(dtype, size):
    return source(K.silu_kernel, dict(x_ptr=TRITON_TYPE[dtype], out_ptr=TRITON_TYPE[dtype]), dict(SIZE=size, BLOCK=1024)), 1024


def rope(dtype, heads, kv_heads, head_size):
    p, tile = TRITON_TYPE[dtype], K.rope_tile(heads, kv_heads, head_size)
    types = dict(position_ptr="*i64", query_ptr=p, key_ptr=p, table_ptr=p)
    return source(K.rope_kernel, types, tile), tile["BLOCK_H"] * tile["HALF_PAD"]


def rope_cache(dtype, heads, kv_heads, head_size, cache=None):
    p, tile = TRITON_TYPE[dtype], K.rope_tile(heads, kv_heads, head_size)
    types = dict.fromkeys(("query_ptr", "key_ptr", "value_ptr", "table_ptr"), p) | dict.fromkeys(("key_cache_ptr", "value_cache_ptr"), cache or p)
    types |= dict(position_ptr="*i64", slot_ptr="*i64", num_slots="i32", k_scale="fp32", v_scale="fp32")
    return source(K.rope_cache_kernel, types, tile | dict(BLOCK_SIZE=16)), tile["BLOCK_H"] * tile["HALF_PAD"]


KERNELS = {  # shapes of models: Llama-3 8B and 70B, Qwen3 0.6B, SmolLM2 135M, OPT has none of these
    "norm, 4096": lambda: norm("bfloat16", 4096),
    "norm, 8192 in float32": lambda: norm("float32", 8192),
    "norm of heads of 128": lambda: norm("bfloat16", 128, 16),
    "norm of a sum, 576": lambda: add_norm("bfloat16", 576),
    "silu, 14336": lambda: silu("bfloat16", 14336),
    "rotation, 32 and 8 heads of 128": lambda: rope("bfloat16", 32, 8, 128),
    "rotation and write, 32 and 8 heads of 128": lambda: rope_cache("bfloat16", 32, 8, 128),
    "rotation and write, 9 and 3 heads of 64 in float32": lambda: rope_cache("float32", 9, 3, 64),
    "rotation and write, 16 and 8 heads of 128, fp8": lambda: rope_cache("bfloat16", 16, 8, 128, FP8),
    "rotation and write, 4 and 4 heads of 80, fp8": lambda: rope_cache("float16", 4, 4, 80, FP8),
}


# all of them on one chip, each kernel on every chip
EVERYWHERE = ("norm, 4096", "norm of a sum, 576", "silu, 14336", "rotation, 32 and 8 heads of 128", "rotation and write, 32 and 8 heads of 128",
              "rotation and write, 16 and 8 heads of 128, fp8")


@pytest.mark.parametrize("name, arch", [(name, arch) for name in KERNELS for arch in ARCHS if arch == 90 or name in EVERYWHERE])
def test_code(name, arch):
    "No stack, no spill, the chip's shared memory, 16 bytes a load. An fp8 cache on sm_80 is what the compiler refuses and the launcher too"
    src, elements = KERNELS[name]()
    warps = K.warps_for(elements, 64 if arch == "gfx942" else 32)
    if arch == 80 and "fp8" in name:
        with pytest.raises(Exception, match="fp8e4nv|float8|CompilationError"): compile_kernel(src, arch, warps)
        return
    report = compile_kernel(src, arch, warps)
    ops = report["opcodes"]
    print(arch, name, {k: v for k, v in report.items() if k != "opcodes"}, {op: n for op, n in ops.items() if op.startswith(("LDG", "STG", "global_"))})
    assert report["spills"] == 0 and report["stack"] == 0 and report["shared"] <= SHARED_LIMIT[arch]
    names = "global_load_dwordx4", "buffer_load_dwordx4", "LDG.E.128"
    wide = sum(count(ops, name) for name in names)
    if elements >= 8 * (64 if arch == "gfx942" else 32): assert wide > 0, "no loads of 16 bytes"
    assert count(ops, "LDL") == count(ops, "STL") == 0


def test_the_gate_can_fail():
    "A row of 8192 on one warp is 256 numbers a thread: it spills, and the report says so"
    src, _ = norm("float32", 8192)
    report = compile_kernel(src, 90, 1)
    assert report["spills"] > 0


# --- refusals that need no interpreter

def test_without_a_gpu_and_without_the_interpreter_the_error_says_what_to_do():
    x, w, pos, table = torch.zeros(2, 32), torch.ones(32), torch.zeros(2, dtype=torch.int64), torch.zeros(4, 16)
    pool = torch.zeros(2, 4, 2, 16)
    for call in (lambda: K.rms_norm(x, w, 1e-6), lambda: K.fused_add_rms_norm(x, x.clone(), w, 1e-6), lambda: K.silu_and_mul(x),
                 lambda: K.rotary_embedding(pos, x, x.clone(), 16, table),
                 lambda: K.rope_and_cache(pos, x, x.clone(), x.clone(), 16, table, pool, pool.clone(), pos)):
        with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"): call()
