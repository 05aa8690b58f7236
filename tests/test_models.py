"""Every architecture against transformers in float32, in chunks through the paged cache; the loader's errors; the forward context."""
import json, os, random, shutil, subprocess, sys, types

import pytest, torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging as hf_logging

from litevllm.config import EngineArgs
from litevllm.engine.core import EngineCore
from litevllm.messages import EngineCoreRequest
from litevllm.model.attention import Attention
from litevllm.model.forward_context import get_forward_context, set_forward_context
from litevllm.model.loader import get_model, get_model_class
from litevllm.sampling_params import SamplingParams
from litevllm.tiny import write_tiny_model
from model_harness import PagedModel

hf_logging.disable_progress_bar()
torch.set_num_threads(1)
TRAINED = dict(original_max_position_embeddings=32, rope_theta=10000.0)
LLAMA3 = dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, **TRAINED)
YARN = dict(rope_type="yarn", factor=4.0, **TRAINED)


def random_ids(n, seed=0, vocab=512):
    rng = random.Random(seed)
    return [rng.randrange(3, vocab) for _ in range(n)]


def hf_logits(path, ids, **kwargs):
    model = AutoModelForCausalLM.from_pretrained(path, **kwargs)
    with torch.no_grad(): return model(torch.tensor([ids])).logits[0].float()


def chunked(model, ids, sizes, **kwargs):
    "Logits of ids, run in chunks of these sizes and then one by one."
    out, at = [], 0
    while at < len(ids):
        n = sizes.pop(0) if sizes else 1
        out.append(model.step({"A": ids[at:at + n]}, **kwargs)["A"])
        at += n
    return torch.cat(out)


ARCHITECTURES = {
    "llama": ("llama", {}), "llama tied": ("llama", dict(tie_word_embeddings=True)), "smollm2": ("smollm2", {}),
    "llama biases": ("llama", dict(attention_bias=True, mlp_bias=True)),
    "llama own head_dim": ("llama", dict(head_dim=24)), "llama theta": ("llama", dict(rope_parameters=dict(rope_type="default", rope_theta=500.0))),
    "mistral": ("mistral", dict(sliding_window=None)), "mistral window": ("mistral", dict(sliding_window=7)), "mistral head_dim": ("mistral", dict(head_dim=40)),
    "qwen2": ("qwen2", {}), "qwen2 tied": ("qwen2", dict(tie_word_embeddings=True)),
    "qwen2 window off": ("qwen2", dict(use_sliding_window=False, sliding_window=5, max_window_layers=0)),
    "qwen2 window some": ("qwen2", dict(use_sliding_window=True, sliding_window=5, max_window_layers=1, num_hidden_layers=3)),
    "qwen3": ("qwen3", {}), "qwen3 bias": ("qwen3", dict(attention_bias=True, tie_word_embeddings=True)),
    "qwen3 window": ("qwen3", dict(use_sliding_window=True, sliding_window=9, max_window_layers=1)),
    "opt": ("opt", {}), "opt tied": ("opt", dict(tie_word_embeddings=True)), "opt post-norm": ("opt", dict(do_layer_norm_before=False, word_embed_proj_dim=32)),
    "opt gelu": ("opt", dict(activation_function="gelu")), "opt gelu_new": ("opt", dict(activation_function="gelu_new")),
    "opt no bias": ("opt", dict(enable_bias=False)), "opt no affine": ("opt", dict(layer_norm_elementwise_affine=False)),
    "rope linear": ("llama", dict(rope_parameters=dict(rope_type="linear", factor=2.5, rope_theta=10000.0))),
    "rope llama3": ("llama", dict(rope_parameters=LLAMA3)), "rope yarn": ("qwen2", dict(rope_parameters=YARN)),
    "rope yarn options": ("llama", dict(rope_parameters=YARN | dict(beta_fast=16.0, beta_slow=2.0, attention_factor=1.3))),
    "rope yarn mscale": ("llama", dict(rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=0.8, truncate=False))),
    "heads 9:3": ("llama", dict(hidden_size=72, num_attention_heads=9, num_key_value_heads=3, head_dim=8)),
    "heads 7:1": ("llama", dict(hidden_size=112, num_attention_heads=7, num_key_value_heads=1, head_dim=16)),
    "heads 28:4": ("qwen3", dict(hidden_size=56, num_attention_heads=28, num_key_value_heads=4, head_dim=16)),
    "heads 24:1": ("llama", dict(hidden_size=96, num_attention_heads=24, num_key_value_heads=1, head_dim=16)),
    "head_dim 80": ("llama", dict(head_dim=80)), "head_dim 96": ("mistral", dict(head_dim=96)), "head_dim 40": ("opt", dict(hidden_size=160, word_embed_proj_dim=160)),
}


@pytest.mark.parametrize("case", ARCHITECTURES)
def test_logits_equal_transformers(tmp_path, case):
    arch, overrides = ARCHITECTURES[case]
    path = write_tiny_model(tmp_path, arch, **overrides)
    ids = random_ids(60)
    want = hf_logits(path, ids)
    got = chunked(PagedModel(path, block_size=8), ids, [13, 16, 1, 1, 20])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    assert want.std() > 0.1   # the model is not so flat that anything would pass


@pytest.mark.parametrize("block_size", [1, 8, 16, 24, 48, 256])
def test_block_sizes(tmp_path, block_size):
    "A prompt one token short of a block, a whole block, one more, and three blocks and two; each followed by three decodes."
    path = write_tiny_model(tmp_path, "llama", max_position_embeddings=1024, num_attention_heads=9, num_key_value_heads=3, head_dim=8, hidden_size=72)
    lengths = {f"{n}": max(n, 1) for n in (block_size - 1, block_size, block_size + 1, 3 * block_size + 2)}
    prompts = {req: random_ids(n + 3, seed=n) for req, n in lengths.items()}
    model = PagedModel(path, block_size=block_size, num_blocks=64)
    got = {req: [out] for req, out in model.step({req: ids[:lengths[req]] for req, ids in prompts.items()}).items()}
    for i in range(3):
        for req, out in model.step({req: [ids[lengths[req] + i]] for req, ids in prompts.items()}).items(): got[req].append(out)
    for req, ids in prompts.items():
        torch.testing.assert_close(torch.cat(got[req]), hf_logits(path, ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize("backend", ["CPU_ATTN", "TORCH_REF"])
@pytest.mark.parametrize("arch", ["llama", "mistral", "opt"])
def test_requests_do_not_see_each_other(tmp_path, arch, backend):
    "Random interleaving of five requests, chunks and decodes mixed, padded batches: each equals its own run in transformers."
    path = write_tiny_model(tmp_path, arch, **(dict(sliding_window=11) if arch == "mistral" else {}))
    rng = random.Random(seed := random.randrange(1 << 30))
    print(f"seed {seed}")
    texts = {f"r{i}": random_ids(rng.randrange(2, 40), seed=seed + i) for i in range(5)}
    model, done, got = PagedModel(path, block_size=4, attention_backend=backend), dict.fromkeys(texts, 0), {req: [] for req in texts}
    while any(done[r] < len(texts[r]) for r in texts):
        chunks = {r: texts[r][done[r]:done[r] + rng.choice([1, 1, 3, 9])] for r in texts if done[r] < len(texts[r]) and rng.random() < .7}
        if not chunks: continue
        for r, out in model.step(chunks, pad_to=rng.choice([None, 32])).items():
            got[r].append(out)
            done[r] += len(chunks[r])
    for r, ids in texts.items(): torch.testing.assert_close(torch.cat(got[r]), hf_logits(path, ids), rtol=0, atol=1e-4)


def test_dynamic_rope_past_the_trained_length(tmp_path):
    "As transformers fed a short prompt and then token by token; and independent of how the text is cut."
    path = write_tiny_model(tmp_path, "llama", max_position_embeddings=24, rope_parameters=dict(rope_type="dynamic", factor=4.0, rope_theta=10000.0))
    ids, hf, cache, want = random_ids(60), AutoModelForCausalLM.from_pretrained(path), None, []
    for a, b in [(0, 20)] + [(i, i + 1) for i in range(20, 60)]:
        with torch.no_grad(): out = hf(torch.tensor([ids[a:b]]), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        want.append(out.logits[0])
    got = chunked(PagedModel(path, block_size=8), ids, [7, 13])
    torch.testing.assert_close(got, torch.cat(want), rtol=0, atol=1e-4)
    torch.testing.assert_close(chunked(PagedModel(path, block_size=8), ids, [60]), got, rtol=0, atol=1e-4)


def edit_config(path, **fields):
    file = os.path.join(path, "config.json")
    config = json.load(open(file)) | fields
    json.dump({k: v for k, v in config.items() if v is not None}, open(file, "w"))


def test_older_rope_fields(tmp_path):
    "rope_theta and rope_scaling, as checkpoints from before transformers 5 have them."
    path = write_tiny_model(tmp_path, "llama")
    edit_config(path, rope_parameters=None, rope_theta=700.0, rope_scaling=dict(type="linear", factor=3.0))
    ids = random_ids(30)
    want = hf_logits(path, ids)
    torch.testing.assert_close(chunked(PagedModel(path), ids, [30]), want, rtol=0, atol=1e-4)
    edit_config(path, rope_theta=10000.0, rope_scaling=None)
    assert (hf_logits(path, ids) - want).abs().max() > 0.01   # the fields made a difference


@pytest.mark.parametrize("rope", [dict(rope_type="longrope", short_factor=[1.0] * 8, long_factor=[2.0] * 8, factor=2.0, **TRAINED), dict(rope_type="spiral", factor=2.0, rope_theta=1e4)])
def test_other_rope_types_are_refused_by_name(tmp_path, rope):
    path = write_tiny_model(tmp_path, "llama")
    edit_config(path, rope_parameters=rope)
    with pytest.raises(ValueError, match=rope["rope_type"]): get_model(EngineArgs(model=path, device="cpu").create_engine_config())


def test_partial_rotation_is_refused(tmp_path):
    path = write_tiny_model(tmp_path, "llama")
    edit_config(path, rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5))
    with pytest.raises(ValueError, match="partial_rotary_factor 0.5"): get_model(EngineArgs(model=path, device="cpu").create_engine_config())


@pytest.mark.parametrize("dtype, tolerance", [("bfloat16", 0.15), ("float16", 0.02)])
@pytest.mark.parametrize("arch", ["llama", "qwen3", "opt"])
@pytest.mark.parametrize("backend", ["CPU_ATTN", "TORCH_REF"])
def test_16_bit(tmp_path, arch, dtype, tolerance, backend):
    path = write_tiny_model(tmp_path, arch)
    ids = random_ids(40)
    model = PagedModel(path, dtype=dtype, attention_backend=backend)
    got = chunked(model, ids, [20, 10])
    assert got.dtype == torch.float32 and next(model.model.parameters()).dtype == getattr(torch, dtype)
    torch.testing.assert_close(got, hf_logits(path, ids, dtype=torch.float32), rtol=0, atol=tolerance)


def test_warm_up_without_metadata_leaves_the_cache_alone(tmp_path):
    model = PagedModel(write_tiny_model(tmp_path, "llama"))
    with torch.inference_mode(), set_forward_context(None, model.config):
        hidden = model.model(torch.zeros(5, dtype=torch.long), torch.zeros(5, dtype=torch.long))
    assert hidden.isfinite().all()
    assert all(layer.kv_cache.isnan().all() for layer in model.config.compilation_config.static_forward_context.values())


# ---- loading

def load(path): return get_model(EngineArgs(model=str(path), device="cpu").create_engine_config())


def rewrite(path, **changes):
    "Change tensors of model.safetensors: name (dots as __) -> tensor, or None to drop it."
    file = os.path.join(path, "model.safetensors")
    weights = load_file(file) | {name.replace("__", "."): t for name, t in changes.items()}
    save_file({n: t for n, t in weights.items() if t is not None}, file)


FAULTS = {
    "missing": ("llama", dict(model__layers__1__mlp__up_proj__weight=None), "lacks 1 tensor.*model.layers.1.mlp.up_proj.weight"),
    "missing head": ("llama", dict(lm_head__weight=None), "lacks 1 tensor.*lm_head.weight"),
    "missing bias": ("qwen2", dict(model__layers__0__self_attn__k_proj__bias=None), "lacks 1 tensor.*model.layers.0.self_attn.k_proj.bias"),
    "bias nobody uses": ("llama", dict(model__layers__0__self_attn__q_proj__bias=torch.zeros(64)), "does not use.*model.layers.0.self_attn.q_proj.bias"),
    "unknown": ("opt", dict(model__extra=torch.zeros(2)), "does not use.*model.extra"),
    "layer too many": ("llama", dict(model__layers__2__input_layernorm__weight=torch.ones(64)), "does not use.*model.layers.2.input_layernorm.weight"),
    "shape": ("llama", dict(model__norm__weight=torch.ones(63)), r"model.norm.weight .*\[63\].*\[64\]"),
    "shape of a slice": ("llama", dict(model__layers__0__self_attn__k_proj__weight=torch.ones(64, 64)), r"k_proj.weight .*\[64, 64\].*\[32, 64\]"),
    "shape of a tied head": ("smollm2", dict(lm_head__weight=torch.ones(500, 64)), r"lm_head.weight .*\[500, 64\].*\[512, 64\]"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_checkpoints_name_the_tensor(tmp_path, fault):
    arch, changes, message = FAULTS[fault]
    path = write_tiny_model(tmp_path, arch)
    load(path)
    rewrite(path, **changes)
    with pytest.raises(ValueError, match=message): load(path)


def test_every_weight_is_used(tmp_path):
    "Change one tensor after the other: the logits notice each of them."
    for arch, extra in (("llama", dict(attention_bias=True, mlp_bias=True)), ("qwen3", {}), ("opt", dict(word_embed_proj_dim=32))):
        path = write_tiny_model(tmp_path / arch, arch, num_hidden_layers=1, **extra)
        ids = list(range(3, 512, 7))
        plain = PagedModel(path).step({"A": ids})["A"]
        weights = load_file(f"{path}/model.safetensors")
        for name, tensor in weights.items():
            if name == "model.decoder.embed_positions.weight" or name.endswith("embed_tokens.weight") or name == "lm_head.weight": change = torch.ones_like(tensor) * 0.1
            else: change = torch.linspace(0.1, 0.3, tensor.numel()).view(tensor.shape)
            save_file(weights | {name: tensor + change}, f"{path}/model.safetensors")
            model = PagedModel(path)
            changed = (model.step({"A": ids})["A"] - plain).abs().max()
            # a bias of the keys shifts all scores of a query alike, unless keys are rotated apart
            assert changed > 1e-6 or name.endswith("k_proj.bias"), f"{arch}: {name} has no effect"
        save_file(weights, f"{path}/model.safetensors")


def test_tied_heads(tmp_path, caplog):
    "Stored beside the embedding, in its place, or different from it."
    path = write_tiny_model(tmp_path, "smollm2")
    ids, embedding = random_ids(9), load_file(f"{path}/model.safetensors")["model.embed_tokens.weight"]
    want = hf_logits(path, ids)
    for changes in (dict(lm_head__weight=embedding.clone()), dict(model__embed_tokens__weight=None)):
        rewrite(path, **changes)
        model = PagedModel(path)
        assert model.model.lm_head.weight is model.model.model.embed_tokens.weight
        torch.testing.assert_close(model.step({"A": ids})["A"], want, rtol=0, atol=1e-4)
    rewrite(path, model__embed_tokens__weight=embedding, lm_head__weight=embedding + 1)
    logger = __import__("logging").getLogger("litevllm")
    logger.addHandler(caplog.handler)
    try: model = PagedModel(path)
    finally: logger.removeHandler(caplog.handler)
    assert "lm_head.weight that differs" in caplog.text
    torch.testing.assert_close(model.step({"A": ids})["A"], want, rtol=0, atol=1e-4)


def test_harmless_extras(tmp_path):
    path = write_tiny_model(tmp_path, "llama")
    rewrite(path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8), model__rotary_emb__inv_freq=torch.ones(8))
    load(path)


def test_opt_without_the_model_prefix(tmp_path):
    path = write_tiny_model(tmp_path, "opt", tie_word_embeddings=True)
    ids = random_ids(12)
    want = hf_logits(path, ids)
    weights = load_file(f"{path}/model.safetensors")
    save_file({name.removeprefix("model."): t for name, t in weights.items()}, f"{path}/model.safetensors")
    torch.testing.assert_close(PagedModel(path).step({"A": ids})["A"], want, rtol=0, atol=1e-4)


def test_shards(tmp_path):
    path = write_tiny_model(tmp_path / "many", "llama", max_shard_size="100KB")
    single = write_tiny_model(tmp_path / "one", "llama")
    assert not os.path.exists(f"{path}/model.safetensors")
    for (name, a), (_, b) in zip(load(path).named_parameters(), load(single).named_parameters(), strict=True): assert torch.equal(a, b), name
    index = json.load(open(f"{path}/model.safetensors.index.json"))

    def variant(name, **changes):
        shutil.copytree(path, tmp_path / name)
        json.dump(index | dict(weight_map={n: f for n, f in (index["weight_map"] | changes).items() if f}), open(tmp_path / name / "model.safetensors.index.json", "w"))
        return tmp_path / name

    with pytest.raises(ValueError, match="lacks 1 tensor.*model.norm.weight"): load(variant("dropped", **{"model.norm.weight": None}))
    other = next(f for f in index["weight_map"].values() if f != index["weight_map"]["model.norm.weight"])
    with pytest.raises(ValueError, match=f"model.norm.weight.*{other}"): load(variant("wrong file", **{"model.norm.weight": other}))
    with pytest.raises(FileNotFoundError, match="model-00009.safetensors"): load(variant("no file", **{"model.norm.weight": "model-00009.safetensors"}))
    cut = variant("cut")
    data = (cut / other).read_bytes()
    (cut / other).write_bytes(data[:len(data) // 2])
    with pytest.raises(ValueError, match=other): load(cut)
    os.remove(f"{path}/{other}")
    with pytest.raises(FileNotFoundError, match=other): load(path)


def test_no_weights(tmp_path):
    path = write_tiny_model(tmp_path, "llama")
    os.rename(f"{path}/model.safetensors", f"{path}/pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="no weights in .*model.safetensors"): load(path)


def test_unsupported(tmp_path):
    with pytest.raises(ValueError, match="'GPT2LMHeadModel' is not supported.*LlamaForCausalLM.*OPTForCausalLM"): get_model_class("GPT2LMHeadModel")
    path = write_tiny_model(tmp_path, "llama")
    edit_config(path, hidden_act="gelu")
    with pytest.raises(ValueError, match="hidden_act 'gelu'"): load(path)
    edit_config(path, hidden_act="silu", quantization_config=dict(quant_method="gptq", bits=4))
    with pytest.raises(ValueError, match="quantized.*gptq"): load(path)


# ---- the forward context, names and compilation

def test_contexts_nest_and_come_back(tmp_path):
    config = types.SimpleNamespace(compilation_config=types.SimpleNamespace(static_forward_context={"x": 1}))
    with pytest.raises(RuntimeError, match="no forward context"): get_forward_context()
    meta = types.SimpleNamespace(slot_mapping="slots")
    with set_forward_context({"x": meta}, config):
        outer = get_forward_context()
        assert outer.slot_mapping == {"x": "slots"} and outer.no_compile_layers == {"x": 1}
        with pytest.raises(ZeroDivisionError), set_forward_context(None, config, slot_mapping={"x": 2}):
            assert get_forward_context().slot_mapping == {"x": 2} and get_forward_context().attn_metadata is None
            1 / 0
        assert get_forward_context() is outer
    with pytest.raises(RuntimeError): get_forward_context()


def test_duplicate_layer_names_are_refused(tmp_path):
    config = EngineArgs(model=write_tiny_model(tmp_path, "llama"), device="cpu").create_engine_config()
    get_model(config)
    with pytest.raises(ValueError, match="duplicate layer name: model.layers.0.self_attn.attn"): get_model(config)
    with pytest.raises(ValueError, match="duplicate layer name: model.layers.1.self_attn.attn"):
        Attention(4, 16, 1.0, 2, vllm_config=config, prefix="model.layers.1.self_attn.attn")


def without_dependency(self, query, key, value):
    query, key, value = query.view(-1, self.num_heads, self.head_size), key.view(-1, self.num_kv_heads, self.head_size), value.view(-1, self.num_kv_heads, self.head_size)
    output = torch.empty_like(query)
    torch.ops.litevllm.unified_kv_cache_update(key, value, self.layer_name)
    torch.ops.litevllm.unified_attention_with_output(query, key, value, output, self.layer_name)
    return output.view(-1, self.num_heads * self.head_size)


@pytest.mark.parametrize("arch", ["llama", "qwen3", "opt"])
def test_one_graph_for_every_step(tmp_path, arch):
    "fullgraph, steps of different make-up: one graph, the eager logits; the cache write is lost once nothing depends on it."
    path = write_tiny_model(tmp_path, arch)
    torch._dynamo.reset()
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return torch._dynamo.lookup_backend("aot_eager")(gm, inputs)

    def compiled(model):
        f = torch.compile(model.model, backend=backend, fullgraph=True)
        def forward(input_ids, positions):
            for t in (input_ids, positions): torch._dynamo.mark_dynamic(t, 0)
            return f(input_ids, positions)
        return forward

    eager, model, ids = PagedModel(path, block_size=4), PagedModel(path, block_size=4, enforce_eager=False), random_ids(40)
    forward = compiled(model)
    for chunks in ({"A": ids[:5], "B": ids[:9]}, {"A": ids[5:6], "B": ids[9:10]}, {"A": ids[6:7], "C": ids[:20]}, {"D": ids}, {"A": ids[7:8], "B": ids[10:11], "C": ids[20:21], "D": ids[:1]}):
        got, want = model.step(chunks, forward=forward), eager.step(chunks)
        for req in chunks: torch.testing.assert_close(got[req], want[req], rtol=0, atol=1e-4)
    assert len(graphs) == 1
    broken = PagedModel(path, block_size=4, enforce_eager=False)
    for layer in broken.config.compilation_config.static_forward_context.values(): layer.forward = types.MethodType(without_dependency, layer)
    out = broken.step({"A": ids[:5]}, forward=compiled(broken))["A"]
    assert out.isnan().all()   # attention read a cache that nobody had written


def test_a_backend_loads_only_its_own_compiler():
    code = ("import sys\nfrom litevllm.model.attention import get_attn_backend\nget_attn_backend(sys.argv[1], 'cpu').kernels\n"
            "print([m for m in ('triton', 'numba') if m in sys.modules])")
    env = os.environ | {"TRITON_INTERPRET": "1"}
    for name, loaded in (("TORCH_REF", "[]"), ("CPU_ATTN", "['numba']"), ("TRITON_ATTN", "['triton']")):
        run = subprocess.run([sys.executable, "-c", code, name], env=env, capture_output=True, text=True, timeout=60, check=True)
        assert run.stdout.strip() == loaded, name


@pytest.mark.parametrize("window", [None, 7])
def test_a_long_request_keeps_all_its_blocks_whatever_the_window(tmp_path, window):
    "Semantics 38a (star): layers with a sliding window share the full table; 46 tokens and a window of 7 hold 12 blocks of 4."
    path = write_tiny_model(tmp_path, "mistral", sliding_window=window)
    core = EngineCore(EngineArgs(model=str(path), block_size=4, num_gpu_blocks_override=20, max_model_len=64, device="cpu", enforce_eager=True,
                                 attention_backend="TORCH_REF", async_scheduling=False).create_engine_config())
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    core.add_request(core.preprocess_add_request(EngineCoreRequest("A", random_ids(40), params, 0.)))
    held = []
    while core.scheduler.has_unfinished_requests():
        core.step_fn()
        if request := core.scheduler.requests.get("A"):
            held.append((request.num_computed_tokens, len(set(core.scheduler.kv_cache_manager.get_block_ids("A")))))
    core.shutdown()
    windows = {layer.sliding_window for layer in core.vllm_config.compilation_config.static_forward_context.values()}
    assert windows == {window} and held == [(n, -(-n // 4)) for n in range(40, 47)]


def test_triton_interpreted(tmp_path):
    "The same model on the Triton kernels, in a process of its own: the interpreter is switched on before triton is imported."
    path = write_tiny_model(tmp_path, "mistral", sliding_window=7)
    code = ("import sys, torch\nsys.path.insert(0, sys.argv[2])\nfrom model_harness import PagedModel\nfrom test_models import chunked, hf_logits, random_ids\n"
            "ids = random_ids(24)\ngot = chunked(PagedModel(sys.argv[1], block_size=4, attention_backend='TRITON_ATTN'), ids, [9, 12])\n"
            "print((got - hf_logits(sys.argv[1], ids)).abs().max().item())")
    run = subprocess.run([sys.executable, "-c", code, path, os.path.dirname(__file__)], env=os.environ | {"TRITON_INTERPRET": "1"},
                         capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]
    assert float(run.stdout.split()[-1]) < 1e-4
