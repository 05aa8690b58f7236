"""Cases of public bug reports, by their ids: scheduler, prefix cache, KV capacity and lengths (S1 S2 S4 P1 P2 K1 K2 K4 K5)."""
import random
from collections import Counter
from dataclasses import replace

import pytest
from case_tools import check_drained, check_like, check_live, core_of, generate, greedy, ids, run_separately, solo, watch_plans
from core_tools import Engine, abort, add, check_books, free_ids, make_request, make_scheduler, solo as fake_solo, step
from worker_harness import make_worker

from litevllm import LLM, SamplingParams
from litevllm.core.request import Request
from litevllm.core.scheduler import Scheduler
from litevllm.sampling_params import RequestOutputKind

pytestmark = pytest.mark.timeout(60)
BOTH = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


@pytest.fixture(autouse=True)
def in_process(monkeypatch): monkeypatch.setenv("LITEVLLM_ENABLE_MULTIPROCESSING", "0")


def random_ids(rng, n): return [rng.randrange(3, 512) for _ in range(n)]


# ---- S1

def random_requests(rng):
    "3 to 6 prompts, output lengths and priorities, and the blocks of 4 that the largest needs."
    n = rng.randint(3, 6)
    prompts, lengths = [random_ids(rng, rng.randint(1, 14)) for _ in range(n)], [rng.randint(1, 18) for _ in range(n)]
    return prompts, lengths, [rng.randint(0, 3) for _ in range(n)], max(-(-(len(p) + k) // 4) for p, k in zip(prompts, lengths))


def check_plans(plans, budget):
    for plan, _ in plans:
        assert sum(plan.num_scheduled_tokens.values()) == plan.total_num_scheduled_tokens <= budget
        assert not set(plan.num_scheduled_tokens) & plan.preempted_req_ids


@BOTH
def test_S1_priorities_through_generate_equal_solo(tiny_llama, is_async):
    "3 to 6 requests of random priorities and lengths, in a pool that holds hardly more than the largest of them."
    preemptions = 0
    for seed in range(10):
        print("seed", seed, "async", is_async)
        rng = random.Random(seed)
        prompts, lengths, priorities, need = random_requests(rng)
        budget = rng.choice([6, 9, 64])
        with LLM(tiny_llama, scheduling_policy="priority", block_size=4, num_gpu_blocks_override=need + 2 + rng.randint(0, 1), max_num_seqs=6,
                 max_num_batched_tokens=budget, async_scheduling=is_async, enable_prefix_caching=rng.random() < .5) as llm:
            plans = watch_plans(llm)
            outs = generate(llm, prompts, [greedy(k) for k in lengths], priority=priorities)
            check_plans(plans, budget)
            preemptions += core_of(llm).scheduler.make_stats().num_preemptions
            check_drained(llm)
        for prompt, k, out in zip(prompts, lengths, outs): check_like(tiny_llama, prompt, ids(out), solo(tiny_llama, prompt, k), f"seed {seed}")
    assert preemptions > 10, "too tame to show anything"


@BOTH
def test_S1_a_better_request_comes_while_worse_ones_run(tiny_llama, is_async):
    """Requests come a few steps apart and each is better than those before it, so that victims stand in front of who pushes them out and were
    planned already in that step."""
    planned_before = 0
    for seed in range(15):
        print("seed", seed, "async", is_async)
        rng = random.Random(seed)
        prompts, lengths, _, need = random_requests(rng)
        with LLM(tiny_llama, scheduling_policy="priority", block_size=4, num_gpu_blocks_override=need + 2, max_num_seqs=6, max_num_batched_tokens=64,
                 async_scheduling=is_async, enable_prefix_caching=rng.random() < .5) as llm:
            engine, scheduler, plans, done = llm.llm_engine, core_of(llm).scheduler, watch_plans(llm), {}
            unplan = scheduler._unplan

            def counted(step, victim):
                nonlocal planned_before
                taken = unplan(step, victim)
                planned_before += bool(taken)
                return taken
            scheduler._unplan = counted
            for i, (prompt, k) in enumerate(zip(prompts, lengths)):
                engine.add_request(str(i), prompt, greedy(k), priority=9 - i)
                for _ in range(rng.randint(1, 4)): done |= {o.request_id: o for o in engine.step() if o.finished}
            for _ in range(500):
                if not engine.has_unfinished_requests(): break
                done |= {o.request_id: o for o in engine.step() if o.finished}
            check_plans(plans, 64)
            check_drained(llm)
        for i, (prompt, k) in enumerate(zip(prompts, lengths)): check_like(tiny_llama, prompt, ids(done[str(i)]), solo(tiny_llama, prompt, k), f"seed {seed}")
    assert planned_before > 3, "no victim had been planned before"


# ---- S2

@BOTH
def test_S2_every_preemption_point(is_async):
    """Two requests, a pool that is one block short of both; prompts 1..9, outputs 1..17, the victim 0..3 tokens longer or shorter,
    so that it is met at every offset of a block."""
    met = Counter()
    for n in range(1, 10):
        for max_tokens in range(1, 18):
            for more in range(4):
                lengths = n, n + more                     # the second is the victim
                need = [-(-(k + max_tokens - 1) // 4) for k in lengths]
                s = make_scheduler(blocks=max(sum(need) - 1, *need) + 1, is_async=is_async)
                a, b = (add(s, i, k, max_tokens=max_tokens, eos=None) for i, k in zip("AB", lengths))
                engine = Engine(s)
                for _ in range(300):
                    if not s.has_requests() and not engine.in_flight: break
                    while len(engine.in_flight) < engine.depth and s.has_requests():
                        before = {r.request_id: r.num_tokens for r in s.running if r.num_output_tokens}
                        plan = engine.schedule()
                        for i in plan.num_scheduled_tokens: assert len(s.kv_cache_manager.get_block_ids(i)) == -(-s.requests[i].num_computed_tokens // 4)
                        for i in plan.preempted_req_ids & set(before): met[before[i] % 4] += 1
                    engine.update()
                    check_books(s)
                assert not s.requests, "hung"
                for r in (a, b): assert engine.outputs[r.request_id] == fake_solo(r, 256)[0], (n, max_tokens, more)
    assert set(met) == {0, 1, 2, 3} and met[1] > 20, met      # 1: the length is k * block_size + 1


@pytest.fixture(scope="module")
def worker(tiny_llama): return make_worker(tiny_llama, max_num_batched_tokens=64)


def run_plans(worker, prompts, max_tokens, num_blocks):
    "The real runner under the real scheduler: tokens per prompt, and how often each request was preempted after it had produced output."
    config = worker.vllm_config
    s = Scheduler(replace(config.scheduler_config, async_scheduling=False), replace(config.cache_config, num_gpu_blocks=num_blocks))
    requests = [Request(str(i), p, greedy(max_tokens), block_hasher=s.block_hasher) for i, p in enumerate(prompts)]
    for r in requests: s.add_request(r)
    preempted = Counter()
    for _ in range(400):
        if not s.has_requests(): break
        plan = s.schedule()
        for i in plan.preempted_req_ids: preempted[i] += requests[int(i)].num_output_tokens > 0
        for i in plan.num_scheduled_tokens: assert len(s.kv_cache_manager.get_block_ids(i)) == -(-s.requests[i].num_computed_tokens // 4)
        s.update_from_output(plan, worker.execute_model(plan))
    assert not s.has_requests(), "hung"
    return [list(r.output_token_ids) for r in requests], preempted


def test_S2_the_real_runner_at_every_preemption_point(worker, tiny_llama):
    rng = random.Random(0)
    pool = random_ids(rng, 40)
    want = {(start, n): run_plans(worker, [pool[start:start + n]], 17, 128)[0][0] for start in (0, 20) for n in range(1, 13)}
    hits = 0
    for n in range(1, 10):
        for max_tokens in (1, 2, 4, 5, 6, 9, 12, 13, 16, 17):
            prompts = [pool[:n], pool[20:20 + n + (n + max_tokens) % 4]]
            need = [-(-(len(p) + max_tokens - 1) // 4) for p in prompts]
            got, preempted = run_plans(worker, prompts, max_tokens, max(sum(need) - 1, *need) + 1)
            hits += bool(preempted)
            for p, g, start in zip(prompts, got, (0, 20)): check_like(tiny_llama, p, g, want[start, len(p)][:max_tokens], (n, max_tokens))
    assert hits > 40, hits


def test_S2_the_real_runner_with_one_request_preempted_again_and_again(worker, tiny_llama):
    rng = random.Random(1)
    prompts = [random_ids(rng, n) for n in (3, 4, 5, 2)]
    want = [run_plans(worker, [p], 25, 128)[0][0] for p in prompts]
    got, preempted = run_plans(worker, prompts, 25, 11)
    assert max(preempted.values()) >= 2, preempted
    for p, g, w in zip(prompts, got, want): check_like(tiny_llama, p, g, w)


# ---- S4

@BOTH
@pytest.mark.parametrize("threshold", [0, 8])
def test_S4_a_long_prompt_beside_a_running_decode(tiny_llama, is_async, threshold):
    """A decodes; B's 200 ids come 15 a step; C, behind B, is short. A gets a token in every step. C's first token comes with the end of B's
    prompt (first come, first served, as chapter 02 says), or at once where the threshold holds B back."""
    rng = random.Random(4)
    prompts = {"A": random_ids(rng, 3), "B": random_ids(rng, 200), "C": random_ids(rng, 2)}
    lengths = {"A": 60, "B": 5, "C": 5}
    with LLM(tiny_llama, max_num_batched_tokens=16, max_num_seqs=8, async_scheduling=is_async, long_prefill_token_threshold=threshold, block_size=4) as llm:
        engine, plans = llm.llm_engine, watch_plans(llm)
        names, outs = {engine.add_request("A", prompts["A"], greedy(60)): "A"}, {}
        while sum(bool(new) for _, new in plans) < 3: engine.step()
        for i in "BC": names[engine.add_request(i, prompts[i], greedy(lengths[i]))] = i
        while engine.has_unfinished_requests(): outs |= {o.request_id: ids(o) for o in engine.step() if o.finished}
        got = [{names[i]: len(t) for i, t in new.items() if t} for plan, new in plans]
        assert [g["A"] for g in got[:60]] == [1] * 60 and all(sum(p.num_scheduled_tokens.values()) <= 16 for p, _ in plans)
        first = {i: next(k for k, g in enumerate(got) if i in g) for i in "ABC"}
        began = next(k for k, (plan, _) in enumerate(plans) if len(plan.num_scheduled_tokens) > 1)
        if threshold: assert first["C"] == began and first["B"] > began + 20
        else: assert first["C"] == first["B"] == began + 13     # 14 chunks of at most 15
        for i in "ABC": check_like(tiny_llama, prompts[i], outs[i], solo(tiny_llama, prompts[i], lengths[i]))
        check_drained(llm)


def test_S4_the_chapter_says_that_nobody_overtakes(root):
    "Where the short request must wait for the long prompt, the docs say so."
    text = (root / "nbs" / "02_scheduler.ipynb").read_text()
    assert "Nobody overtakes the head" in text and "long_prefill_token_threshold" in text


# ---- P1

@BOTH
@pytest.mark.parametrize("bs", [1, 4, 16])
def test_P1_prompts_round_a_block_cold_and_warm(tiny_llama, bs, is_async):
    "n*b-1, n*b, n*b+1: cold, warm, warm beside a cold one, and a longer prompt that shares the chain; the same tokens as with caching off."
    rng = random.Random(bs)
    text = random_ids(rng, 50)
    with LLM(tiny_llama, block_size=bs, async_scheduling=is_async) as llm:
        for n in sorted({max(1, k * bs + d) for k in (1, 2, 3) for d in (-1, 0, 1)}):
            assert llm.reset_prefix_cache()
            prompt, other, longer = text[:n], random_ids(rng, n + 3), text[:n] + random_ids(rng, 3)
            want = solo(tiny_llama, prompt, 6)
            cold, warm = generate(llm, prompt, greedy(6)) + generate(llm, prompt, greedy(6))
            beside, stranger = generate(llm, [prompt, other], greedy(6))
            third, = generate(llm, longer, greedy(6))
            for out in (cold, warm, beside): check_like(tiny_llama, prompt, ids(out), want, (bs, n))
            check_like(tiny_llama, other, ids(stranger), solo(tiny_llama, other, 6), (bs, n))
            check_like(tiny_llama, longer, ids(third), solo(tiny_llama, longer, 6), (bs, n))
            whole = (n - 1) // bs * bs         # at least the last token is computed again
            assert [o.num_cached_tokens for o in (cold, warm, beside, stranger, third)] == [0, whole, whole, 0, n // bs * bs], (bs, n)
        check_drained(llm)


# ---- P2

@pytest.mark.parametrize("leaves", "AB")
@pytest.mark.parametrize("n", [7, 8, 9, 12])
def test_P2_twins_of_one_step_keep_their_entries(n, leaves):
    "(b): two equal prompts are prefilled in one step; one of them leaves and its blocks are reused; the content of the other is still found."
    prompt, full = list(range(100, 100 + n)), n // 4
    s = make_scheduler(blocks=2 * (full + 1) + 2)
    engine = Engine(s)
    for i in "AB": add(s, i, prompt, max_tokens=30, ignore_eos=True, eos=None)
    engine.schedule(), engine.update()
    stays = {"A": "B", "B": "A"}[leaves]
    blocks = s.kv_cache_manager.get_block_ids(stays)
    abort(s, leaves)
    check_books(s)
    add(s, "C", 4 * len(free_ids(s)) - 4, max_tokens=1)      # takes all free blocks but the one that the other grows into
    engine.schedule(), engine.update()
    check_books(s)
    hits, cached = s.kv_cache_manager.get_computed_blocks(make_request(s, "D", prompt + [7]))
    assert cached == 4 * full and [b.block_id for b in hits] == blocks[:full]
    abort(s, stays)
    d = add(s, "D", prompt + [7], max_tokens=3)
    engine.drain()
    assert engine.outputs["D"] == fake_solo(d, 256)[0] and d.num_cached_tokens == 4 * full
    check_books(s)


@BOTH
def test_P2_prompts_that_push_each_other_out_of_the_cache(tiny_llama, is_async):
    "(a): five usable blocks, A B C A ... of about four blocks each; and twins submitted together, one of which ends early."
    rng = random.Random(2)
    prompts = {c: random_ids(rng, n) for c, n in (("A", 14), ("B", 16), ("C", 13))}
    with LLM(tiny_llama, block_size=4, num_gpu_blocks_override=6, async_scheduling=is_async) as llm:
        pool, hits = core_of(llm).scheduler.kv_cache_manager.block_pool, 0
        for c in "ABCAABBCBA":
            out, = generate(llm, prompts[c], greedy(4))
            hits += out.num_cached_tokens
            check_like(tiny_llama, prompts[c], ids(out), solo(tiny_llama, prompts[c], 4), c)
            assert all(b.ref_cnt == 0 for b in pool.blocks)
        assert hits >= 24      # what was just there is found
        twin = prompts["A"][:8]
        for lengths in ((1, 6), (6, 1)):
            assert llm.reset_prefix_cache()
            for out, k in zip(generate(llm, [twin, twin], [greedy(k) for k in lengths]), lengths):
                check_like(tiny_llama, twin, ids(out), solo(tiny_llama, twin, 6)[:k], lengths)
            for c in "ABA":
                check_like(tiny_llama, prompts[c], ids(generate(llm, prompts[c], greedy(4))[0]), solo(tiny_llama, prompts[c], 4), (lengths, c))
        check_drained(llm)


# ---- K1

@pytest.mark.timeout(30)
@BOTH
def test_K1_a_prompt_larger_than_the_pool(tiny_llama, is_async):
    "8 blocks of 4, of which 7 can be used; 60 ids then 4 and the other order; and the sizes round the limit."
    small = [5, 6, 7, 8]
    with LLM(tiny_llama, block_size=4, num_gpu_blocks_override=8, max_model_len=128, async_scheduling=is_async) as llm:
        want = solo(tiny_llama, small, 5)
        for large in (29, 60, 127):
            words = rf"needs {-(-large // 4)} KV blocks of 4.*pool has 7"
            for order in ([[9] * large, small], [small, [9] * large]):
                with pytest.raises(ValueError, match=words): generate(llm, order, greedy(5))
                check_drained(llm)
                done = run_separately(llm.llm_engine, *((str(len(p)), p, greedy(5)) for p in order))
                assert isinstance(done[str(large)], ValueError) and ids(done["4"]) == want
                last = {len(o.prompt_token_ids or []): o for o in llm.stream(order, greedy(5, output_kind=RequestOutputKind.FINAL_ONLY))}
                assert ids(last.pop(4)) == want
                refused, = last.values()
                assert refused.finished and refused.outputs[0].finish_reason == "error" and "pool has 7" in refused.error
                check_live(llm)
        for fits in (27, 28):      # as many as there is room for; the answer ends where the pool does
            out, = generate(llm, [9] * fits, greedy(20))
            assert (out.outputs[0].finish_reason, len(ids(out))) == ("error", 28 - fits + 1)
            check_live(llm)


# ---- K2

@BOTH
@pytest.mark.parametrize("caching", [True, False], ids=["cache", "no cache"])
def test_K2_the_only_request_outgrows_the_pool(tiny_llama, caching, is_async):
    "4 blocks of 4, prompts 1..12 of which the case names 10, max_tokens 50: it ends with the reason and the tokens so far in less than 100 steps."
    with LLM(tiny_llama, block_size=4, num_gpu_blocks_override=4, async_scheduling=is_async, enable_prefix_caching=caching) as llm:
        scheduler, steps = core_of(llm).scheduler, []
        usable, schedule = 4 * (scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1), scheduler.schedule

        def counted():
            steps.append(1)
            assert len(steps) < 100, "endless"
            return schedule()
        scheduler.schedule = counted
        rng = random.Random(3)
        for n in range(1, usable + 1):
            prompt = random_ids(rng, n)
            steps.clear()
            out, = generate(llm, prompt, greedy(50))
            assert out.outputs[0].finish_reason == "error" and f"the pool has {usable // 4}" in out.error and out.finished, out
            assert len(ids(out)) == usable - n + 1      # the last token needs no block any more
            check_like(tiny_llama, prompt, ids(out), solo(tiny_llama, prompt, 50)[:usable - n + 1], n)
            steps.clear()
            check_live(llm)


# ---- K4

@pytest.mark.parametrize("value", [0, -1])
def test_K4_max_tokens_that_are_none_are_refused(value):
    with pytest.raises(ValueError, match=f"max_tokens.*{value}"): SamplingParams(max_tokens=value)


def test_K4_max_tokens_round_the_rest_of_the_context(tiny_llama):
    "None: the rest of the context. Too large: cut to it. The numbers add up, and the engine lives."
    with LLM(tiny_llama, max_model_len=24) as llm:
        for n in (1, 10, 22, 23):
            rest = 24 - n
            for asked in (None, 10**9, 10**30, 2**63, rest + 1, rest, max(rest - 1, 1), 1):
                got = min(asked or rest, rest)
                out, = generate(llm, [7] * n, greedy(asked))
                assert len(ids(out)) == got and len(out.prompt_token_ids) == n and out.outputs[0].finish_reason == "length", (n, asked)
                check_live(llm)
        for n in (24, 25):
            with pytest.raises(ValueError, match=f"{n} tokens.*24"): generate(llm, [7] * n, greedy(1))
            check_live(llm)


# ---- K5

@pytest.mark.parametrize("bad", ["", [""], [], [[]], {"prompt": ""}, {"prompt_token_ids": []}], ids=repr)
def test_K5_empty_prompts_beside_good_ones(tiny_llama, bad):
    good = [[5, 6, 7], [8, 9]]
    with LLM(tiny_llama) as llm:
        assert llm.get_tokenizer()("").input_ids == []      # this tokenizer adds no BOS
        if bad == []: assert generate(llm, bad, greedy(4)) == []      # no prompts, no results
        else:
            with pytest.raises(ValueError, match="the prompt is empty"): generate(llm, bad, greedy(4))
        one = bad[0] if bad and isinstance(bad, list) else bad
        for place in range(3):
            batch = [*good[:place], one, *good[place:]]
            with pytest.raises(ValueError, match=rf"prompts\[{place}\] \(of 3\).*the prompt is empty"): generate(llm, batch, greedy(4))
            check_drained(llm)
            done = run_separately(llm.llm_engine, *((str(i), p, greedy(4)) for i, p in enumerate(batch)))
            assert isinstance(done.pop(str(place)), ValueError)
            assert [ids(o) for _, o in sorted(done.items())] == [solo(tiny_llama, p, 4) for p in good]
        check_live(llm)
