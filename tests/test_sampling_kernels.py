"""The code that the compiler makes of the sampling kernels for GPUs that are not there; test_kernels_interp.py has their numerics and planted bugs."""
import pytest
import torch
from aot_tools import SHARED_LIMIT, compile_kernel, count, source

import litevllm.kernels.sampling as K
from litevllm.worker.sampler import SamplingMetadata

POINTERS = dict.fromkeys("winner_ptr tie_ptr keys_ptr top_k_ptr counts_ptr columns_ptr token_ids_ptr words_ptr tokens_ptr".split(), "*i32")
POINTERS |= dict.fromkeys("best_ptr logits_ptr cut_ptr buffer_ptr temperature_ptr min_p_ptr top_p_ptr".split(), "*fp32")
TYPES = POINTERS | dict.fromkeys(("vocab_size", "num_blocks", "num_rows", "num_words"), "i32") | dict(token_ptr="*i64", failed_ptr="*i8")
UNALIGNED = "temperature_ptr", "min_p_ptr", "top_k_ptr", "top_p_ptr", "keys_ptr", "tokens_ptr", "token_ids_stride"
KERNELS = {  # warps, what it is compiled for; vocabularies that are multiples of 16, as those of Llama, Qwen and SmolLM2
    "cut": (K.cut_kernel, 8, dict(BLOCK=K.SWEEP, CAP=K.CANDIDATES)),
    "top_k alone": (K.cut_kernel, 8, dict(BLOCK=K.SWEEP, CAP=K.CANDIDATES, min_p_ptr=None, top_p_ptr=None)),
    "race": (K.race_kernel, 4, dict(BLOCK=K.RACE)),
    "greedy race": (K.race_kernel, 4, dict(BLOCK=K.RACE, temperature_ptr=None, keys_ptr=None, cut_ptr=None, tie_ptr=None)),
    "pick": (K.pick_kernel, 1, dict(BLOCKS=128)),
    "count": (K.count_kernel, 2, dict(BLOCK=K.HISTORY)),
    "penalize": (K.penalize_kernel, 2, dict(BLOCK=K.HISTORY)),
    "bad words": (K.bad_words_kernel, 1, dict(BLOCK=16)),
}
EVERYWHERE = "cut", "race", "penalize"


@pytest.mark.parametrize("arch, name", [(arch, name) for arch in (80, 90, 100, "gfx942") for name in KERNELS if arch == 90 or name in EVERYWHERE])
def test_code(arch, name, empty_triton_cache):
    kernel, warps, constants = KERNELS[name]
    src = source(kernel, TYPES | {n: "constexpr" for n, value in constants.items() if value is None}, constants, unaligned=UNALIGNED)
    if "vocab_size" in kernel.arg_names: src.attrs[(kernel.arg_names.index("vocab_size"),)] = [["tt.divisibility", 16]]
    report = compile_kernel(src, arch, warps)
    ops = report.pop("opcodes")
    print(arch, name, report)
    assert report["spills"] == 0 and report["stack"] == 0 and report["shared"] <= SHARED_LIMIT[arch] // 4
    if arch == "gfx942": return
    if kernel in (K.cut_kernel, K.race_kernel): assert sum(n for op, n in ops.items() if op.startswith("LDG") and op.endswith(".128")) > 0, "no 128-bit loads"
    assert count(ops, "MUFU.LG2") == 0, "the approximate logarithm has few digits near 1, where the noise needs them"
    assert report["registers"] <= 65536 // (2 * 32 * warps), "two programs on a multiprocessor"


def test_without_a_gpu_and_without_the_interpreter_the_error_says_what_to_do():
    logits, one = torch.zeros(1, 4), torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"): K.sample(logits, SamplingMetadata(True))
    for apply in (K.apply_penalties, K.apply_bad_words):
        with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"): apply(logits, one, None)
