"""Rows, packing, the runner's steps, drafts, and the size of the pool."""
import random
import time

import numpy as np
import pytest
import torch

from litevllm.core.output import CachedRequestData, NewRequestData, SchedulerOutput
from litevllm.sampling_params import SamplingParams
from litevllm.tiny import write_tiny_model
from litevllm.worker import worker as worker_module
from litevllm.worker.input_batch import InputBatch, RequestRows, lookup, prepare_inputs, write_sampled
from litevllm.worker.worker import cpu_kv_budget, cpu_memory_available, get_num_blocks
from worker_harness import GREEDY, Driver, make_config, make_worker, run_scheduler


@pytest.fixture(scope="module")
def path(tmp_path_factory): return write_tiny_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def worker(path): return make_worker(path, num_gpu_blocks_override=4096)


def new(req_id, tokens, blocks, computed=0, params=GREEDY): return NewRequestData(req_id, tokens, params, blocks, computed)


def plan(news=(), counts=None, cached=None, **kw):
    return SchedulerOutput(list(news), cached or CachedRequestData(), counts or {}, sum((counts or {}).values()), **kw)


# ---- packing

def reference_example():
    rows = RequestRows(max_num_reqs=4, max_model_len=64, block_size=16)
    first = plan([new("A", [100, 101, 102, 103], [1]), new("B", list(range(200, 251)), [2, 3, 4, 5], 50),
                  new("C", list(range(300, 331)), [6, 7], 30)], {"A": 4, "B": 1, "C": 1})
    rows.update(first)
    return prepare_inputs(rows, first)


def test_reference_example():
    batch = reference_example()
    assert batch.req_ids == ["A", "B", "C"] and batch.num_reqs == 3 and batch.num_tokens == 6
    assert batch.num_scheduled_tokens.tolist() == [4, 1, 1]
    assert batch.input_ids.tolist() == [100, 101, 102, 103, 250, 330]
    assert batch.positions.tolist() == [0, 1, 2, 3, 50, 30]
    assert batch.query_start_loc.tolist() == [0, 4, 5, 6]
    assert batch.seq_lens.tolist() == [4, 51, 31]
    assert batch.logits_indices.tolist() == [3, 4, 5]
    assert batch.slot_mapping.tolist() == [16, 17, 18, 19, 5 * 16 + 2, 7 * 16 + 14]
    assert batch.block_table.tolist() == [[1, 0, 0, 0], [2, 3, 4, 5], [6, 7, 0, 0]]
    assert (batch.max_query_len, batch.max_seq_len) == (4, 51)
    assert batch.query_start_loc.dtype == batch.seq_lens.dtype == batch.block_table.dtype == torch.int32
    assert batch.positions.dtype == batch.slot_mapping.dtype == torch.int64


def test_reference_example_shows_itself():
    html = reference_example()._repr_html_()
    assert "query_start_loc=[0, 4, 5, 6]" in html and html.count("✔") == 3 and "<td>250</td>" in html


def test_slot_of_a_position():
    rows = RequestRows(2, 8, block_size=4)
    step = plan([new("A", [1, 2, 3, 4, 5, 6], [7, 2], 5)], {"A": 1})
    rows.update(step)
    assert prepare_inputs(rows, step).slot_mapping.tolist() == [9]


def test_partial_prefill_has_no_logits_row():
    rows = RequestRows(4, 64, 16)
    step = plan([new("A", list(range(10)), [1]), new("B", list(range(5)), [2])], {"A": 4, "B": 5})
    rows.update(step)
    batch = prepare_inputs(rows, step)
    assert batch.num_logits.tolist() == [0, 1] and batch.logits_indices.tolist() == [8]


def slow_pack(known, counts, drafts, block_size):
    "The flat batch token by token: known is {req_id: (tokens, computed, blocks)}."
    ids, positions, slots, starts, lengths, logits, choose = [], [], [], [0], [], [], []
    for req_id, count in counts.items():
        tokens, computed, blocks = known[req_id]
        with_drafts = tokens + drafts.get(req_id, [])
        for p in range(computed, computed + count):
            ids.append(with_drafts[p])
            positions.append(p)
            slots.append(blocks[p // block_size] * block_size + p % block_size)
            if p >= len(tokens) - 1:
                logits.append(len(ids) - 1)
                choose.append(p + 1)
        starts.append(len(ids))
        lengths.append(computed + count)
    return ids, positions, slots, starts, lengths, logits, choose


@pytest.mark.parametrize("seed", range(8))
def test_random_traffic_packs_like_the_slow_reference(seed):
    print(f"seed {seed}")
    rng = random.Random(seed)
    block_size, seats, max_len = rng.choice([1, 3, 4, 16]), rng.randint(1, 7), 48
    rows = RequestRows(seats, max_len, block_size)
    known, running, waiting, serial, previous = {}, [], [], 0, set()   # req_id -> [tokens, computed, blocks, prompt_len]
    for _ in range(150):
        finished = {r for r in running if rng.random() < .1 or len(known[r][0]) >= max_len - 1} | {r for r in waiting if rng.random() < .05}
        preempted = {r for r in running if r not in finished and rng.random() < .1}
        running = [r for r in running if r not in finished | preempted]
        waiting = [r for r in waiting if r not in finished] + sorted(preempted)
        for r in preempted: known[r][1], known[r][2] = 0, []
        counts, drafts, news, cached = {}, {}, [], CachedRequestData()
        for r in list(running):
            if rng.random() < .2: continue   # a request that gets no budget this time
            tokens, computed, _, _ = known[r]
            counts[r] = rng.randint(1, len(tokens) - computed)
            room = max_len - 1 - len(tokens)
            if computed + counts[r] == len(tokens) and room > 0 and rng.random() < .4:
                drafts[r] = [rng.randrange(512) for _ in range(rng.randint(1, min(3, room)))]
                counts[r] += len(drafts[r])
        resumed = []
        while len(running) < seats and rng.random() < .6:
            if waiting and not preempted and rng.random() < .5:
                resumed.append(waiting.pop(0))
                running.append(resumed[-1])
            else:
                r, serial = f"r{serial}", serial + 1
                known[r] = [[rng.randrange(512) for _ in range(rng.randint(1, 30))], 0, [], 0]
                known[r][3] = len(known[r][0])
                running.append(r)
            r = running[-1]
            hit = rng.randrange(len(known[r][0]))
            known[r][1] = hit
            counts[r] = rng.randint(1, len(known[r][0]) - hit)
        for r, count in counts.items():
            tokens, computed, blocks, _ = known[r]
            fresh = [rng.randrange(1, 999) for _ in range(-(-(computed + count) // block_size) - len(blocks))]
            blocks += fresh
            if r not in rows.requests: news.append(new(r, list(tokens), list(blocks), computed))
            else:
                cached.req_ids.append(r)
                cached.new_block_ids.append(fresh or None)
                cached.num_computed_tokens.append(computed)
                if r not in previous: cached.all_token_ids[r] = list(tokens)
                if r in resumed: cached.resumed_req_ids.add(r)
        step = plan(news, counts, cached, scheduled_spec_decode_tokens=drafts, preempted_req_ids=preempted, finished_req_ids=finished)
        previous = set(counts)
        rows.update(step)
        for r in finished: del known[r]
        assert sorted(rows.row_of) == sorted(running)
        assert sorted(rows.free_rows + list(rows.row_of.values())) == list(range(seats))
        assert set(rows.requests) == set(known)
        if not counts: continue
        batch = prepare_inputs(rows, step)
        expected = slow_pack({r: v[:3] for r, v in known.items()}, counts, drafts, block_size)
        got = [t.tolist() for t in (batch.input_ids, batch.positions, batch.slot_mapping, batch.query_start_loc, batch.seq_lens,
                                    batch.logits_indices, batch.logits_positions)]
        assert got == list(expected)
        for r, table in zip(batch.req_ids, batch.block_table.tolist()): assert table[:len(known[r][2])] == known[r][2][:len(table)]
        sampled = []
        for r in counts:
            done = known[r][1] + counts[r] - len(drafts.get(r, []))
            fresh = [rng.randrange(512) for _ in range(rng.randint(1, 1 + len(drafts.get(r, []))))] if done == len(known[r][0]) else []
            known[r][1] += counts[r] - (len(drafts.get(r, [])) + 1 - len(fresh) if fresh else 0)
            known[r][0] += fresh
            sampled.append(fresh)
        write_sampled(rows, batch, sampled)
        for r, row in rows.row_of.items():
            assert rows.token_ids[row, :rows.num_tokens[row]].tolist() == known[r][0], r


# ---- rows

def test_rows_are_reused_and_run_out():
    rows = RequestRows(2, 16, 4)
    rows.update(plan([new("A", [1], [1]), new("B", [2], [2])], {"A": 1, "B": 1}))
    row = rows.row_of["A"]
    rows.update(plan([new("C", [3, 4], [3])], {"C": 2}, finished_req_ids={"A"}))
    assert rows.row_of["C"] == row and "A" not in rows.requests and len(rows) == 2
    assert rows.num_blocks[row] == 1 and rows.block_table[row, 0] == 3 and rows.num_tokens[row] == 2
    with pytest.raises(ValueError, match="all 2 rows are taken"): rows.update(plan([new("D", [5], [4])], {"D": 1}))


def test_a_known_id_is_refused_and_an_unknown_end_is_fine():
    rows = RequestRows(2, 16, 4)
    rows.update(plan([new("A", [1], [1])], {"A": 1}))
    with pytest.raises(ValueError, match="'A' is already known"): rows.update(plan([new("A", [1], [1])], {"A": 1}))
    rows.update(plan(finished_req_ids={"zzz"}, preempted_req_ids={"yyy"}))
    assert list(rows.row_of) == ["A"]


def test_preempted_row_is_rebuilt_with_its_table_replaced():
    rows = RequestRows(2, 16, 4)
    rows.update(plan([new("A", [1, 2, 3, 4, 5], [1, 2])], {"A": 5}))
    rows.update(plan([new("B", [9], [3])], {"B": 1}, preempted_req_ids={"A"}))
    assert list(rows.row_of) == ["B"] and "A" in rows.requests
    cached = CachedRequestData(["A"], {"A"}, {"A": [1, 2, 3, 4, 5, 6]}, [[3, 4]], [0], [1])
    rows.update(plan(counts={"A": 6}, cached=cached))
    row = rows.row_of["A"]
    assert rows.num_blocks[row] == 2 and rows.block_table[row, :2].tolist() == [3, 4]
    assert rows.token_ids[row, :6].tolist() == [1, 2, 3, 4, 5, 6] and rows.requests["A"].prompt_len == 5


def test_a_resumed_request_whose_row_still_stands_gets_its_new_table():
    "The plan that preempted it may have been one that nobody executed."
    rows = RequestRows(2, 16, 4)
    rows.update(plan([new("A", [1, 2, 3, 4, 5], [1, 2])], {"A": 5}))
    rows.update(plan(counts={"A": 6}, cached=CachedRequestData(["A"], {"A"}, {"A": [1, 2, 3, 4, 5, 6]}, [[7, 8]], [0], [1])))
    row = rows.row_of["A"]
    assert rows.num_blocks[row] == 2 and rows.block_table[row, :2].tolist() == [7, 8] and rows.num_tokens[row] == 6


def test_seed_of_an_unseeded_request_survives_preemption_and_differs_between_requests():
    rows = RequestRows(2, 16, 4, seed=7)
    free = SamplingParams(temperature=1.0)
    rows.update(plan([new("A", [1], [1], params=free), new("B", [1], [2], params=free)], {"A": 1, "B": 1}))
    a, b = rows.seed[lookup(rows, ["A", "B"])]
    assert a != b
    rows.update(plan(preempted_req_ids={"A"}))
    rows.update(plan(counts={"A": 1}, cached=CachedRequestData(["A"], {"A"}, {"A": [1]}, [[3]], [0], [0])))
    assert rows.seed[rows.row_of["A"]] == a
    again = RequestRows(2, 16, 4, seed=7)
    again.update(plan([new("A", [1], [1], params=free)], {"A": 1}))
    assert again.seed[again.row_of["A"]] == a


def test_steady_decode_packs_in_no_time():
    "256 decodes: the gather must not walk requests or tokens in Python."
    rows = RequestRows(256, 4096, 16)
    names = [f"r{i}" for i in range(256)]
    rows.update(plan([new(r, [1] * 2000, list(range(126)), 1999) for r in names], dict.fromkeys(names, 1)))
    cached = CachedRequestData(names, new_block_ids=[None] * 256, num_computed_tokens=[1999] * 256, num_output_tokens=[0] * 256)
    step, best = plan(counts=dict.fromkeys(names, 1), cached=cached), 1e9
    for _ in range(20):
        start = time.perf_counter()
        rows.update(step)
        prepare_inputs(rows, step)
        best = min(best, time.perf_counter() - start)
    assert best < 5e-3, f"{best * 1e3:.2f} ms"


# ---- the runner

PROMPT_A, PROMPT_B = list(range(5, 18)), list(range(40, 47))


def solo(worker, prompt, count, params=GREEDY, chunk=10**9):
    driver = Driver(worker)
    driver.add("solo", prompt, params)
    out = driver.run("solo", count, chunk)
    driver.finish("solo")
    worker.execute_model(driver.plan({}, {}))
    return out


def test_greedy_is_transformers_greedy(worker, path):
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for prompt in (PROMPT_A, PROMPT_B, [3]):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert solo(worker, prompt, 8) == expected[0, len(prompt):].tolist()


def test_partial_chunk_yields_no_token(worker):
    driver = Driver(worker, 100)
    driver.add("A", PROMPT_A)
    driver.add("B", PROMPT_B)
    assert driver.step({"A": 5}) == {"A": []}
    assert driver.step({"A": 4, "B": 7})["A"] == []
    assert len(driver.step({"A": 4, "B": 1})["A"]) == 1
    assert driver.requests["A"].outputs == solo(worker, PROMPT_A, 1)
    for r in "AB": driver.finish(r)
    worker.execute_model(driver.plan({}, {}))
    assert len(worker.model_runner.rows) == 0 and not worker.model_runner.rows.requests


def test_empty_plan(worker):
    output = worker.execute_model(SchedulerOutput.make_empty())
    assert (output.req_ids, output.req_id_to_index, output.sampled_token_ids) == ([], {}, [])


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.8, seed=42), SamplingParams(temperature=1.3, top_p=.9, top_k=40, seed=5)],
                         ids=["greedy", "seed42", "filters"])
def test_tokens_do_not_depend_on_chunks_neighbours_or_preemption(worker, params):
    expected = solo(worker, PROMPT_A, 12, params)
    assert solo(worker, PROMPT_A, 12, params, chunk=3) == expected
    for order in (["A", "B", "C"], ["C", "B", "A"]):
        driver = Driver(worker, 200)
        for r, p in (("A", params), ("B", SamplingParams(temperature=1.0)), ("C", GREEDY)):
            driver.add(r, PROMPT_A if r == "A" else PROMPT_B, p)
        for _ in range(12): driver.step({r: len(driver.requests[r].tokens) - driver.requests[r].computed for r in order})
        assert driver.requests["A"].outputs == expected
        for r in order: driver.finish(r)
        worker.execute_model(driver.plan({}, {}))
    for at in (1, 4, 9):
        driver = Driver(worker, 400)
        driver.add("A", PROMPT_A, params)
        driver.add("B", PROMPT_B)
        driver.run("A", at)
        driver.preempt("A")
        driver.run("B", 3)          # takes the row that A had
        assert driver.run("A", 12, chunk=5) == expected
        for r in "AB": driver.finish(r)
        worker.execute_model(driver.plan({}, {}))


def test_a_skipped_request_goes_on(worker):
    driver = Driver(worker, 600)
    driver.add("A", PROMPT_A)
    driver.add("B", PROMPT_B)
    driver.run("A", 3)
    driver.run("B", 2)
    assert driver.run("A", 8) == solo(worker, PROMPT_A, 8)
    for r in "AB": driver.finish(r)
    worker.execute_model(driver.plan({}, {}))


def test_unseeded_requests_vary(worker):
    free = SamplingParams(temperature=1.5)
    assert solo(worker, PROMPT_A, 10, free) != solo(worker, PROMPT_A, 10, free)


def test_garbage_in_free_blocks_is_harmless(path):
    clean = solo(make_worker(path), PROMPT_A, 6)
    dirty = make_worker(path)
    for layer in dirty.model_runner.layers.values(): layer.kv_cache.fill_(float("nan"))
    assert solo(dirty, PROMPT_A, 6) == clean


def test_new_blocks_are_zeroed_when_asked(path):
    worker = make_worker(path)
    for layer in worker.model_runner.layers.values(): layer.kv_cache.fill_(1.0)
    step = SchedulerOutput.make_empty()
    step.new_block_ids_to_zero = [3, 5]
    worker.execute_model(step)
    for layer in worker.model_runner.layers.values():
        assert layer.kv_cache[:, [3, 5]].abs().sum() == 0 and (layer.kv_cache[:, [2, 4]] == 1).all()


def test_logits_that_are_not_finite_are_reported(path, capsys):
    worker = make_worker(path)
    worker.model_runner.model.lm_head.weight.fill_(float("nan"))
    driver = Driver(worker)
    driver.add("sick", PROMPT_A)
    assert driver.step({"sick": len(PROMPT_A)}) == {"sick": []}
    assert "sick: the logits are not finite" in capsys.readouterr().err


# ---- drafts

def test_draft_rows(worker):
    rows = RequestRows(4, 64, 4)
    step = plan([new("A", [1, 2, 3], [1, 2]), new("B", [4], [3])], {"A": 5, "B": 1}, scheduled_spec_decode_tokens={"A": [8, 9]})
    rows.update(step)
    batch = prepare_inputs(rows, step)
    assert batch.input_ids.tolist() == [1, 2, 3, 8, 9, 4]
    assert batch.num_logits.tolist() == [3, 1] and batch.logits_indices.tolist() == [2, 3, 4, 5]
    assert batch.logits_positions.tolist() == [3, 4, 5, 1] and batch.seq_lens.tolist() == [5, 1]


@pytest.mark.parametrize("wrong_at", [None, 0, 1, 2])
def test_accepts_the_right_prefix_and_one_more(worker, wrong_at):
    truth = solo(worker, PROMPT_A, 5)
    driver = Driver(worker, 700)
    driver.add("A", PROMPT_A)
    driver.add("B", PROMPT_B)
    driver.step({"A": len(PROMPT_A), "B": len(PROMPT_B)})
    drafts = truth[1:4]
    if wrong_at is not None: drafts[wrong_at] = (drafts[wrong_at] + 1) % 512
    accepted = 3 if wrong_at is None else wrong_at
    out = driver.step({"A": 4, "B": 1}, {"A": drafts})
    assert out["A"] == truth[1:2 + accepted]
    assert len(out["B"]) == 1
    assert driver.requests["A"].computed == len(driver.requests["A"].tokens) - 1
    assert driver.run("A", 5)[:5] == truth and driver.requests["B"].outputs == solo(worker, PROMPT_B, 2)
    for r in "AB": driver.finish(r)
    worker.execute_model(driver.plan({}, {}))


def test_drafts_for_a_random_request_are_refused_by_name(path):
    driver = Driver(make_worker(path))
    driver.add("hot", PROMPT_A, SamplingParams(temperature=0.7))
    driver.step({"hot": len(PROMPT_A)})
    with pytest.raises(ValueError, match="'hot': 2 draft tokens with temperature 0.7"): driver.step({"hot": 3}, {"hot": [1, 2]})


class Scripted:
    "Drafts cut from the known answer; `spoil` says which of them to make wrong."
    def __init__(self, answers, prompts, rng, spoil):
        self.full = {tuple(p): p + a for p, a in zip(prompts, answers)}
        self.rng, self.spoil, self.calls = rng, spoil, 0

    def propose(self, req_ids, token_ids_per_req):
        self.calls += 1
        drafts = []
        for tokens in token_ids_per_req:
            full = next(f for p, f in self.full.items() if tuple(tokens[:len(p)]) == p)
            draft = full[len(tokens):len(tokens) + self.rng.randint(0, 3)]
            drafts.append([(t + 1) % 512 if self.spoil(self.rng) else t for t in draft])
        return drafts


@pytest.mark.parametrize("kind, spoil", [("right", lambda r: False), ("wrong", lambda r: True), ("mixed", lambda r: r.random() < .4)])
def test_drafts_through_the_real_scheduler_change_no_token(path, kind, spoil):
    worker = make_worker(path)
    prompts = [PROMPT_A, PROMPT_B, list(range(100, 121)), [7]]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (12, 9, 17, 1)]
    plain, _, preemptions = run_scheduler(worker, prompts, params, 40)
    assert [len(o) for o in plain] == [12, 9, 17, 1] and preemptions == 0
    for seed in range(3):
        print(f"kind {kind} seed {seed}")
        proposer = worker.model_runner.proposer = Scripted(plain, prompts, random.Random(seed), spoil)
        for blocks in (40, 14):   # the small pool preempts
            outputs, scheduler, preemptions = run_scheduler(worker, prompts, params, blocks, num_speculative_tokens=3)
            assert outputs == plain and (preemptions > 0) == (blocks == 14)
            assert scheduler.make_stats().num_free_blocks == blocks - 1
        assert proposer.calls > 0
    worker.model_runner.proposer = None


# ---- memory

def test_blocks_from_memory_and_both_numbers_in_the_error(path, capsys):
    config = make_config(path, max_model_len=64, block_size=16)
    assert get_num_blocks(config, 10_000, 1000) == 10
    assert "KV cache: 10 blocks of 16 tokens" in (err := capsys.readouterr().err) and "2.2 full-length requests; model in float32, cache in float32\n" in err
    assert get_num_blocks(config, 5_000, 1000) == 5                      # exactly one request, and the null block
    with pytest.raises(ValueError, match=r"max_model_len=64 tokens needs 4 KV blocks .* the pool has 3 usable"):
        get_num_blocks(config, 4_999, 1000)


@pytest.mark.parametrize("backend, cache", [("CPU_ATTN", "float32"), ("TORCH_REF", "bfloat16")])
def test_the_log_names_both_dtypes(path, capsys, backend, cache):
    worker = make_worker(path, dtype="bfloat16", attention_backend=backend)
    assert f"model in bfloat16, cache in {cache}\n" in capsys.readouterr().err
    assert all(layer.kv_cache.dtype == getattr(torch, cache) for layer in worker.model_runner.layers.values())


def test_override_warns_instead(path, capsys):
    config = make_config(path, max_model_len=64, block_size=16, num_gpu_blocks_override=3)
    assert get_num_blocks(config, 0, 1000) == 3
    assert "needs 4 KV blocks" in (err := capsys.readouterr().err) and "2 usable" in err and "WARNING" in err


def test_cpu_budget(path, monkeypatch, capsys):
    config, page, GiB = make_config(path), 10**6, 1 << 30
    full = (config.scheduler_config.max_num_seqs * -(-config.model_config.max_model_len // 4) + 1)
    monkeypatch.delenv("LITEVLLM_CPU_KVCACHE_SPACE", raising=False)
    assert cpu_kv_budget(config, 10**8, 16 * GiB) == 4 * GiB
    assert cpu_kv_budget(config, 10, 16 * GiB) == full * 10               # more could never be used
    assert cpu_kv_budget(config, 10**8, 6 * GiB) == 3 * GiB
    assert "KV pool cut from 4 GiB to 3.00 GiB" in capsys.readouterr().err
    monkeypatch.setenv("LITEVLLM_CPU_KVCACHE_SPACE", "0.25")
    assert cpu_kv_budget(config, page, None) == GiB // 4
    for bad in ("much", "-1", "0"):
        monkeypatch.setenv("LITEVLLM_CPU_KVCACHE_SPACE", bad)
        with pytest.raises(ValueError, match=f"LITEVLLM_CPU_KVCACHE_SPACE .*{bad}"): cpu_kv_budget(config, page, None)
    stated = make_config(path, kv_cache_memory_bytes=12345)
    assert cpu_kv_budget(stated, page, 10**6) == 12345
    with pytest.raises(ValueError, match="kv_cache_memory_bytes=12345 .* more than the memory available"): cpu_kv_budget(stated, page, 12344)


def test_available_memory_is_plausible():
    available = cpu_memory_available()
    assert available is not None and 1 << 20 < available < 1 << 50


def test_pool_shape_and_page_size(path):
    worker = make_worker(path, num_gpu_blocks_override=9)
    spec = worker.get_kv_cache_spec()
    assert len(spec) == 2 and worker.page_size_bytes() == sum(spec.values()) == 2 * (2 * 4 * 2 * 16 * 4)
    for layer in worker.model_runner.layers.values():
        assert tuple(layer.kv_cache.shape) == (2, 9, 4, 2, 16) and layer.kv_cache.nbytes == 9 * worker.page_size_bytes() // 2


def test_warm_up_leaves_nothing(worker):
    worker_module.warm_up(worker.model_runner)
    rows = worker.model_runner.rows
    assert not rows.row_of and not rows.requests and len(rows.free_rows) == rows.max_num_reqs


@pytest.mark.parametrize("max_model_len", [2, 3, 5])
def test_warm_up_of_a_short_model(path, max_model_len):
    worker = make_worker(path, max_model_len=max_model_len, max_num_batched_tokens=8)
    assert len(solo(worker, [3], 1)) == 1


def test_profile_run_needs_no_cache_and_leaves_no_trace(path):
    config = make_config(path, compile="aot_eager", num_gpu_blocks_override=8)
    worker = worker_module.Worker(config)
    worker.init_device()
    worker.load_model()
    worker.model_runner.profile_run()
    worker.initialize_from_config(80)
    worker.compile_or_warm_up_model()
    assert all((layer.kv_cache[:, 1:] == 0).all() for layer in worker.model_runner.layers.values())
    assert len(solo(worker, PROMPT_A, 3)) == 3


def test_gpu_memory_arithmetic(monkeypatch):
    "No GPU here: torch's counters are played. 80 units in all, 75 free; the profile run peaks at 20, and 3 appear outside torch."
    unit, cuda = 1 << 30, torch.cuda
    free = [75 * unit]
    reserved = [0]
    monkeypatch.setattr(cuda, "mem_get_info", lambda: (free[0], 80 * unit))
    monkeypatch.setattr(cuda, "memory_reserved", lambda: reserved[0])
    monkeypatch.setattr(cuda, "max_memory_allocated", lambda: 20 * unit)
    for name in ("reset_peak_memory_stats", "synchronize", "empty_cache"): monkeypatch.setattr(cuda, name, lambda: None)
    with pytest.raises(ValueError, match=r"gpu_memory_utilization=0.95 asks for 76.00 of 80.00 GiB, and 75.00 GiB are free"):
        worker_module.GpuMemory(0.95)
    memory = worker_module.GpuMemory(0.5)
    free[0], reserved[0] = (75 - 22 - 3) * unit, 22 * unit
    assert memory.left_for_kv() == (40 - 20 - 3) * unit


def test_the_device_of_a_gpu_has_a_number(path, monkeypatch):
    "torch.cuda.set_device refuses a device without one."
    from dataclasses import replace
    from litevllm.config import DeviceConfig
    asked = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: asked.append(torch._utils._get_device_index(device)))
    monkeypatch.setattr(worker_module, "GpuMemory", lambda utilization: None)
    monkeypatch.setattr(worker_module, "ModelRunner", lambda config, device: device)
    worker = worker_module.Worker(replace(make_config(path), device_config=DeviceConfig("cuda")))
    worker.init_device()
    assert asked == [0] and worker.model_runner == torch.device("cuda", 0)
