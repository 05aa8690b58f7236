"""Cases of public bug reports, by their ids: kernels, numerics and loading (N1 N2 N4 N7 L1)."""
import ast
import logging
import math
import random
import re
import shutil

import pytest
import torch
from case_tools import check_drained, check_like, check_live, core_of, generate, greedy, hf_logits, ids, solo
from model_harness import PagedModel
from safetensors.torch import load_file, save_file

from litevllm import LLM, SamplingParams
from litevllm.config import EngineArgs
from litevllm.model.loader import get_model
from litevllm.tiny import write_tiny_model

pytestmark = pytest.mark.timeout(60)
GUARD = -777.0


@pytest.fixture(autouse=True)
def in_process(monkeypatch): monkeypatch.setenv("LITEVLLM_ENABLE_MULTIPROCESSING", "0")


@pytest.fixture
def log(caplog):
    "Text of what the package logs."
    logger = logging.getLogger("litevllm")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def random_ids(rng, n): return [rng.randrange(3, 512) for _ in range(n)]


# ---- N1

class GuardedModel(PagedModel):
    "Each layer's cache lies between two strips of guard values; the cache itself starts full of NaN."
    def __init__(self, *args, **kw):
        super().__init__(*args, **kw)
        self.strips = []
        for layer in self.config.compilation_config.static_forward_context.values():
            shape, dtype, n = layer.kv_cache.shape, layer.kv_cache.dtype, layer.kv_cache.numel()
            memory = torch.full((n + 2 * 4096,), GUARD, dtype=dtype)
            layer.kv_cache = memory[4096:4096 + n].view(shape).fill_(float("nan"))
            self.strips += [memory[:4096], memory[4096 + n:]]

    def check_guards(self): assert all((s == GUARD).all() for s in self.strips), "something was written outside the cache"

    def held_slots(self):
        "(block, offset) of everything that was stored, and nothing else, is finite."
        stored = {(blocks[p // self.block_size], p % self.block_size) for n, blocks in self.requests.values() for p in range(n)}
        layer = next(iter(self.config.compilation_config.static_forward_context.values()))
        finite = layer.kv_cache.isfinite().all(-1).all(-1).all(0)      # [blocks, block_size]
        return stored == {(b, o) for b, o in finite.nonzero().tolist()}


@pytest.mark.parametrize("backend", ["CPU_ATTN", "TORCH_REF"])
@pytest.mark.parametrize("heads", ["9:3", "7:1", "28:4", "24:1"])
@pytest.mark.parametrize("head_dim", [40, 80, 96])
def test_N1_odd_shapes_equal_transformers(tmp_path, head_dim, heads, backend):
    """Head size and head ratio that no power of two divides, head_dim that is not hidden / heads, block sizes 1 to 256: prompts of b-1, b, b+1 and
    3b+2 ids in one batch, one in chunks, and a decode step each; and no write outside the cache or into a slot of nobody."""
    hq, hk = map(int, heads.split(":"))
    path = write_tiny_model(tmp_path, "llama", hidden_size=8 * hq, head_dim=head_dim, num_attention_heads=hq, num_key_value_heads=hk,
                            max_position_embeddings=1024, num_hidden_layers=1, intermediate_size=32)
    rng = random.Random(head_dim * hq)
    blocks = {"CPU_ATTN": (1, 8, 16, 32, 48, 256), "TORCH_REF": (1, 48)}[backend]
    for b in blocks:
        prompts = {str(n): random_ids(rng, n + 1) for n in sorted({max(b - 1, 1), b, b + 1, 3 * b + 2})}
        model = GuardedModel(path, block_size=b, num_blocks=4 * b + 24 if b < 4 else 32, attention_backend=backend)
        got = {r: [] for r in prompts}
        for chunk in (b // 2 + 1, 10**4):
            step = {r: p[sum(map(len, got[r])):-1][:chunk if int(r) > b else 10**4] for r, p in prompts.items()}
            for r, out in model.step({r: p for r, p in step.items() if p}).items(): got[r].append(out)
        for r, out in model.step({r: p[-1:] for r, p in prompts.items()}).items(): got[r].append(out)
        for r, p in prompts.items():
            torch.testing.assert_close(torch.cat(got[r]), hf_logits(path, p), rtol=0, atol=1e-4, msg=lambda m: f"block size {b}, {r} ids: {m}")
        model.check_guards()
        assert model.held_slots(), f"block size {b}: a slot was written that belongs to nobody, or one was not"


@pytest.mark.parametrize("arch, overrides", [
    ("opt", dict(hidden_size=80, num_attention_heads=1)), ("opt", dict(hidden_size=192, num_attention_heads=2, word_embed_proj_dim=192)),
    ("qwen2", dict(hidden_size=280, num_attention_heads=7, num_key_value_heads=1)),
    ("qwen3", dict(head_dim=96, num_attention_heads=9, num_key_value_heads=3)), ("mistral", dict(head_dim=80, sliding_window=9))])
def test_N1_odd_shapes_through_generate(tmp_path, arch, overrides):
    path = write_tiny_model(tmp_path, arch, **overrides)
    rng = random.Random(1)
    for b in (1, 8, 48):
        prompts = [random_ids(rng, n) for n in sorted({max(b - 1, 1), b, b + 1, 3 * b + 2})]
        with LLM(path, block_size=b, max_num_batched_tokens=50, max_num_seqs=8) as llm:
            for p, out in zip(prompts, generate(llm, prompts, greedy(6))):
                want = []
                while len(want) < 6: want.append(int(hf_logits(path, p + want)[-1].argmax()))
                check_like(path, p, ids(out), want, f"block size {b}")


# ---- N2

def poison(llm):
    """From now on whatever belongs to nobody holds NaN: the whole cache now, the free blocks (but for cached content) before each step, and each
    block that is handed out. The poison travels with the plan, so it acts when the plan does."""
    core, runner = core_of(llm), core_of(llm).model_executor.worker.model_runner
    scheduler, pool = core.scheduler, core.scheduler.kv_cache_manager.block_pool
    schedule, new_blocks, fresh, count = scheduler.schedule, pool.get_new_blocks, [], [0]
    for layer in runner.layers.values(): layer.kv_cache.fill_(float("nan"))

    def fill(blocks):
        for layer in runner.layers.values(): layer.kv_cache[:, blocks] = float("nan")
        count[0] += len(blocks)

    def handed_out(n):
        blocks = new_blocks(n)
        fresh.extend(b.block_id for b in blocks)
        return blocks

    def planned():
        fresh.clear()
        plan = schedule()
        plan.new_block_ids_to_zero = sorted({*fresh, 0} | {b.block_id for b in pool.free_block_queue.get_all_free_blocks() if b.block_hash is None})
        return plan
    scheduler.schedule, pool.get_new_blocks, runner.zero_blocks = planned, handed_out, fill
    return count


@pytest.mark.parametrize("backend", ["CPU_ATTN", "TORCH_REF"])
@pytest.mark.parametrize("options", [
    dict(), dict(async_scheduling=False), dict(num_gpu_blocks_override=14), dict(num_gpu_blocks_override=14, async_scheduling=False),
    dict(enable_prefix_caching=False, num_gpu_blocks_override=14), dict(max_num_batched_tokens=7, max_num_seqs=4)], ids=str)
def test_N2_nan_in_all_that_belongs_to_nobody(tiny_llama, backend, options):
    "Prompts that leave the last block partly filled; pools that preempt, so that blocks change hands; the tokens are those of a clean cache."
    rng = random.Random(2)
    prompts = [random_ids(rng, n) for n in (1, 3, 4, 5, 9, 16, 17)]
    with LLM(tiny_llama, block_size=4, attention_backend=backend, **options) as llm:
        count = poison(llm)
        for _ in range(2):      # the second time the prefix cache is warm
            for p, out in zip(prompts, generate(llm, prompts, greedy(15))):
                assert out.error is None, out
                check_like(tiny_llama, p, ids(out), solo(tiny_llama, p, 15), options)
        assert count[0] > 100 and ("num_gpu_blocks_override" in options) == (core_of(llm).scheduler.make_stats().num_preemptions > 0)
        check_drained(llm)


def test_N2_the_poison_acts(tiny_llama):
    "The check can fail: NaN in a block that somebody owns is noticed."
    with LLM(tiny_llama, block_size=4, async_scheduling=False, enable_prefix_caching=False) as llm:
        poison(llm)
        runner = core_of(llm).model_executor.worker.model_runner
        want, fill, calls = solo(tiny_llama, [5, 6, 7, 8, 9], 6), runner.zero_blocks, []

        def spread(blocks):
            calls.append(1)
            fill(blocks if len(calls) != 3 else list(range(core_of(llm).scheduler.kv_cache_manager.block_pool.num_gpu_blocks)))
        runner.zero_blocks = spread
        out, = generate(llm, [5, 6, 7, 8, 9], greedy(6))
        assert out.error is not None or ids(out) != want


# ---- N4

def loads_of_block_numbers(path):
    "(line, whether the value is widened to 64 bits at once) of every `tl.load` of a block table or a slot mapping."
    tree = ast.parse(path.read_text())
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.load" and re.search("table|slot", ast.unparse(node.args[0]))): continue
        to = parents[node]
        widened = isinstance(to, ast.Attribute) and to.attr == "to" and ast.unparse(parents[to]).endswith(".to(tl.int64)")
        yield node.lineno, widened


def test_N4_every_block_number_is_widened_before_it_is_multiplied(root):
    """Read from the source. What a high block really gives: test_slot_beyond_two_to_the_31_elements of tests/test_cpu_attention.py (numba) and of
    tests/interp/paged_attention_checks.py (Triton)."""
    found = [load for name in ("paged_attention", "kv_write") for load in loads_of_block_numbers(root / "kernels" / f"{name}.py")]
    assert len(found) >= 3 and all(widened for _, widened in found), found
    cpu = (root / "kernels" / "cpu_attention.py").read_text()
    assert not re.search(r"(?<!np\.int64\()table\[", cpu), "a block number of 32 bits is used as it is"


@pytest.mark.parametrize("backend", ["CPU_ATTN", "TORCH_REF"])
@pytest.mark.parametrize("length", [4, 12, 16, 31])
def test_N2_a_request_that_met_nan_leaves_none_of_it_to_its_prefix(tiny_llama, tmp_path, backend, length):
    "One row of the embedding is broken. Who uses it fails; who begins with the same tokens gets the right ones, and not its pages."
    broken = shutil.copytree(tiny_llama, tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["model.embed_tokens.weight"][300] = math.nan
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    prefix, params = [5 + 3 * i for i in range(length)], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with LLM(tiny_llama, block_size=4, attention_backend=backend) as llm: want = llm.generate([prefix + [7]], params, use_tqdm=False)[0].outputs[0].token_ids
    with LLM(str(broken), block_size=4, attention_backend=backend) as llm:
        assert "not finite" in llm.generate([prefix + [300]], params, use_tqdm=False)[0].error
        clean = llm.generate([prefix + [7]], params, use_tqdm=False)[0]
        assert clean.error is None and clean.outputs[0].token_ids == want and clean.num_cached_tokens == 0
        assert llm.generate([prefix + [7]], params, use_tqdm=False)[0].num_cached_tokens == length // 4 * 4


# ---- N7

def watch_logits(llm):
    "A list that grows by the logits [rows, vocab] of every step, before the sampler changes them."
    model, seen = core_of(llm).model_executor.worker.model_runner.model, []
    compute = model.compute_logits

    def computed(*args):
        logits = compute(*args)
        seen.append(logits.float().clone())
        return logits
    model.compute_logits = computed
    return seen


@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-5), ("bfloat16", 0.15), ("float16", 0.02)])
def test_N7_one_prompt_in_batches_of_1_2_7_and_32(tiny_llama, dtype, tolerance):
    "float32: the same tokens in every batch. 16 bits: logits within a tolerance; tokens may differ from there on, as the front page says."
    rng = random.Random(7)
    prompt, others = random_ids(rng, 11), [random_ids(rng, rng.randint(1, 20)) for _ in range(31)]
    with LLM(tiny_llama, dtype=dtype, enable_prefix_caching=False, async_scheduling=False) as llm:
        seen, runs = watch_logits(llm), {}
        for n in (1, 2, 7, 32):
            seen.clear()
            out = generate(llm, [prompt, *others[:n - 1]], greedy(12))[0]
            assert len(seen) == 12 and all(len(step) == n for step in seen)
            runs[n] = ids(out), torch.stack([step[0] for step in seen])
    tokens, logits = runs[1]
    assert logits.std() > 0.1
    for n in (2, 7, 32):
        other, theirs = runs[n]
        same = next((i for i, (a, b) in enumerate(zip(tokens, other)) if a != b), 11) + 1      # the steps whose inputs were the same
        assert (logits[:same] - theirs[:same]).abs().max() <= tolerance, n
        if dtype == "float32": check_like(tiny_llama, prompt, other, tokens, n)
    exact = torch.stack([hf_logits(tiny_llama, prompt + tokens[:i])[-1] for i in range(12)])
    assert (logits - exact).abs().max() <= tolerance


def test_N7_the_front_page_says_that_16_bit_tokens_may_differ(root):
    assert re.search(r"promised for float32\.\s+In bfloat16 and float16.*?batch\s+size.*?other way", (root / "README.md").read_text(), re.S)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("params", [greedy(8), SamplingParams(temperature=1.0, max_tokens=8, seed=1)], ids=["greedy", "random"])
def test_N7_an_overflow_of_float16_is_noticed(tmp_path, params, n):
    "Weights 300 times too large: the residual passes 65504 and the logits are no numbers. The request ends with the reason; no run of token 0."
    path = write_tiny_model(tmp_path, "llama")
    weights = load_file(f"{path}/model.safetensors")
    save_file({n: t * (1 if t.dim() == 1 else 300) for n, t in weights.items()}, f"{path}/model.safetensors")
    with LLM(path, dtype="float16") as llm:
        for out in generate(llm, [[5, 6, 7]] * n, params):
            assert out.finished and (out.outputs[0].finish_reason, ids(out)) == ("error", []) and "finite" in out.error, out
        check_drained(llm)
    with LLM(path, dtype="float32") as llm: check_live(llm)      # float32 holds them


@pytest.mark.parametrize("asked, checkpoint, got", [("auto", "float16", "float32"), ("auto", "bfloat16", "float32"), ("auto", "float32", "float32"),
                                                    ("float16", "float32", "float16"), ("bfloat16", "float16", "bfloat16")])
def test_N7_the_dtype_is_chosen_by_the_written_rule_and_logged(tmp_path, log, asked, checkpoint, got):
    path = write_tiny_model(tmp_path, "llama", dtype=checkpoint)
    log.set_level(logging.INFO)
    with LLM(path, dtype=asked) as llm:
        weights = next(core_of(llm).model_executor.worker.model_runner.model.parameters())
        assert (llm.llm_engine.model_config.dtype, weights.dtype) == (got, getattr(torch, got))
        assert f"model in {got}, cache in " in log.text
        if checkpoint != got and asked == "auto": assert f"dtype=auto: {checkpoint} weights run as float32" in log.text
        out, = generate(llm, [5, 6, 7], greedy(4))
        assert out.outputs[0].finish_reason == "length" and math.isfinite(out.num_cached_tokens)


# ---- L1

@pytest.mark.parametrize("arch, name", [(a, n) for a in ("llama", "mistral", "smollm2", "qwen3") for n in "qkvo"] + [("qwen2", "o")])
def test_L1_a_bias_that_the_class_has_no_place_for_is_named(tmp_path, arch, name):
    "Qwen2 keeps q, k and v biases: in another class they must not be dropped in silence."
    path = write_tiny_model(tmp_path, arch)
    weights = load_file(f"{path}/model.safetensors")
    full = f"model.layers.1.self_attn.{name}_proj.bias"
    rows = len(weights[full.replace("bias", "weight")])
    save_file(weights | {full: torch.full((rows,), 0.1)}, f"{path}/model.safetensors")
    with pytest.raises(ValueError, match=re.escape(full)): get_model(EngineArgs(model=path, device="cpu").create_engine_config())


@pytest.mark.parametrize("arch", ["llama", "qwen2", "opt"])
def test_L1_a_tied_model_that_stores_its_head_too(tmp_path, arch):
    "One shared tensor, and the logits of transformers; without the tie a missing head is named."
    path = write_tiny_model(tmp_path, arch, tie_word_embeddings=True)
    table = "model.decoder.embed_tokens.weight" if arch == "opt" else "model.embed_tokens.weight"
    weights = load_file(f"{path}/model.safetensors")
    save_file(weights | {"lm_head.weight": weights[table].clone()}, f"{path}/model.safetensors")
    model, text = PagedModel(path), random_ids(random.Random(1), 20)
    storages = {p.data_ptr() for name, p in model.model.named_parameters(remove_duplicate=False) if "lm_head" in name or "embed_tokens" in name}
    assert len(storages) == 1
    torch.testing.assert_close(model.step({"A": text})["A"], hf_logits(path, text), rtol=0, atol=1e-4)
    untied = write_tiny_model(tmp_path / "untied", arch)
    weights = load_file(f"{untied}/model.safetensors")
    save_file({n: t for n, t in weights.items() if n != "lm_head.weight"}, f"{untied}/model.safetensors")
    with pytest.raises(ValueError, match="lm_head.weight"): get_model(EngineArgs(model=untied, device="cpu").create_engine_config())
