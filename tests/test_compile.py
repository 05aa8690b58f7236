"""The model compiles into one graph that serves every step, driven by the engine's own runner."""
import warnings

import pytest
import torch

from litevllm.model.attention import Attention
from litevllm.tiny import write_tiny_model
from graph_tools import graph_config, graph_worker
from litevllm.model.forward_context import set_forward_context
from litevllm.worker.compilation import PiecewiseBackend, compile_once, has_cpp_compiler
from worker_harness import Driver, make_worker

BACKENDS = ["aot_eager", "inductor"]
PROMPTS = {"A": list(range(5, 25)), "B": [40, 41, 42], "C": list(range(60, 71))}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {arch: write_tiny_model(root / arch, arch) for arch in ("llama", "qwen3", "opt")}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def mixed_steps(worker):
    "Prefill alone, chunks beside decodes, one decode alone, several together; all outputs of each request."
    driver = Driver(worker)
    for req_id, prompt in PROMPTS.items(): driver.add(req_id, prompt)
    for counts in ({"A": 7}, {"A": 13, "B": 2}, {"A": 1, "B": 1, "C": 5}, {"A": 1}, {"C": 6, "B": 1}, {"A": 1, "B": 1, "C": 1}, {"B": 1}):
        driver.step(counts)
    return {req_id: request.outputs for req_id, request in driver.requests.items()}


def compile_counts():
    stats = torch._dynamo.utils.counters
    return stats["stats"]["unique_graphs"], sum(stats["graph_break"].values()), sum(stats["recompiles"].values())


def falls_back(path, backend):
    "Without a C++ compiler `inductor` can only fall back: then that is what is asserted, pytest's summary shows the warning, and the answer is True."
    if backend != "inductor" or has_cpp_compiler(): return False
    warnings.warn("no C++ compiler here: inductor's code is not tested, only the fall-back to eager")
    worker = make_worker(path, compile=backend)
    assert worker.model_runner.forward is worker.model_runner.model
    assert mixed_steps(worker) == mixed_steps(make_worker(path))
    return True


# inductor's seconds are spent on one architecture
@pytest.mark.parametrize("arch, backend", [("llama", b) for b in BACKENDS] + [("qwen3", "aot_eager"), ("opt", "aot_eager")])
def test_one_graph_for_all_steps(paths, arch, backend):
    if falls_back(paths[arch], backend): return
    eager = mixed_steps(make_worker(paths[arch]))
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = mixed_steps(make_worker(paths[arch], compile=backend))
    assert compiled == eager
    assert all(len(out) >= 2 for out in eager.values())
    assert compile_counts() == (1, 0, 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_cache_write_survives(paths, backend):
    falls_back(paths["llama"], backend)   # eagerly the caches must be written just as well
    worker = make_worker(paths["llama"], compile=backend)
    mixed_steps(worker)
    for layer in worker.model_runner.layers.values():
        written = layer.kv_cache[:, 1:6].abs().sum((0, 2, 3, 4))   # A's first five blocks
        assert (written > 0).all(), written


def without_dependency(self, query, key, value):
    "Attention.forward, but the attention op does not take what the cache update returned."
    query, key, value = (t.view(-1, n, self.head_size) for t, n in
                         ((query, self.num_heads), (key, self.num_kv_heads), (value, self.num_kv_heads)))
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    torch.ops.litevllm.unified_kv_cache_update(key, value, self.layer_name)
    torch.ops.litevllm.unified_attention_with_output(query, key, value, output, self.layer_name)
    return output.view(-1, self.num_heads * self.head_size)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_the_dummy_dependency_it_fails(paths, backend, monkeypatch):
    if falls_back(paths["llama"], backend): return
    eager = mixed_steps(make_worker(paths["llama"]))
    monkeypatch.setattr(Attention, "forward", without_dependency)
    assert mixed_steps(make_worker(paths["llama"])) == eager          # eagerly the order of the lines is the order of the work
    worker = make_worker(paths["llama"], compile=backend)
    assert mixed_steps(worker) != eager                               # the compiler saw no use of the write and dropped it
    assert all((layer.kv_cache == 0).all() for layer in worker.model_runner.layers.values())


def test_no_compiler_falls_back_to_eager_with_one_line(paths, monkeypatch, capsys):
    from litevllm.worker import compilation
    monkeypatch.setattr(compilation, "has_cpp_compiler", lambda: False)
    worker = make_worker(paths["llama"], compile="inductor")
    assert worker.model_runner.forward is worker.model_runner.model
    assert capsys.readouterr().err.count("no C++ compiler found") == 1
    assert all(len(out) >= 2 for out in mixed_steps(worker).values())


def test_missing_compiler_is_seen():
    import torch._inductor.config as config
    with config.patch({"cpp.cxx": ("no-such-compiler-anywhere",)}): assert not has_cpp_compiler()


# ---- in pieces

def test_pieces_alternate_and_a_tuple_stays_with_what_made_it(paths):
    "The pieces of a real graph: others, attention, others, ...; nothing but tensors and token counts goes between them."
    graphs = []
    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward
    backend = PiecewiseBackend(keep)
    worker = make_worker(paths["qwen3"])
    forward = compile_once(worker.model_runner.model, backend)
    ids, positions = torch.arange(6, dtype=torch.int32), torch.arange(6)
    with torch.inference_mode(), set_forward_context(None, worker.vllm_config): out, want = forward(ids, positions), worker.model_runner.model(ids, positions)
    torch.testing.assert_close(out, want)
    assert [p.is_splitting for p in backend.pieces] == [False, True, False, True, False] and len(graphs) == 3
    for piece in backend.pieces:
        targets = {str(n.target) for n in piece.graph.graph.nodes if n.op == "call_function"}
        assert {t.startswith("litevllm.") for t in targets} == {piece.is_splitting} if piece.is_splitting else not any(t.startswith("litevllm.") for t in targets)
        values = [n.meta["example_value"] for n in piece.graph.graph.nodes if n.op == "placeholder"]
        assert all(isinstance(v, (torch.Tensor, torch.SymInt)) for v in values)


@pytest.mark.parametrize("arch, backend", [("llama", "inductor"), ("llama", "aot_eager"), ("qwen3", "aot_eager"), ("opt", "aot_eager")])
def test_pieces_give_the_tokens_of_the_whole(paths, arch, backend):
    if falls_back(paths[arch], backend): return
    eager = mixed_steps(make_worker(paths[arch]))
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        worker = graph_worker(graph_config(paths[arch], compile=backend))
        assert mixed_steps(worker) == eager
    assert compile_counts() == (1, 0, 0)
    assert {m.name: len(keys) for m, keys in worker.model_runner.dispatcher.get_capture_descs()} == {"PIECEWISE": 4, "FULL": 4}


def test_more_engines_than_dynamo_allows_versions():
    "One process may compile many models; each has a code object of its own."
    ids, positions = torch.arange(3, dtype=torch.int32), torch.arange(3)
    for _ in range(torch._dynamo.config.recompile_limit + 2):
        forward = compile_once(lambda a, b: a * 2 + b, "eager")
        assert forward(ids, positions).tolist() == [0, 3, 6]
