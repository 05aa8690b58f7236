"""Compile the Triton kernels for a GPU that is not there, and read what the compiler made of them.

Needs a process without TRITON_INTERPRET. ptxas, cuobjdump and nvdisasm come with triton's wheel."""
import collections
import contextlib
import io
import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import litevllm.kernels.paged_attention as K

BIN = Path(triton.__file__).parent / "backends/nvidia/bin"
TRITON_TYPE = {"float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32"}
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}
MULTIPROCESSORS = {80: 108, 90: 132, "gfx942": 304}
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, "gfx942": 64 * 1024}


def target(arch):
    "The compile target of an arch as `choose_tiles` names it"
    return GPUTarget("hip", arch, 64) if isinstance(arch, str) else GPUTarget("cuda", arch, 32)


def source(fn, types, constants, unaligned=()):
    """The compiler's input for one kernel, specialised as the JIT would: pointers and strides divisible by 16 unless named in `unaligned`.

    `types`: Triton type per run-time argument; arguments annotated in the kernel need no entry."""
    signature, attrs = {}, {}
    for i, param in enumerate(fn.params):
        if param.is_constexpr:
            signature[param.name] = "constexpr"
            continue
        signature[param.name] = types.get(param.name) or param.annotation_type
        if (signature[param.name].startswith("*") or "stride" in param.name) and param.name not in unaligned:
            attrs[(i,)] = [["tt.divisibility", 16]]
    names = fn.arg_names
    return ASTSource(fn=fn, signature=signature, constexprs={(names.index(n),): v for n, v in constants.items()}, attrs=attrs)


def attention_source(dtype, tiles, num_q_heads, num_kv_heads, head_dim, block_size=16, window_size=0, softcap=0.0):
    p = TRITON_TYPE[dtype]
    types = dict(out_ptr=p, part_ptr="*fp32", part_m_ptr="*fp32", part_l_ptr="*fp32", q_ptr=p, k_cache_ptr=p, v_cache_ptr=p, table_ptr="*i32",
                 seq_len_ptr="*i32", start_ptr="*i32", scale="fp32", cap="fp32", num_seqs="i32")
    constants = K.launch_constants(tiles, num_q_heads, num_kv_heads, head_dim, block_size, window_size, softcap)
    return source(K.attention_kernel, types, constants, unaligned=("table_stride",))


def write_source(dtype, num_kv_heads, head_dim, block_size=16):
    types = {n: TRITON_TYPE[dtype] for n in ("key_ptr", "value_ptr", "key_cache_ptr", "value_cache_ptr")} | {"slot_ptr": "*i64"}
    return source(K.write_kernel, types, K.write_constants(num_kv_heads, head_dim, block_size))


def write_old_source(dtype, num_kv_heads, head_dim, block_size=16):
    types = {n: TRITON_TYPE[dtype] for n in ("key_ptr", "value_ptr", "key_cache_ptr", "value_cache_ptr")} | {"slot_ptr": "*i64"}
    constants = K.write_constants(num_kv_heads, head_dim, block_size) | {"X": 16 // ITEMSIZE[dtype]}
    return source(K.write_old_layout_kernel, types, constants)


def reduce_source(dtype, num_q_heads, head_dim, num_splits):
    types = dict(out_ptr=TRITON_TYPE[dtype], part_ptr="*fp32", part_m_ptr="*fp32", part_l_ptr="*fp32", start_ptr="*i32", num_seqs="i32")
    constants = dict(NUM_HEADS=num_q_heads, HEAD_DIM=head_dim, HEAD_PAD=K.padded_head_dim(head_dim), NUM_SPLITS=num_splits)
    return source(K.reduce_kernel, types, constants)


def compile_kernel(src, arch, num_warps, num_stages=1):
    """Compile, and report: dict(registers, stack, spills, shared [bytes], opcodes Counter).

    Spill bytes are what ptxas says while triton runs it, so triton's cache must not know the kernel yet."""
    log = io.StringIO()
    with contextlib.redirect_stdout(log), triton.knobs.nvidia.scope():
        triton.knobs.nvidia.dump_ptxas_log = True
        options = dict(num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=True)
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
        run = lambda *options: subprocess.run([BIN / "cuobjdump", *options, f.name], capture_output=True, text=True, check=True, timeout=120).stdout
        usage, sass = run("--dump-resource-usage"), run("-sass")
    registers, stack, _, local = map(int, re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage).groups())
    opcodes = collections.Counter(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*(?:\.[A-Z0-9_]+)*)", sass, re.M))
    return dict(registers=registers, stack=stack + local, spills=spills, opcodes=opcodes)


def count(opcodes, prefix):
    "How many instructions start with `prefix`"
    return sum(n for op, n in opcodes.items() if op.startswith(prefix))
