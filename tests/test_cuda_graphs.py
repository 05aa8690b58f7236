"""CUDA graphs with a recorder that replays by running again: padding, addresses, captures, memory; and that each rule's breach is noticed."""
import gc
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from graph_tools import SIZES, graph_config, graph_worker
from litevllm.compilation_config import CUDAGraphMode
from litevllm.core.output import SchedulerOutput
from litevllm.model.forward_context import BatchDescriptor, set_forward_context
from litevllm.sampling_params import SamplingParams
from litevllm.tiny import write_tiny_model
from litevllm.worker import cuda_graphs, input_batch, model_runner
from litevllm.worker.cuda_graphs import CUDAGraphPool, CUDAGraphWrapper, CudaGraph, CudagraphDispatcher, EagerGraph, weak_reference
from worker_harness import GREEDY, Driver, make_config, make_worker, run_scheduler

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE
ALL = ["FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "PIECEWISE", "FULL"]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    root = tmp_path_factory.mktemp("graphs")
    return {arch: write_tiny_model(root / arch, arch) for arch in ("llama", "qwen3", "opt")}


@pytest.fixture(scope="module", autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True): yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def both(paths): return graph_worker(graph_config(paths["llama"]))


PROMPTS = [list(range(5, 18)), [40, 41, 42], list(range(60, 71)), [7], list(range(100, 105)), list(range(200, 207))]
PARAMS = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 12, 4, 7, 11, 2)]
PARAMS[1] = SamplingParams(temperature=.9, top_p=.9, top_k=30, seed=3, max_tokens=12, ignore_eos=True)


def watch(runner):
    "The (mode, descriptor) of each step from now on."
    seen, dispatch = [], runner.dispatcher.dispatch
    def noting(*args):
        seen.append((args, dispatch(*args)))
        return seen[-1][1]
    runner.dispatcher.dispatch = noting
    return seen


# ---- the same tokens

@pytest.mark.parametrize("mode", ALL[:3])      # FULL alone is FULL_DECODE_ONLY
def test_tokens_are_those_of_the_eager_model(paths, mode):
    want, _, _ = run_scheduler(make_worker(paths["llama"]), PROMPTS, PARAMS, 60)
    worker = graph_worker(graph_config(paths["llama"], mode))
    seen = watch(worker.model_runner)
    for blocks, chunk in ((60, 0), (14, 3)):      # the small pool preempts, the chunks make partial prefills
        got, _, preemptions = run_scheduler(worker, PROMPTS, PARAMS, blocks, long_prefill_token_threshold=chunk)
        assert got == want and (preemptions > 0) == (blocks == 14)
    ran = {m for _, (m, _) in seen}
    assert ran == {"FULL_AND_PIECEWISE": {FULL, PIECEWISE, NONE}, "PIECEWISE": {PIECEWISE, NONE}}.get(mode, {FULL, NONE})
    padded = [(tokens, d.num_tokens) for (tokens, _), (_, d) in seen if d is not None]
    assert any(p > t for t, p in padded) and all(p >= t for t, p in padded)


@pytest.mark.parametrize("arch, backend", [("qwen3", "TORCH_REF"), ("opt", "TORCH_REF"), ("llama", "CPU_ATTN")])
def test_other_models_and_kernels(paths, arch, backend):
    want, _, _ = run_scheduler(make_worker(paths[arch], attention_backend=backend), PROMPTS, PARAMS, 60)
    worker = graph_worker(graph_config(paths[arch], attention_backend=backend))
    assert run_scheduler(worker, PROMPTS, PARAMS, 60)[0] == want


def test_without_a_compiler_full_graphs_still_work(paths):
    worker = graph_worker(graph_config(paths["llama"], "FULL_DECODE_ONLY", compile=None))
    assert worker.model_runner.graphs.num_graphs() == len(SIZES)
    assert run_scheduler(worker, PROMPTS, PARAMS, 60)[0] == run_scheduler(make_worker(paths["llama"]), PROMPTS, PARAMS, 60)[0]


def test_drafts_make_a_uniform_decode_of_several_tokens(paths):
    from dataclasses import replace
    truth = run_scheduler(make_worker(paths["llama"]), [PROMPTS[0], PROMPTS[2]], [PARAMS[0]] * 2, 60)[0]
    config = graph_config(paths["llama"], "FULL_DECODE_ONLY", [1, 2, 4, 8, 12], async_scheduling=False)
    worker = graph_worker(replace(config, scheduler_config=replace(config.scheduler_config, num_speculative_tokens=3)))
    assert [d.num_reqs for d in worker.model_runner.dispatcher.get_capture_descs()[0][1]] == [3, 2, 1]
    seen, driver = watch(worker.model_runner), Driver(worker)
    for name, prompt in zip("AB", (PROMPTS[0], PROMPTS[2])): driver.add(name, prompt)
    driver.step({"A": 13, "B": 11})
    driver.step({"A": 4, "B": 4}, {"A": truth[0][1:4], "B": [truth[1][1], 0, 0]})
    driver.step({"A": 4}, {"A": truth[0][5:8]})
    assert driver.requests["A"].outputs == truth[0][:9] and driver.requests["B"].outputs == truth[1][:3]
    assert [(m, d and d.num_reqs) for _, (m, d) in seen] == [(NONE, None), (FULL, 2), (FULL, 1)]


# ---- pads

def decoding(worker, n):
    "n requests that have a token each; the plan of a decode step of all of them."
    driver = Driver(worker)
    for i in range(n): driver.add(f"r{i}", PROMPTS[i])
    driver.step({f"r{i}": len(PROMPTS[i]) for i in range(n)})
    return driver, dict.fromkeys(driver.requests, 1)


def release(driver):
    for name in list(driver.requests): driver.finish(name)
    driver.worker.execute_model(driver.plan({}, {}))


def test_pads_write_nothing_and_read_nothing(both, paths):
    "Everything that no request owns holds NaN, the null block too: tokens don't change, and not one of these numbers does."
    runner = both.model_runner
    driver, counts = decoding(both, 5)
    owned = sorted({b for r in driver.requests.values() for b in r.blocks})
    for layer in runner.layers.values():
        free = torch.ones(layer.kv_cache.shape[1], dtype=torch.bool)
        free[owned] = False
        layer.kv_cache[:, free] = torch.nan
    before = [layer.kv_cache.clone() for layer in runner.layers.values()]
    seen = watch(runner)
    out = driver.step(counts)
    assert seen[0][1] == (FULL, BatchDescriptor(8, 8, True)) and out == decoding(make_worker(paths["llama"]), 5)[0].step(counts)
    grown = {b for r in driver.requests.values() for b in r.blocks}
    for layer, old in zip(runner.layers.values(), before):
        changed = (layer.kv_cache != old) & ~(layer.kv_cache.isnan() & old.isnan())
        assert set(changed.any(0).flatten(1).any(1).nonzero()[:, 0].tolist()) <= grown
        assert changed.flatten(0, 2).any(-1).any(-1).sum() == 2 * 5                # keys and values of five tokens
    assert runner.forward.entries[BatchDescriptor(8, 8, True)].graph.output.isfinite().all()    # the hidden rows of pads included
    for layer in runner.layers.values(): layer.kv_cache.zero_()
    release(driver)


def test_hidden_rows_of_pads_are_cut_off(both):
    driver, counts = decoding(both, 3)
    runner, step = both.model_runner, driver.plan(counts, {})
    runner.rows.update(step)
    mode, descriptor = runner.dispatch(step)
    with torch.inference_mode():
        batch = input_batch.prepare_inputs(runner.rows, step, "cpu", runner.buffers, descriptor)
        batch.cudagraph_runtime_mode, batch.batch_descriptor = mode, descriptor
        hidden = runner.run_model(batch)
    assert len(hidden) == 3 and len(runner.forward.entries[descriptor].graph.output) == 4
    release(driver)


@pytest.mark.parametrize("n", range(1, 6))
@torch.inference_mode()
def test_the_padded_batch(both, n):
    driver, counts = decoding(both, n)
    runner, step = both.model_runner, driver.plan(counts, {})
    runner.rows.update(step)
    _, descriptor = runner.dispatch(step)
    plain = input_batch.prepare_inputs(runner.rows, step)
    b = input_batch.prepare_inputs(runner.rows, step, "cpu", runner.buffers, descriptor)
    size = next(s for s in SIZES if s >= n)
    assert len(b.input_ids) == len(b.positions) == len(b.slot_mapping) == len(b.seq_lens) == len(b.block_table) == size == descriptor.num_tokens
    for name in ("input_ids", "positions", "slot_mapping", "seq_lens"): assert getattr(b, name)[:n].tolist() == getattr(plain, name).tolist()
    assert b.slot_mapping[n:].tolist() == [-1] * (size - n) and b.seq_lens[n:].tolist() == [0] * (size - n)
    assert b.query_start_loc.tolist() == list(range(size + 1)) and b.logits_indices.tolist() == list(range(n))
    columns = plain.block_table.shape[1]
    assert torch.equal(b.block_table[:n, :columns], plain.block_table) and not b.block_table[n:, :columns].any()
    assert (b.max_query_len, b.max_seq_len) == (1, runner.rows.max_model_len) and b.num_tokens == b.num_reqs == n
    assert b._repr_html_().count("<td>pad</td>") == size - n
    release(driver)


@torch.inference_mode()
def test_equal_shapes_have_equal_addresses(both):
    "Whatever else changes from step to step; the piecewise graphs' inputs do not even depend on the number of requests."
    runner, found = both.model_runner, {}
    driver, counts = decoding(both, 5)
    rng = random.Random(1)
    print("seed 1")
    for _ in range(40):
        some = rng.sample(sorted(driver.requests), rng.randint(1, 5))
        step = driver.plan(dict.fromkeys(some, 1), {})
        step.scheduled_cached_reqs.all_token_ids.clear()
        runner.rows.update(step)
        for descriptor in (runner.dispatch(step)[1], BatchDescriptor(8)):
            b = input_batch.prepare_inputs(runner.rows, step, "cpu", runner.buffers, descriptor)
            names = ("input_ids", "positions", "slot_mapping", "query_start_loc", "seq_lens", "block_table") if descriptor.uniform else ("input_ids", "positions")
            found.setdefault(descriptor, set()).add(tuple(getattr(b, name).data_ptr() for name in names))
    assert len(found) == 5 and all(len(addresses) == 1 for addresses in found.values()), found
    release(driver)


# ---- breaches are noticed

BROKEN = {
    "pads write to slot 0": ("pad_arrays", lambda old: lambda arrays, d, nobody: [a if i != 1 else np.where(a < 0, 4, a) for i, a in enumerate(old(arrays, d, nobody))]),
    "pads have a length": ("pad_arrays", lambda old: lambda arrays, d, nobody: [a if i != 4 else np.where(a == 0, 1, a).astype(np.int32) for i, a in enumerate(old(arrays, d, nobody))]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_bad_pads_are_noticed(paths, monkeypatch, name):
    where, change = BROKEN[name]
    monkeypatch.setattr(input_batch, where, change(getattr(input_batch, where)))
    worker = graph_worker(graph_config(paths["llama"], "FULL_DECODE_ONLY", compile=None))
    with pytest.raises(AssertionError): test_pads_write_nothing_and_read_nothing(worker, paths)


def elsewhere(name):
    @torch.inference_mode()
    def move(runner): setattr(runner.buffers, name, torch.zeros_like(getattr(runner.buffers, name)))
    return move


fresh_memory, moved_ids, moved_tables = map(elsewhere, ("packed", "input_ids", "block_table"))


@pytest.mark.parametrize("move", [fresh_memory, moved_ids, moved_tables], ids=["packed", "input_ids", "block_table"])
@pytest.mark.parametrize("checked", [True, False])
def test_memory_that_moved_is_noticed(paths, move, checked):
    "By the check where arguments are concerned; without it, and for what attention reads, by the tokens."
    want = run_scheduler(make_worker(paths["llama"]), PROMPTS, PARAMS, 60)[0]
    worker = graph_worker(graph_config(paths["llama"], "FULL_DECODE_ONLY", compile=None))
    worker.model_runner.graphs.check_addresses = checked
    move(worker.model_runner)
    try: got = run_scheduler(worker, PROMPTS, PARAMS, 60)[0]
    except RuntimeError as e: assert checked and move is not moved_tables and "arguments are at" in str(e)
    except IndexError: assert not checked        # positions that are something else's bytes
    else: assert got != want and not (checked and move is not moved_tables)


def test_a_pool_that_moved_is_noticed(paths):
    "The addresses of the KV pool are in the graphs."
    want = run_scheduler(make_worker(paths["llama"]), PROMPTS, PARAMS, 60)[0]
    worker = graph_worker(graph_config(paths["llama"], "FULL_DECODE_ONLY", compile=None))
    class Pinned(EagerGraph):
        def replay(self):
            now = {name: layer.kv_cache for name, layer in worker.model_runner.layers.items()}
            for name, layer in worker.model_runner.layers.items(): layer.kv_cache = self.pools[name]
            super().replay()
            for name, layer in worker.model_runner.layers.items(): layer.kv_cache = now[name]
        def capture(self, function, args):
            self.pools = {name: layer.kv_cache for name, layer in worker.model_runner.layers.items()}
            return super().capture(function, args)
    worker.model_runner.graphs.clear()
    worker.model_runner.graphs.graph_factory = Pinned
    worker.model_runner.capture_model()
    assert run_scheduler(worker, PROMPTS, PARAMS, 60)[0] == want
    old = [layer.kv_cache for layer in worker.model_runner.layers.values()]
    worker.initialize_from_config(128)
    for pool in old: pool.fill_(1.0)
    assert run_scheduler(worker, PROMPTS, PARAMS, 60)[0] != want


# ---- dispatch, capture

def dispatcher(mode, sizes=(1, 2, 4, 8, 16), seats=12, drafts=0):
    return CudagraphDispatcher(SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode[mode], cudagraph_capture_sizes=list(sizes)),
                                               scheduler_config=SimpleNamespace(num_speculative_tokens=drafts, max_num_seqs=seats)))


@pytest.mark.parametrize("mode", ALL + ["NONE"])
def test_dispatch_is_the_next_size_that_was_captured(mode):
    d = dispatcher(mode)
    captured = dict(d.get_capture_descs())
    for n in range(0, 40):
        for uniform in (True, False):
            runtime, descriptor = d.dispatch(n, uniform)
            if runtime is NONE: assert descriptor is None; continue
            assert descriptor in captured[runtime] and descriptor.num_tokens == next(s for s in (1, 2, 4, 8, 16) if s >= n > 0)
            assert runtime is FULL and uniform and descriptor.num_reqs == descriptor.num_tokens or runtime is PIECEWISE and descriptor.num_reqs is None
    assert d.dispatch(0, True) == d.dispatch(17) == (NONE, None)
    assert d.dispatch(12, True)[0] is {"FULL_AND_PIECEWISE": PIECEWISE, "PIECEWISE": PIECEWISE}.get(mode, NONE)   # 16 seats would be more than there are
    assert all(keys == sorted(keys, reverse=True) for keys in captured.values())


def test_everything_is_captured_at_start_up_and_nothing_later(both, capsys):
    runner = both.model_runner
    pieces = [w for w in runner.graphs.wrappers if w.runtime_mode is PIECEWISE]
    assert len(pieces) == 3 and runner.forward.runtime_mode is FULL
    assert all(sorted(d.num_tokens for d in w.entries) == SIZES for w in runner.graphs.wrappers)
    assert runner.graphs.num_graphs() == 4 * len(SIZES)
    run_scheduler(both, PROMPTS, PARAMS, 60)
    assert runner.graphs.num_graphs() == 4 * len(SIZES)
    with pytest.raises(RuntimeError, match="no FULL graph for BatchDescriptor.num_tokens=3.*start-up only"), torch.inference_mode():
        with set_forward_context(None, both.vllm_config, cudagraph_runtime_mode=FULL, batch_descriptor=BatchDescriptor(3, 3, True)):
            runner.forward(torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int64))
    runner.graphs.clear()
    assert runner.graphs.num_graphs() == 0
    runner.capture_model()
    assert "Graph capturing finished in" in (err := capsys.readouterr().err) and "16 recordings for batches of up to 8 tokens" in err


def test_capturing_leaves_the_caches_and_rows_as_they_were(paths):
    worker = graph_worker(graph_config(paths["llama"]))
    runner = worker.model_runner
    for layer in runner.layers.values(): layer.kv_cache.fill_(2.0)
    runner.graphs.clear()
    runner.capture_model()
    assert all((layer.kv_cache == 2).all() for layer in runner.layers.values()) and not len(runner.rows) and gc.isenabled()


def test_enforce_eager_has_no_graphs(paths):
    worker = make_worker(paths["llama"])
    runner = worker.model_runner
    assert runner.buffers is None and runner.forward is runner.model and runner.capture_model() == [] and runner.profile_cudagraph_memory() == 0
    assert runner.dispatch(SchedulerOutput.make_empty()) == (NONE, None)


def test_a_failed_capture_leaves_capturing_off():
    pool = CUDAGraphPool(EagerGraph)
    def broken(x): raise ValueError("no")
    wrapper = CUDAGraphWrapper(broken, FULL, pool)
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={}))
    with set_forward_context(None, config, cudagraph_runtime_mode=FULL, batch_descriptor=BatchDescriptor(1)):
        with pytest.raises(ValueError), pool.capturing(): wrapper(torch.zeros(1))
        assert not pool.enabled and gc.isenabled() and not wrapper.entries
        with pytest.raises(RuntimeError, match="start-up only"): wrapper(torch.zeros(1))


def test_graph_memory_is_told_from_two_recordings_a_mode(paths, monkeypatch, capsys):
    "Played counters: the first recording of a mode takes 300 MiB (FULL) or 500, each later one 10 or 0."
    worker = graph_worker(graph_config(paths["llama"]))
    runner, mib, made = worker.model_runner, 1 << 20, []
    class Costly(EagerGraph):
        def capture(self, function, args):
            made.append(1)
            return super().capture(function, args)
    runner.graphs.clear()
    runner.graphs.graph_factory = Costly
    costs = iter([500 * mib, 0, 300 * mib, 10 * mib])
    free = [10_000 * mib]
    def play(device):
        play.calls += 1
        if play.calls % 2 == 0: free[0] -= next(costs)
        return free[0]
    play.calls = 0
    monkeypatch.setattr(model_runner, "free_memory", play)
    assert runner.profile_cudagraph_memory() == 500 * mib + (len(SIZES) - 1) * (1 * mib + 10 * mib)
    assert len(made) == 2 * 3 + 2 and runner.graphs.num_graphs() == 0
    assert all(layer.kv_cache.numel() == 0 for layer in runner.layers.values())
    assert "CUDA graphs will take about 0.52 GiB" in capsys.readouterr().err


# ---- the recorder of a GPU, played

class PlayedGraph:
    def __init__(self): self.log = []
    def capture_begin(self, **kw): self.log.append(("begin", kw))
    def capture_end(self): self.log.append("end")
    def replay(self): self.log.append("replay")


def test_the_recorder_records_between_begin_and_end(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", PlayedGraph)
    graph = CudaGraph(SimpleNamespace(handle=(0, 7)))
    x = torch.arange(4.)
    output = graph.capture(lambda t: (t * 2, [t + 1]), (x,))
    assert graph.graph.log == [("begin", dict(pool=(0, 7), capture_error_mode="thread_local")), "end"]
    assert graph.output[0].data_ptr() == output[0].data_ptr() and graph.output[1][0].data_ptr() == output[1][0].data_ptr()
    graph.replay()
    assert graph.graph.log[-1] == "replay"
    broken = CudaGraph(SimpleNamespace(handle=None))
    with pytest.raises(ZeroDivisionError): broken.capture(lambda: 1 / 0, ())
    assert broken.graph.log[-1] == "end" and broken.output is None


def test_weak_references_own_nothing():
    import weakref
    t = torch.arange(12, dtype=torch.float16).view(3, 4)[:, 1:]
    with torch.inference_mode(): borrowed = weak_reference((t, 3, None))
    assert torch.equal(borrowed[0], t) and borrowed[1:] == (3, None) and borrowed[0].stride() == t.stride() and borrowed[0].dtype == t.dtype
    alive = weakref.ref(t)
    del t
    gc.collect()
    assert alive() is None


def test_profile_and_memory_with_graphs(paths, monkeypatch):
    "determine_available_memory of a GPU, played: what is left less what the graphs will take; a stated size is taken as it is."
    from dataclasses import replace
    worker = graph_worker(graph_config(paths["llama"]))
    monkeypatch.setattr(worker, "device", torch.device("cuda"))
    worker.gpu_memory = SimpleNamespace(left_for_kv=lambda: 1000)
    monkeypatch.setattr(worker.model_runner, "profile_run", lambda: None)
    monkeypatch.setattr(worker.model_runner, "profile_cudagraph_memory", lambda: 300)
    assert worker.determine_available_memory() == 700
    worker.vllm_config = replace(worker.vllm_config, cache_config=replace(worker.vllm_config.cache_config, kv_cache_memory_bytes=123))
    assert worker.determine_available_memory() == 123
