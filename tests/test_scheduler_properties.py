"""Random traffic through the real scheduler and a fake runner; after every operation the invariants hold, and every output
equals SOLO.

A failing case prints its options and its seed."""
import itertools, random

import pytest
from core_tools import Engine, abort, check_books, make_request, make_scheduler, solo

from litevllm.core.block_pool import BlockHashToBlockMap
from litevllm.core.kv_cache_manager import KVCacheManager

CASES = list(itertools.product(("fcfs", "priority"), (True, False), (True, False), (False, True)))
SEEDS = 80


def cdiv(a, b): return -(-a // b)


def expected_running_pass(s):
    """The first pass by the book (semantics 12 and 24), on counts alone: (plan of running requests in order, victims in order).

    It knows a table and owner counts, no queue and no hash; where vLLM 0.22 passes a request over, so does this."""
    kv, config = s.kv_cache_manager, s.scheduler_config
    tables = {r: [b.block_id for b in blocks] for r, blocks in kv.req_to_blocks.items()}
    owners = {b.block_id: b.ref_cnt for b in kv.block_pool.blocks}
    free, budget = kv.block_pool.get_num_free_blocks(), config.max_num_batched_tokens
    running, plan, victims, i = list(s.running), {}, [], 0
    while i < len(running) and budget:
        r, drafts = running[i], len(running[i].spec_token_ids)
        n = r.num_tokens + drafts + r.num_output_placeholders - r.num_computed_tokens
        if 0 < config.long_prefill_token_threshold < n: n = config.long_prefill_token_threshold
        n = min(n, budget, config.max_model_len - 1 - r.num_computed_tokens)
        in_flight = r.num_output_placeholders
        if in_flight and r.num_computed_tokens + 2 - in_flight >= r.num_prompt_tokens + r.max_tokens: n = 0
        if n == 0:
            i += 1
            continue
        while True:
            need = max(0, cdiv(r.num_computed_tokens + n, kv.block_size) - len(tables[r.request_id]))
            if need <= free: break
            victim = running[-1] if s.policy.value == "fcfs" else max(running, key=lambda v: (v.priority, v.arrival_time))
            running.remove(victim)
            victims.append(victim.request_id)
            for b in tables.pop(victim.request_id):
                owners[b] -= 1
                free += owners[b] == 0
            if victim.request_id in plan:
                budget += plan.pop(victim.request_id)
                i -= 1
            if victim is r: return plan, victims
        free -= need
        tables[r.request_id] += [("new", len(owners) + k) for k in range(need)]
        owners |= {b: 1 for b in tables[r.request_id][-need:] if need}
        plan[r.request_id] = n
        budget -= n
        i += 1
    return plan, victims


def check_schedule(s, before, expected, plan):
    "What must hold between the state before a schedule() and its plan."
    config, bs = s.scheduler_config, s.cache_config.block_size
    cached = plan.scheduled_cached_reqs
    planned = plan.num_scheduled_tokens
    assert plan.total_num_scheduled_tokens == sum(planned.values()) <= config.max_num_batched_tokens
    assert all(n > 0 for n in planned.values())
    running = [r.request_id for r in s.running]
    assert set(planned) <= set(running) and not set(planned) & plan.preempted_req_ids
    assert list(planned) == [r for r in running if r in planned], "the plan follows the order of running"
    assert sorted(planned) == sorted([n.req_id for n in plan.scheduled_new_reqs] + cached.req_ids)
    admitted = {n.req_id for n in plan.scheduled_new_reqs} | cached.resumed_req_ids
    # Each running request is planned, out of budget, has nothing to run, or is passed over as the book does it.
    first_pass = {r: n for r, n in planned.items() if r not in admitted}
    assert (first_pass, plan.preempted_req_ids) == (expected[0], set(expected[1])), (first_pass, plan.preempted_req_ids, expected)
    assert list(first_pass) == list(expected[0])
    if s.policy.value == "fcfs" or not plan.preempted_req_ids:
        for r in s.running:
            if r.request_id in planned or plan.total_num_scheduled_tokens == config.max_num_batched_tokens: continue
            tokens_to_go = min(r.num_tokens + r.num_output_placeholders, config.max_model_len - 1) - r.num_computed_tokens
            in_flight = r.num_output_placeholders
            last_in_flight = in_flight and r.num_tokens + in_flight >= r.num_prompt_tokens + r.max_tokens
            assert tokens_to_go <= 0 or last_in_flight, f"{r} was passed over"
    assert not (plan.preempted_req_ids and admitted), "a step that preempts admits nobody"
    if not config.enable_chunked_prefill and not config.long_prefill_token_threshold:
        for r in admitted: assert s.requests[r].num_computed_tokens == s.requests[r].num_tokens
    for req_id, n in planned.items():
        r = s.requests[req_id]
        held = len(s.kv_cache_manager.get_block_ids(req_id))
        assert r.num_computed_tokens == before.get(req_id, r.num_computed_tokens - n) + n
        # Rejected drafts may leave a block that the next tokens fill.
        assert held == cdiv(r.num_computed_tokens, bs) or (s.had_drafts and held > cdiv(r.num_computed_tokens, bs)), (r, held)
    assert set(cached.all_token_ids) == {r for r in cached.req_ids if r not in s.previous_plan}
    s.previous_plan = set(planned)


def random_request(rng, s, name, shared):
    mml = s.max_model_len
    n = rng.randint(1, max(1, mml - 2) if rng.random() < .15 else mml // 4)
    k = rng.randint(0, n)
    # long outputs: the pool runs out while decoding
    max_tokens = rng.randint(1, 8) if rng.random() < .3 else rng.randint(8, mml)
    return make_request(s, name, shared[:k] + [rng.randint(10, 30) for _ in range(n - k)], max_tokens, priority=rng.randint(0, 3),
                        arrival=float(rng.randint(0, 9)), salt=rng.choice([None, None, None, "x"]),
                        min_tokens=rng.choice([0, 0, min(2, max_tokens)]),
                        ignore_eos=rng.random() < .7, stop_token_ids=rng.choice([[], [], list(range(5, 12))]))


def random_scheduler(rng, policy, chunked, caching, is_async):
    bs, mml = rng.choice([1, 2, 4, 4, 8, 16]), rng.choice([20, 40, 64])
    need = cdiv(mml, bs)
    return make_scheduler(blocks=need + 1 + rng.choice([0, 0, 1, 2, need // 3]), bs=bs, mml=mml, chunked=chunked,
                          caching=caching, policy=policy,
                          is_async=is_async, seqs=rng.choice([2, 3, 4, 8]), threshold=rng.choice([0, 0, 3, 7]),
                          reserve=rng.random() < .8,
                          budget=rng.choice([4, 6, 8, 16, 33, 128]) if chunked else mml + rng.choice([0, 9, 60]))


def run_traffic(seed, policy, chunked, caching, is_async, max_drafts=0):
    rng = random.Random(repr((seed, policy, chunked, caching, is_async, max_drafts)))
    s = random_scheduler(rng, policy, chunked, caching, is_async)
    s.previous_plan, s.had_drafts = set(), bool(max_drafts)
    engine = Engine(s, max_drafts, rng)
    shared = [rng.randint(10, 30) for _ in range(s.max_model_len)]
    to_come = [random_request(rng, s, f"r{i}", shared) for i in range(rng.randint(4, 12))]
    everyone, aborted, operations = {r.request_id: r for r in to_come}, set(), 0
    while to_come or engine.in_flight or s.has_requests():
        operations += 1
        assert operations < 4000, "hung"
        x = rng.random()
        if to_come and x < .2: s.add_request(to_come.pop())
        elif s.requests and x < .215:
            ids = rng.sample(sorted(s.requests), min(len(s.requests), rng.randint(1, 2)))
            abort(s, ids + ["nobody"] + ids[:1])
            aborted |= set(ids)
        elif len(engine.in_flight) < engine.depth and (not engine.in_flight or x < .9):
            before, expected = {r.request_id: r.num_computed_tokens for r in s.running}, expected_running_pass(s)
            check_schedule(s, before, expected, engine.schedule())
        elif engine.in_flight: engine.update()
        check_books(s)
    assert s.kv_cache_manager.block_pool.get_num_free_blocks() == s.cache_config.num_gpu_blocks - 1
    assert s.reset_prefix_cache() and not s.requests and not s.kv_cache_manager.num_cached_block
    for req_id, request in everyone.items():
        tokens, reason = solo(request, s.max_model_len)
        got = engine.outputs.get(req_id, [])
        if req_id in aborted: assert got == tokens[:len(got)] and engine.reasons.get(req_id) in (None, reason), req_id
        else: assert (got, engine.reasons[req_id]) == (tokens, reason), req_id
    return sum(r.num_preemptions for r in everyone.values())


@pytest.mark.parametrize("policy,chunked,caching,is_async", CASES)
def test_invariants_under_random_traffic(policy, chunked, caching, is_async):
    "Semantics 1-42 as invariants; S1, S2 and S6 of the bug reports under random traffic."
    preemptions = 0
    for seed in range(SEEDS):
        print("options", (policy, chunked, caching, is_async), "seed", seed)
        preemptions += run_traffic(seed, policy, chunked, caching, is_async)
    assert preemptions > SEEDS // 3, f"the traffic preempted only {preemptions} times: too tame to show anything"


@pytest.mark.parametrize("policy,chunked,caching", [c[:3] for c in CASES if not c[3]])
def test_invariants_with_speculative_drafts(policy, chunked, caching):
    "Right, wrong and mixed drafts, 0 to 3 of them: the tokens are those without drafts (semantics 23)."
    for seed in range(SEEDS // 2):
        print("options", (policy, chunked, caching), "seed", seed)
        run_traffic(seed, policy, chunked, caching, False, max_drafts=3)


def test_the_fake_runner_notices_a_wrong_hit(monkeypatch):
    "The check can fail: a cache that finds a block under any name gives other outputs than SOLO."
    keep = BlockHashToBlockMap.get_one_block
    any_block = lambda self, block_hash: keep(self, block_hash) or next(iter(self._first.values()), None)
    monkeypatch.setattr(BlockHashToBlockMap, "get_one_block", any_block)
    with pytest.raises(AssertionError):
        for seed in range(SEEDS): run_traffic(seed, "fcfs", True, True, False)


def test_a_plan_that_is_undone_leaves_no_content_behind(monkeypatch):
    """The check can fail: without `uncache_blocks` a priority victim's uncomputed block is found by others (a seed in some
    hundreds shows it)."""
    seeds = (554, *range(3000))      # the first shows it on CPython 3.11; another random module may need another
    run_traffic(seeds[0], "priority", True, True, True)
    monkeypatch.setattr(KVCacheManager, "uncache_blocks", lambda self, request, num_kept_tokens: None)
    with pytest.raises(AssertionError, match="positions read back"):
        for seed in seeds: run_traffic(seed, "priority", True, True, True)
