"""Compile the Triton kernels for a GPU that is not there, and read what the compiler made of them.

Needs a process without TRITON_INTERPRET. ptxas, cuobjdump and nvdisasm come with triton's wheel. As a program (`python aot_tools.py < jobs.json`) it prints the
reports of a list of jobs, for notebooks, where the interpreter is on."""
import collections
import contextlib
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import litevllm.kernels.flash_attention as F
import litevllm.kernels.kv_write as W
import litevllm.kernels.paged_attention as K

BIN = Path(triton.__file__).parent / "backends/nvidia/bin"
TRITON_TYPE = {"float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32", "fp8": "*fp8e4nv"}
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "fp8": 1}
MULTIPROCESSORS = {80: 108, 90: 132, 100: 148, "gfx942": 304}
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, "gfx942": 64 * 1024}


def target(arch):
    "The compile target of an arch as `choose_tiles` names it"
    return GPUTarget("hip", arch, 64) if isinstance(arch, str) else GPUTarget("cuda", arch, 32)


def source(fn, types, constants, unaligned=()):
    """The compiler's input for one kernel, specialised as the JIT would: pointers and strides divisible by 16 unless named in `unaligned`.
    `constants` may name run-time arguments too: the JIT makes a constant of an integer that is 1.

    `types`: Triton type per run-time argument; arguments annotated in the kernel need no entry."""
    signature, attrs = {}, {}
    for i, param in enumerate(fn.params):
        if param.is_constexpr or param.name in constants:
            signature[param.name] = "constexpr"
            continue
        signature[param.name] = types.get(param.name) or param.annotation_type
        if (signature[param.name].startswith("*") or "stride" in param.name) and param.name not in unaligned:
            attrs[(i,)] = [["tt.divisibility", 16]]
    names = fn.arg_names
    return ASTSource(fn=fn, signature=signature, constexprs={(names.index(n),): v for n, v in constants.items()}, attrs=attrs)


def attention_source(dtype, tiles, num_q_heads, num_kv_heads, head_dim, block_size=16, window_size=0, softcap=0.0, kv_dtype=None, module=K,
                     one_request=False):
    p, kv = TRITON_TYPE[dtype], TRITON_TYPE[kv_dtype or dtype]
    types = dict(out_ptr=p, part_ptr="*fp32", part_m_ptr="*fp32", part_l_ptr="*fp32", q_ptr=p, k_cache_ptr=kv, v_cache_ptr=kv, table_ptr="*i32",
                 seq_len_ptr="*i32", start_ptr="*i32", scale="fp32", cap="fp32", v_scale="fp32", num_seqs="i32")
    constants = K.launch_constants(tiles, num_q_heads, num_kv_heads, head_dim, block_size, window_size, softcap)
    return source(module.attention_kernel, types, constants | ({"num_seqs": 1} if one_request else {}), unaligned=("table_stride",))


def flash_source(dtype, block_m, block_n, num_q_heads, num_kv_heads, head_dim, causal=True, module=F, **ones):
    types = {n: TRITON_TYPE[dtype] for n in ("out_ptr", "q_ptr", "k_ptr", "v_ptr")} | dict(scale="fp32", q_len="i32", kv_len="i32")
    constants = dict(GROUP=num_q_heads // num_kv_heads, HEAD_DIM=head_dim, HEAD_PAD=W.padded_head_dim(head_dim), BLOCK_M=block_m, BLOCK_N=block_n,
                     CAUSAL=causal, **ones)
    return source(module.flash_kernel, types, constants)


def write_source(dtype, num_kv_heads, head_dim, block_size=16, kv_dtype=None):
    p, kv = TRITON_TYPE[dtype], TRITON_TYPE[kv_dtype or dtype]
    types = dict(key_ptr=p, value_ptr=p, key_cache_ptr=kv, value_cache_ptr=kv, slot_ptr="*i64", k_scale="fp32", v_scale="fp32")
    return source(W.write_kernel, types, W.write_constants(num_kv_heads, head_dim, block_size))


def write_old_source(dtype, num_kv_heads, head_dim, block_size=16):
    types = {n: TRITON_TYPE[dtype] for n in ("key_ptr", "value_ptr", "key_cache_ptr", "value_cache_ptr")} | {"slot_ptr": "*i64"}
    constants = W.write_constants(num_kv_heads, head_dim, block_size) | {"X": 16 // ITEMSIZE[dtype]}
    return source(W.write_old_layout_kernel, types, constants)


def zero_source(element=W.tl.int32):
    return source(W.zero_kernel, dict(region_ptr="*i64", block_ptr="*i64"), dict(ELEMENT=element, CHUNK=1024))


def reduce_source(dtype, num_q_heads, head_dim, num_splits, **ones):
    types = dict(out_ptr=TRITON_TYPE[dtype], part_ptr="*fp32", part_m_ptr="*fp32", part_l_ptr="*fp32", start_ptr="*i32", v_scale="fp32", num_seqs="i32")
    constants = dict(NUM_HEADS=num_q_heads, HEAD_DIM=head_dim, HEAD_PAD=K.padded_head_dim(head_dim), NUM_SPLITS=num_splits, **ones)
    return source(K.reduce_kernel, types, constants)


def compile_kernel(src, arch, num_warps, num_stages=1, **options):
    """Compile, and report: dict(registers, stack, spills, shared [bytes], opcodes Counter).

    Spill bytes are what ptxas says while triton runs it, so triton's cache must not know the kernel yet."""
    log = io.StringIO()
    with contextlib.redirect_stdout(log), triton.knobs.nvidia.scope():
        triton.knobs.nvidia.dump_ptxas_log = True
        options = dict(num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=True) | options
        compiled = triton.compile(src, target=target(arch), options=options)
    report = read_amdgcn(compiled.asm["amdgcn"]) if isinstance(arch, str) else read_cubin(compiled.asm["cubin"], log.getvalue())
    return report | {"shared": compiled.metadata.shared}


def read_amdgcn(text):
    number = lambda key: int(re.search(rf"\.{key}:?\s+(\d+)", text).group(1))
    opcodes = collections.Counter(re.findall(r"^\s+([a-z]\w+)", text, re.M))
    return dict(registers=number("vgpr_count"), spills=number("vgpr_spill_count"), stack=number("private_segment_fixed_size"), opcodes=opcodes)


def read_cubin(cubin, log):
    assert "bytes spill" in log, f"no compiler log, is the kernel cached? {log}"
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", log))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        run = lambda tool, *options: subprocess.run([BIN / tool, *options, f.name], capture_output=True, text=True, check=True, timeout=120).stdout
        usage, sass = run("cuobjdump", "--dump-resource-usage"), run("nvdisasm", "-c", "--no-dataflow")   # opcodes need no look at where data flows
    registers, stack, _, local = map(int, re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage).groups())
    opcodes = collections.Counter(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*(?:\.[A-Z0-9_]+)*)", sass, re.M))
    return dict(registers=registers, stack=stack + local, spills=spills, opcodes=opcodes)


def count(opcodes, prefix):
    "How many instructions start with `prefix`"
    return sum(n for op, n in opcodes.items() if op.startswith(prefix))


def compile_attention(arch, dtype, tiles, *args, **kwargs):
    "`compile_kernel` for `attention_kernel`, with the options that a launch has"
    return compile_kernel(attention_source(dtype, tiles, *args, **kwargs), arch, **K.launch_options(arch, tiles))


def wide_loads(opcodes):
    "How many of NVIDIA's loads from global memory move 128 bits"
    return sum(n for op, n in opcodes.items() if op.startswith(("LDG.", "LDGSTS.")) and ".128" in op)


def variant(module, changes, folder):
    "The module with pieces of its source replaced; every piece must be there"
    text = Path(module.__file__).read_text(encoding="utf-8").replace("from .", "from litevllm.kernels.")
    for old, new in changes:
        assert old in text, f"{old!r} is not in {module.__file__}"
        text = text.replace(old, new)
    path = Path(folder) / f"variant_{abs(hash(text))}.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def run_job(job, folder):
    """One report. A job: kernel ("paged" or "flash"), arch, dtype, tiles, heads [query, key], head_dim, and what else the source functions take;
    `changes`: [old, new] pairs of kernel source"""
    job = dict(job)
    kernel, arch, dtype, tiles, heads, head_dim = (job.pop(k) for k in ("kernel", "arch", "dtype", "tiles", "heads", "head_dim"))
    module, changes = K if kernel == "paged" else F, job.pop("changes", [])
    if changes: module = variant(module, changes, folder)
    tiles = K.Tiles(*tiles)
    if kernel == "paged": report = compile_attention(arch, dtype, tiles, *heads, head_dim, module=module, **job)
    else:
        made = flash_source(dtype, tiles.block_m, tiles.block_n, *heads, head_dim, module=module, **job)
        report = compile_kernel(made, arch, tiles.num_warps, tiles.num_stages)
    return report | dict(wide=wide_loads(report["opcodes"]), opcodes=dict(report["opcodes"]))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        print(json.dumps([run_job(job, cache) for job in json.load(sys.stdin)]))
