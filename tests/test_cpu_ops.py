"""The fused CPU operations against torch's own, on dense tensors and on slices of a merged projection, with slots that are left out."""
import pytest
import torch
from torch.nn import functional as F

import litevllm.kernels.cpu_ops as ops
from litevllm.kernels.cpu_attention import SMALL, num_workers

SIZES = [1, 5, 350]   # one token; a few; so many that a second thread is woken by every operation


@pytest.fixture(autouse=True, params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    torch.manual_seed(request.param)
    assert num_workers(SMALL) == request.param   # numba may have as many (tests/conftest.py)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("n", SIZES)
def test_norms(n):
    x, residual, w = torch.randn(n, 96), torch.randn(n, 96), torch.randn(96)
    torch.testing.assert_close(ops.rms_norm(x, w, 1e-5), F.rms_norm(x, (96,), w, 1e-5))
    heads = torch.randn(n, 3 * 32 + 7)[:, 7:].unflatten(-1, (3, 32))   # a slice: rows 103 apart
    torch.testing.assert_close(ops.rms_norm(heads, w[:32], 1e-5), F.rms_norm(heads, (32,), w[:32], 1e-5))
    normed, total = x.clone(), residual.clone()
    ops.fused_add_rms_norm(normed, total, w, 1e-5)
    assert torch.equal(total, residual + x)
    torch.testing.assert_close(normed, F.rms_norm(total, (96,), w, 1e-5))


@pytest.mark.parametrize("n", SIZES)
def test_silu_and_mul_at_any_magnitude(n):
    x = torch.randn(n, 192) * torch.logspace(-3, 3, 192)
    torch.testing.assert_close(ops.silu_and_mul(x), F.silu(x[:, :96]) * x[:, 96:], rtol=1e-5, atol=1e-6)


def turned(x, cos, sin):
    left, right = x.reshape(len(x), -1, 16).chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).view(len(x), -1)


@pytest.mark.parametrize("n", SIZES)
def test_rotation_and_cache(n):
    "Queries turn in place, keys only on their way into the cache; slot -1 and rows behind the slots write nothing, nor does anything else."
    qkv, table, positions = torch.randn(n, 15 * 16), torch.randn(50, 16), torch.randint(0, 50, (n,))
    cos, sin = (t[:, None] for t in table[positions].chunk(2, -1))
    q, k, v = (t.clone() for t in qkv.split([144, 48, 48], -1))
    pool, slots = torch.full((2, 50, 8, 3, 16), float("nan")), torch.randperm(400)[:n]
    slots[0] = -1
    slots = slots[:max(n - 2, 1)]
    ops.rope_and_cache(positions, qkv[:, :144], qkv[:, 144:192], qkv[:, 192:], 16, table, *pool.unbind(0), slots)
    torch.testing.assert_close(qkv[:, :144], turned(q, cos, sin))
    assert torch.equal(qkv[:, 144:192], k) and torch.equal(qkv[:, 192:], v)
    keys, values, stored = pool[0].view(400, 48), pool[1].view(400, 48), len(slots) - 1
    torch.testing.assert_close(keys[slots[1:]], turned(k, cos, sin)[1:len(slots)])
    assert torch.equal(values[slots[1:]], v[1:len(slots)]) and int(pool.isnan().sum()) == (400 - stored) * 96


@pytest.mark.parametrize("n", [*range(1, 15), 40, 115, 1400])
@pytest.mark.parametrize("columns", [3, 16, 40, 64, 1003])
def test_products_of_any_shape(n, columns):
    x, w, bias = torch.randn(n, 97), torch.randn(columns, 97), torch.randn(columns)
    want = F.linear(x.double(), w.double(), bias.double())
    got = ops.make_linear(w, bias)(x)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
    for r in {0, n // 2, n - 1}: assert torch.equal(got[r], ops.make_linear(w, bias)(x[r:r + 1])[0]), "a row has the same bits alone"
    torch.testing.assert_close(ops.make_linear(w, None)(x).double(), want - bias.double(), rtol=1e-4, atol=1e-4)


def test_refusals_have_names():
    q, k, pool = torch.zeros(2, 32), torch.zeros(2, 16), torch.zeros(4, 8, 1, 16)
    args = (torch.zeros(2, dtype=torch.int64), q, k, k, 16, torch.zeros(5, 16), pool, pool)
    with pytest.raises(ValueError, match="'fp8'"): ops.rope_and_cache(*args, torch.zeros(2, dtype=torch.int64), "fp8")
    with pytest.raises(ValueError, match="3 slots"): ops.rope_and_cache(*args, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="torch.float16"): ops.silu_and_mul(torch.zeros(2, 4).half())
    with pytest.raises(ValueError, match="dense last dimension"): ops.rms_norm(torch.zeros(4, 2).T, torch.ones(4), 1e-5)
