"""Greedy output equals transformers' token for token, whatever the schedule (float32)."""
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from litevllm import LLM, SamplingParams
from litevllm.hub import resolve_model
from litevllm.tiny import write_tiny_model
from parity import count_skips, hf_greedy

ARCHS = ["llama", "mistral", "smollm2", "qwen2", "qwen3", "opt"]
SEED = 20261129


def prompts_of(seed, vocab, lengths):
    rng = random.Random(seed)
    return [[rng.randrange(3, vocab) for _ in range(n)] for n in lengths]


def greedy(n): return SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)


def run(model, prompts, params, **kw):
    "Token ids of every prompt, and how often a request was preempted (in-process)."
    with LLM(model, **kw) as llm:
        outs = llm.generate(prompts, params, use_tqdm=False)
        core = llm.llm_engine.engine_core.engine_core
        running, waiting = core.scheduler.get_request_counts()
        assert (running, waiting) == (0, 0)
        assert core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1
        preemptions = core.scheduler.make_stats().num_preemptions
    return [list(o.outputs[0].token_ids) for o in outs], preemptions


@pytest.fixture
def in_process(monkeypatch): monkeypatch.setenv("LITEVLLM_ENABLE_MULTIPROCESSING", "0")


@pytest.mark.parametrize("arch", ARCHS)
def test_every_architecture(arch, tmp_path, in_process):
    path = write_tiny_model(str(tmp_path / arch), arch)
    hf = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    prompts = prompts_of(SEED, hf.config.vocab_size, [1, 5, 16, 17, 33, 60])
    print("seed", SEED)
    ours, _ = run(path, prompts, greedy(24))
    skips = sum(count_skips(hf, p, o, 24) for p, o in zip(prompts, ours))
    assert skips or ours == [hf_greedy(hf, p, 24) for p in prompts]
    print(arch, "near ties skipped:", skips)
    assert skips <= 2, f"{skips} of {24 * len(prompts)} steps were near ties: no comparison"


PLAIN = dict(enable_prefix_caching=False, async_scheduling=False)
VARIANTS = {
    "plain": PLAIN,
    "default": {},
    "budget 7": dict(max_num_batched_tokens=7, max_num_seqs=7),
    "budget 7, sync": dict(max_num_batched_tokens=7, max_num_seqs=7, async_scheduling=False),
    "chunk 5": dict(long_prefill_token_threshold=5),
    "chunking off": dict(enable_chunked_prefill=False),
    "one at a time": dict(max_num_seqs=1),
    "block size 1": dict(block_size=1),
    "block size 5": dict(block_size=5),
    "block size 64": dict(block_size=64),
    "preemption, sync": dict(num_gpu_blocks_override=26, block_size=4, async_scheduling=False),
    "preemption, async": dict(num_gpu_blocks_override=26, block_size=4),
    "preemption, no cache": dict(num_gpu_blocks_override=26, block_size=4, enable_prefix_caching=False),
    "preemption, priority": dict(num_gpu_blocks_override=26, block_size=4, scheduling_policy="priority"),
    "preemption, chunks": dict(num_gpu_blocks_override=26, block_size=4, max_num_batched_tokens=9, max_num_seqs=8),
    "reference attention": dict(attention_backend="TORCH_REF"),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = write_tiny_model(str(tmp_path_factory.mktemp("tiny") / "llama"), "llama")
    shared = prompts_of(SEED, 512, [24])[0]
    prompts = prompts_of(SEED + 1, 512, [1, 3, 9, 16, 31, 40]) + [shared + p for p in prompts_of(SEED + 2, 512, [2, 9])] + [shared]
    hf = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return path, prompts, hf


@pytest.mark.parametrize("variant", VARIANTS)
def test_schedule_changes_nothing(variant, tiny, in_process):
    path, prompts, hf = tiny
    ours, preemptions = run(path, prompts, greedy(20), **VARIANTS[variant])
    assert ("preemption" in variant) == (preemptions > 0), preemptions
    skips = sum(count_skips(hf, p, o, 20) for p, o in zip(prompts, ours))
    assert skips <= 2, skips


def test_batch_mates_change_nothing(tiny, in_process):
    path, prompts, hf = tiny
    together, _ = run(path, prompts, greedy(20))
    with LLM(path) as llm:
        alone = [list(llm.generate([p], greedy(20), use_tqdm=False)[0].outputs[0].token_ids) for p in prompts]
    for p, a, b in zip(prompts, together, alone): assert a == b or count_skips(hf, p, a, 20) + count_skips(hf, p, b, 20) > 0


def test_child_process_changes_nothing(tiny):
    path, prompts, hf = tiny
    with LLM(path) as llm:
        ours = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, greedy(20), use_tqdm=False)]
    assert sum(count_skips(hf, p, o, 20) for p, o in zip(prompts, ours)) <= 2


REAL_PROMPTS = [
    "The capital of France is", "Water boils at a temperature of", "def fibonacci(n):\n", "Once upon a time, in a small village,",
    "The three primary colours are", "Q: What is 7 times 8?\nA:", "Dear Sir or Madam,\n\nI am writing to", "Die Hauptstadt von Deutschland ist",
]


def test_smollm2_on_real_prompts():
    path = resolve_model("HuggingFaceTB/SmolLM2-135M-Instruct")
    hf = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tok = AutoTokenizer.from_pretrained(path)
    with LLM("HuggingFaceTB/SmolLM2-135M-Instruct", max_model_len=512) as llm:
        outs = llm.generate(REAL_PROMPTS, greedy(24), use_tqdm=False)
    skips = 0
    for prompt, out in zip(REAL_PROMPTS, outs):
        assert out.prompt_token_ids == tok(prompt).input_ids
        ours = list(out.outputs[0].token_ids)
        assert out.outputs[0].text == tok.decode(out.prompt_token_ids + ours, skip_special_tokens=True)[len(prompt):]
        here = count_skips(hf, out.prompt_token_ids, ours, 24)
        if prompt is REAL_PROMPTS[0]: assert here or ours == hf_greedy(hf, out.prompt_token_ids, 24)
        skips += here
    print("SmolLM2-135M near ties skipped:", skips)
    assert skips <= 2, skips
