"""The fused kernels in Triton's interpreter against float64, sanitizer and race detector on. Run by tests/test_kernels_interp.py in a process of its own."""
import importlib

import pytest
import torch
import triton_tools as tools

from litevllm.kernels import kv_write, reference

tools.install()
K = importlib.import_module("litevllm.kernels.fused")
F32, F16, BF16, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn
HALF_STEP = {F32: 2.0**-24, F16: 2.0**-11, BF16: 2.0**-8}   # of rounding once, relative
SMALLEST = {F32: 2.0**-149, F16: 2.0**-25, BF16: 2.0**-134}      # half a step of denormals


def rand(*shape, dtype=F32, seed=0, spread=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * spread).to(dtype)


def within(got, want, size, work=8):
    "Rounded once from a float32 computation: half a step of the result, and `work` float32 steps of the `size` of what was added up"
    bound = want.abs() * HALF_STEP[got.dtype] * 1.001 + work * 2.0**-24 * size + SMALLEST[got.dtype]
    err = (got.double() - want).abs()
    assert got.isfinite().all() and (err <= bound).all(), f"error {err.max():.3g}, at most {(err / bound).max():.3g} of the bound"


def framed(*shape, dtype=F32, seed=0, spread=1.0):
    "Random numbers as a slice of a tensor that is NaN around them: (slice, whole)"
    whole = torch.full((shape[0] + 2, *shape[1:-1], shape[-1] + 16), float("nan"), dtype=dtype)
    part = whole[1:-1, ..., 8:-8]
    part.copy_(rand(*shape, dtype=dtype, seed=seed, spread=spread))
    return part, whole


def still_framed(part, whole):
    frame = torch.ones_like(whole, dtype=torch.bool)
    frame[1:-1, ..., 8:-8] = False
    return whole[frame].isnan().all() and part.isfinite().all()


def norm64(x, w, eps): return x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + eps) * w.double()


# --- norm

NORMS = [(1, 16), (5, 64), (3, 80), (33, 128), (2, 576), (4, 1024), (2, 1536), (1, 4096)]


def check_rms_norm(K, rows=5, size=64, dtype=F32, spread=1.0, eps=1e-6):
    x, whole = framed(rows, size, dtype=dtype, spread=spread)
    w = rand(size, dtype=dtype, seed=1)
    out = K.rms_norm(x, w, eps)
    want = norm64(x, w, eps)
    assert out.is_contiguous() and out.dtype == dtype and still_framed(x, whole)
    within(out, want, want.abs())


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("rows, size", NORMS)
def test_rms_norm(rows, size, dtype): check_rms_norm(K, rows, size, dtype)


def test_rms_norm_of_numbers_whose_squares_overflow_float16(): check_rms_norm(K, 3, 64, F16, spread=3000.0)


def test_rms_norm_of_small_numbers_where_eps_counts(): check_rms_norm(K, 3, 64, F32, spread=1e-4, eps=1e-5)


def check_heads(K, tokens=3, heads=5, size=32, dtype=F32):
    "Query heads within a merged product: [tokens, heads, size] with rows further apart"
    merged = torch.full((tokens, (heads + 4) * size), float("nan"), dtype=dtype)
    x = merged[:, size:(heads + 1) * size].unflatten(1, (heads, size))
    x.copy_(rand(tokens, heads, size, dtype=dtype))
    w = rand(size, dtype=dtype, seed=1)
    want = norm64(x, w, 1e-6)
    within(K.rms_norm(x, w, 1e-6), want, want.abs())


@pytest.mark.parametrize("shape", [(3, 5, 32), (1, 1, 128), (40, 3, 16), (2, 16, 80)])
def test_rms_norm_of_heads(shape): check_heads(K, *shape)


def test_a_zero_row_stays_zero_and_no_rows_are_fine():
    out = K.rms_norm(torch.zeros(3, 64), torch.ones(64), 1e-6)
    assert (out == 0).all() and K.rms_norm(torch.zeros(0, 64), torch.ones(64), 1e-6).shape == (0, 64)
    K.fused_add_rms_norm(torch.zeros(0, 64), torch.zeros(0, 64), torch.ones(64), 1e-6)
    assert K.silu_and_mul(torch.zeros(0, 64)).shape == (0, 32)
    K.rotary_embedding(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 32), torch.zeros(0, 16), 16, torch.zeros(4, 16))


def check_add_norm(K, rows=5, size=64, dtype=F32):
    (x, x_whole), (r, r_whole) = framed(rows, size, dtype=dtype), framed(rows, size, dtype=dtype, seed=2)
    w, total = rand(size, dtype=dtype, seed=1), x + r
    K.fused_add_rms_norm(x, r, w, 1e-6)
    want = norm64(total, w, 1e-6)
    assert torch.equal(r, total) and still_framed(x, x_whole) and still_framed(r, r_whole)
    within(x, want, want.abs())


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("rows, size", NORMS[1:6])
def test_fused_add_rms_norm(rows, size, dtype): check_add_norm(K, rows, size, dtype)


def test_the_norm_of_a_sum_is_the_norm_of_what_was_stored():
    "Two kernels give the same bits as one, in every dtype"
    for dtype in (F32, F16, BF16):
        x, r, w = rand(4, 96, dtype=dtype), rand(4, 96, dtype=dtype, seed=1), rand(96, dtype=dtype, seed=2)
        K.fused_add_rms_norm(x, r, w, 1e-5)
        assert torch.equal(x, K.rms_norm(r, w, 1e-5))


# --- activation

def check_silu(K, rows=3, size=64, dtype=F32, spread=1.0):
    x, whole = framed(rows, 2 * size, dtype=dtype, spread=spread)
    out = K.silu_and_mul(x)
    gate, up = x.double().chunk(2, -1)
    assert out.is_contiguous() and still_framed(x, whole)
    want = gate * torch.sigmoid(gate) * up
    within(out, want, want.abs(), work=8 + 4 * spread)   # exp of a large gate: its rounding grows with the exponent


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("rows, size", [(1, 16), (3, 48), (2, 1536), (2, 1040)])
def test_silu_and_mul(rows, size, dtype): check_silu(K, rows, size, dtype)


def test_silu_of_large_gates():
    x = torch.tensor([[-200.0, -90.0, 90.0, 3e4, 1.0, 2.0, 3.0, 1.0]])
    out = K.silu_and_mul(x)
    assert out[0, :2].abs().max() < 1e-30 and torch.equal(out[0, 2:], torch.tensor([270.0, 3e4]))
    check_silu(K, spread=20.0)


# --- rotation

def turn64(x, positions, table, size):
    heads = x.double().unflatten(1, (-1, size))
    cos, sin = table.double()[positions].unsqueeze(1).chunk(2, -1)
    a, b = heads.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).flatten(1)


def batch(tokens, heads, kv_heads, size, dtype, table_dtype=None):
    "positions, table, and query, key, value as slices of one merged product with a spare column block of NaN"
    merged = torch.full((tokens, (heads + 2 * kv_heads) * size + 16), float("nan"), dtype=dtype)
    q, k, v, _ = merged.split([heads * size, kv_heads * size, kv_heads * size, 16], 1)
    for i, x in enumerate((q, k, v)): x.copy_(rand(*x.shape, dtype=dtype, seed=i))
    positions = torch.randint(0, 90, (tokens,), generator=torch.Generator().manual_seed(3))
    positions[0] = 89
    return merged, positions, rand(90, size, dtype=table_dtype or dtype, seed=4), q, k, v


ROPES = [(3, 4, 2, 64), (1, 1, 1, 16), (2, 9, 3, 64), (2, 3, 3, 80), (2, 2, 1, 96), (2, 2, 1, 40), (1, 32, 8, 128), (2, 14, 2, 64)]


def check_rope(K, tokens=3, heads=4, kv_heads=2, size=64, dtype=F32, table_dtype=None):
    merged, positions, table, q, k, v = batch(tokens, heads, kv_heads, size, dtype, table_dtype)
    want, size_of = [turn64(x, positions, table, size) for x in (q, k)], [turn64(x.abs(), positions, table.abs() * 2, size).abs() for x in (q, k)]
    spare, values = merged[:, -16:], v.clone()
    K.rotary_embedding(positions, q, k, size, table)
    for got, w, x in zip((q, k), want, size_of): within(got, w, x.amax())
    assert spare.isnan().all() and torch.equal(v, values)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("shape", ROPES)
def test_rotary_embedding(shape, dtype): check_rope(K, *shape, dtype)


def test_rotary_embedding_with_a_float32_table(): check_rope(K, 3, 4, 2, 64, BF16, F32)


# --- rotation and the write

def check_cache(K, tokens=5, heads=4, kv_heads=2, size=64, dtype=F32, cache=None, block_size=4, slots=(6, -1, 0, 23), scales=(1.0, 1.0), order="given"):
    "The same bits as rotation and write by kernels of their own; nothing but the named slots is written, and key stays"
    _, positions, table, q, k, v = batch(tokens, heads, kv_heads, size, dtype)
    pools = [torch.full((6, block_size, kv_heads, size), 72.0).to(cache or dtype) for _ in range(4)]
    slots = torch.tensor(slots)
    words = ("fp8" if cache == FP8 else "auto", *scales)
    q2, k2, before = q.clone(), k.clone(), k.clone()
    with tools.grid_order(order): K.rope_and_cache(positions, q, k, v, size, table, *pools[:2], slots, *words)
    importlib.import_module("litevllm.kernels.fused").rotary_embedding(positions, q2, k2, size, table)   # checked above
    reference.reshape_and_cache_flash(k2.unflatten(1, (-1, size)), v.unflatten(1, (-1, size)), *pools[2:], slots, *words)
    assert torch.equal(q, q2) and torch.equal(k, before)
    for got, want in zip(pools[:2], pools[2:]): assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    written = (pools[0].float() != 72.0).flatten(2).any(-1).flatten().nonzero().flatten().tolist()
    assert written == sorted(s for s in slots.tolist() if s >= 0)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("shape", [(5, *s[1:]) for s in ROPES if s[1] != 32] + [(4, 32, 8, 128)])
def test_rope_and_cache(shape, dtype): check_cache(K, *shape, dtype)


@pytest.mark.parametrize("dtype, scales", [(F32, (1.0, 1.0)), (BF16, (0.5, 2.0)), (F16, (0.013, 0.7)), (F32, (1e-3, 1e-3))])
def test_rope_and_cache_in_fp8(dtype, scales): check_cache(K, dtype=dtype, cache=FP8, scales=scales)


def test_scales_do_nothing_to_a_cache_of_another_type(): check_cache(K, dtype=BF16, scales=(0.5, 3.0))


def test_block_sizes_that_are_no_power_of_two(): check_cache(K, block_size=24, slots=(30, 100, 143))


@pytest.mark.parametrize("order", ["reversed", "shuffled"])
def test_the_order_of_programs_does_not_matter(order): check_cache(K, heads=9, kv_heads=3, order=order)


def test_no_slots_write_nothing_but_queries_turn():
    _, positions, table, q, k, v = batch(2, 4, 2, 64, F32)
    pool, before = torch.zeros(2, 4, 2, 64), q.clone()
    K.rope_and_cache(positions, q, k, v, 64, table, pool, pool.clone(), torch.empty(0, dtype=torch.int64))
    assert (pool == 0).all() and not torch.equal(q, before)


def test_slot_beyond_two_to_the_31_elements():
    heads, size, block = 2, 64, 16
    keys, values = (torch.empty(2**31 // (block * heads * size) + 8, block, heads, size, dtype=F16) for _ in range(2))
    _, positions, table, q, k, v = batch(1, 2, heads, size, F16)
    K.rope_and_cache(positions, q, k, v, size, table, keys, values, torch.tensor([len(keys) * block - 1]))
    assert torch.equal(values[-1, -1].flatten(), v[0])


# --- what it costs

def test_every_number_is_loaded_once_and_stored_once():
    for rows, size in ((16, 4096), (8, 128)):
        x, r, w = rand(rows, size, dtype=F16), rand(rows, size, dtype=F16, seed=1), torch.ones(size, dtype=F16)
        with tools.metered() as m: K.rms_norm(x, w, 1e-6)
        assert (m["of"]["x_ptr"], m["stored"]) == (x.nbytes, x.nbytes)
        with tools.metered() as m: K.fused_add_rms_norm(x, r, w, 1e-6)
        assert (m["of"]["x_ptr"], m["of"]["residual_ptr"], m["stored"]) == (x.nbytes, x.nbytes, 2 * x.nbytes)
        with tools.metered() as m: K.silu_and_mul(x)
        assert (m["loaded"], m["stored"]) == (x.nbytes, x.nbytes // 2)


@pytest.mark.parametrize("shape, dtype", [((6, 32, 8, 128), F16), ((6, 9, 3, 64), F32)])
def test_rotation_and_write_stay_within_a_tenth_of_the_ideal(shape, dtype):
    "Ideal: queries in and out, keys and values in and out, a table row, a position and a slot a token"
    tokens, heads, kv_heads, size = shape
    _, positions, table, q, k, v = batch(*shape, dtype)
    pool = torch.zeros(2, 2, 4, kv_heads, size, dtype=dtype)
    slots = torch.arange(tokens)
    with tools.metered() as m: K.rope_and_cache(positions, q, k, v, size, table, *pool, slots)
    ideal = 2 * (q.numel() + k.numel() + v.numel()) * q.element_size() + tokens * (size * q.element_size() + 16)
    assert ideal <= m["loaded"] + m["stored"] <= 1.10 * ideal, (m, ideal)


# --- refusals

def test_what_does_not_fit_is_refused_with_the_shapes():
    x, w, pos = torch.zeros(4, 64), torch.ones(64), torch.zeros(4, dtype=torch.int64)
    table, pool = torch.zeros(8, 16), torch.zeros(2, 4, 1, 16)
    for call, words in ((lambda: K.rms_norm(x.T, torch.ones(4), 1e-6), "strides"), (lambda: K.rms_norm(x, w[:32], 1e-6), r"\[32\]"),
                        (lambda: K.fused_add_rms_norm(x, x.half(), w, 1e-6), "float16"), (lambda: K.fused_add_rms_norm(x, x[:2], w, 1e-6), r"\[2, 64\]"),
                        (lambda: K.silu_and_mul(torch.zeros(4, 63)), r"\[4, 63\]"), (lambda: K.rotary_embedding(pos, x, x[:3], 16, table), "key must be"),
                        (lambda: K.rotary_embedding(pos, x[:, :60], x, 16, table), "query must be"),
                        (lambda: K.rotary_embedding(pos, x, x, 16, torch.zeros(8, 32)), "cos_sin_cache"),
                        (lambda: K.rope_and_cache(pos, x, x, x, 16, table, pool, pool, pos), "pools must be"),
                        (lambda: K.rope_and_cache(pos, x, x[:, :16], x[:, :16], 16, table, pool, pool, torch.arange(5)), "slot_mapping"),
                        (lambda: K.rope_and_cache(pos, x, x[:, :16], x[:, :16], 16, table, pool, pool, pos, "fp8"), "fp8"),
                        (lambda: K.rope_and_cache(pos, x, x[:, :16], x[:, :16], 16, table, pool.to(FP8), pool.to(FP8), pos, "fp8", 0.0), "k_scale")):
        with pytest.raises(ValueError, match=words): call()


# --- in a model

def logits_of(path, chunks, **args):
    from model_harness import PagedModel   # imported late: it loads transformers
    model = PagedModel(path, block_size=4, num_blocks=16, enforce_eager=True, **args)
    return [torch.cat(list(model.step(c).values())) for c in chunks], model


CHUNKS = [{"A": [11, 12, 13, 14, 15, 16]}, {"A": [17], "B": [21, 22, 23]}, {"A": [18], "B": [24]}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    from litevllm.tiny import write_tiny_model
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_model_on_fused_kernels_computes_what_it_does_without(family, tmp_path):
    from litevllm.tiny import write_tiny_model
    tiny = write_tiny_model(tmp_path, family)
    got, model = logits_of(tiny, CHUNKS, attention_backend="TRITON_ATTN")
    want, _ = logits_of(tiny, CHUNKS, attention_backend="TORCH_REF")
    assert model.model.model.layers[0].mlp.act_fn.ops is K
    for a, b in zip(got, want): torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4)


def test_an_fp8_cache_changes_little_and_its_scales_act(tiny):
    exact, _ = logits_of(tiny, CHUNKS, attention_backend="TRITON_ATTN")
    got, model = logits_of(tiny, CHUNKS, attention_backend="TRITON_ATTN", kv_cache_dtype="fp8")
    layers = model.config.compilation_config.static_forward_context
    assert all(layer.kv_cache.dtype == FP8 and layer.k_scale == layer.v_scale == 1.0 for layer in layers.values())
    exact = torch.cat(exact)
    far = ((torch.cat(got) - exact).std() / exact.std()).item()
    assert 0 < far < 0.1, far   # a number of three bits of mantissa is up to 1/16 off
    from model_harness import PagedModel
    scaled = PagedModel(tiny, block_size=4, num_blocks=16, enforce_eager=True, attention_backend="TRITON_ATTN", kv_cache_dtype="fp8")
    for layer in scaled.config.compilation_config.static_forward_context.values(): layer.k_scale, layer.v_scale = 0.03, 1e-5   # values are clamped at 0.00448
    off = torch.cat([torch.cat(list(scaled.step(c).values())) for c in CHUNKS])
    assert off.isfinite().all() and (off - exact).std() / exact.std() > 3 * far


def test_scales_come_from_the_checkpoint(tiny, tmp_path):
    import shutil
    from pathlib import Path

    from safetensors.torch import load_file, save_file
    shutil.copytree(tiny, tmp_path / "m")
    file = Path(tmp_path) / "m/model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"model.layers.0.self_attn.k_scale": torch.tensor(0.25), "model.layers.0.self_attn.v_proj.v_scale": torch.tensor([0.5]),
                         "model.layers.1.self_attn.kv_scale": torch.tensor(2.0)}, file, metadata={"format": "pt"})
    for cache, want in (("fp8", [(0.25, 0.5), (2.0, 2.0)]), ("auto", [(1.0, 1.0)] * 2)):
        got, model = logits_of(tmp_path / "m", CHUNKS[:1], attention_backend="TRITON_ATTN", kv_cache_dtype=cache)
        assert [(m.k_scale, m.v_scale) for m in model.config.compilation_config.static_forward_context.values()] == want
    for name, value, words in (("model.layers.0.self_attn.k_scale", [1.0, 2.0], "one positive number"), ("model.layers.7.self_attn.k_scale", 1.0, "layers.7")):
        save_file(tensors | {name: torch.tensor(value)}, file, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=words): logits_of(tmp_path / "m", CHUNKS[:1], attention_backend="TRITON_ATTN")
