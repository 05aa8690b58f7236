"""All layers in one call against the same layers module by module: biases, normed heads, a sliding window; one token, a few, padding rows."""
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from model_harness import PagedModel

from litevllm.kernels import cpu_attention, cpu_lanes, cpu_layer, cpu_ops
from litevllm.tiny import write_tiny_model

KINDS = {"llama": {}, "qwen2": {}, "qwen3": {}, "mistral": dict(sliding_window=8)}


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request, monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    monkeypatch.setattr(cpu_layer, "num_workers", lambda work: request.param)   # a tiny layer would never be worth a second thread
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(params=KINDS)
def models(request, tmp_path):
    "The same model twice: with its layers as one call, and without."
    path = write_tiny_model(tmp_path, request.param, **KINDS[request.param])
    whole, modules = (PagedModel(path, block_size=4, num_blocks=256, seed=1, dtype="float32", attention_backend="CPU_ATTN") for _ in range(2))
    modules.model.model.kernel = None
    return whole, modules


def test_every_batch_gives_what_the_modules_give(models, threads, monkeypatch):
    whole, modules = models
    taken, rows, hidden = [], cpu_layer.run_layers, whole.model.lm_head.weight.shape[1]
    monkeypatch.setattr(cpu_layer, "run_layers", lambda workers, x, *rest: (taken.append((workers, len(x) // hidden)), rows(workers, x, *rest)))
    seed = random.randrange(10**6)
    print("seed", seed)
    ids = random.Random(seed)
    for counts, pad_to in (({"a": 5}, None), ({"b": 21, "a": 1}, None), ({"a": 1}, None), ({"a": 1, "b": 1, "c": 4}, None),
                           ({"a": 1, "b": 1, "c": 2}, 6), ({"c": 7}, None), ({"d": 201, "e": 2 * cpu_layer.ROWS - 190, "a": 1}, None)):
        chunks = {req: [ids.randrange(3, 250) for _ in range(n)] for req, n in counts.items()}
        taken.clear()
        ours, theirs = whole.step(chunks, pad_to), modules.step(chunks, pad_to)
        tokens = max(sum(counts.values()), pad_to or 0)
        assert taken == [(threads, tokens)], (counts, taken)
        for req in chunks: torch.testing.assert_close(ours[req], theirs[req], atol=2e-5, rtol=1e-5)


def test_code_compiled_from_an_older_loop_of_another_module_goes(tmp_path, monkeypatch):
    "numba looks at a module's own file only, and a loop of one module is compiled into what calls it in another."
    kept = Path(cpu_lanes.exp2.stats.cache_path)
    for function in (cpu_ops.product_batch, cpu_layer.run_layers):
        assert list(kept.glob(f"{function.__module__.rpartition('.')[2]}.{function.__name__}-*.nbi"))
    ours, other, source = (tmp_path / name for name in ("cpu_ops.f-1.py311.nbi", "cpu_layer.f-1.py311.nbi", "source.py"))
    monkeypatch.setattr(cpu_lanes, "exp2", SimpleNamespace(stats=SimpleNamespace(cache_path=str(tmp_path))))
    other.touch()
    for text, stays in (("a loop", False), ("a loop", True), ("another loop", False), ("another loop", True)):
        ours.touch()
        source.write_text(text)
        cpu_lanes.forget_older("cpu_ops", SimpleNamespace(__file__=str(source)))
        assert ours.exists() == stays and other.exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_one_worker_is_one_thread(workers):
    "Also where the loop is a parallel one: numba is told each time, and forgets nothing of the time before."
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert cpu_attention.num_workers(cpu_attention.SMALL * (workers - 1)) == workers == cpu_attention.numba.get_num_threads()
    finally: torch.set_num_threads(before)
