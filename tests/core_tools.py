"""What the scheduler tests share: a scheduler in one line, a fake runner with a KV cache, and the invariants."""
import hashlib
from collections import Counter, deque

from litevllm.config import CacheConfig, SchedulerConfig
from litevllm.core.async_scheduler import AsyncScheduler
from litevllm.core.output import DraftTokenIds, ModelRunnerOutput
from litevllm.core.request import Request, RequestStatus
from litevllm.core.scheduler import Scheduler
from litevllm.sampling_params import SamplingParams

EOS = 2


def make_scheduler(blocks=100, bs=4, budget=64, seqs=16, mml=256, chunked=True, caching=True, policy="fcfs", threshold=0,
                   is_async=False, reserve=True, log_stats=False):
    config = SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=min(seqs, budget), max_model_len=mml,
                             enable_chunked_prefill=chunked, long_prefill_token_threshold=threshold, policy=policy,
                             async_scheduling=is_async, scheduler_reserve_full_isl=reserve)
    cache_config = CacheConfig(block_size=bs, num_gpu_blocks=blocks, enable_prefix_caching=caching)
    return (AsyncScheduler if is_async else Scheduler)(config, cache_config, log_stats)


def make_request(scheduler, req_id, prompt, max_tokens=16, priority=0, arrival=None, salt=None, eos=EOS, **params):
    "A request whose prompt is a list of ids, or n distinct ids that no other request's prompt shares."
    if isinstance(prompt, int): prompt = [1000 + hash_int(req_id) % 10**6 * 1000 + i for i in range(prompt)]
    params = SamplingParams(temperature=0, max_tokens=max_tokens, **params)
    params.update_from_generation_config({}, eos)
    if arrival is None: arrival = float(len(scheduler.requests))
    return Request(req_id, prompt, params, priority=priority, arrival_time=arrival, cache_salt=salt,
                   block_hasher=scheduler.block_hasher)


def add(scheduler, req_id, prompt, max_tokens=16, **options):
    request = make_request(scheduler, req_id, prompt, max_tokens, **options)
    scheduler.add_request(request)
    return request


def abort(scheduler, ids): scheduler.finish_requests(ids, RequestStatus.FINISHED_ABORTED)


def update(scheduler, plan, token=7):
    "Answer a plan with `token` (or token[id]) wherever the chunk reaches the last known token; returns the outputs."
    ids, sampled = list(plan.num_scheduled_tokens), []
    for i in ids:
        request = scheduler.requests.get(i)
        done = request is not None and not request.is_prefill_chunk
        t = token.get(i, 7) if isinstance(token, dict) else token
        sampled.append(([t] if isinstance(t, int) else list(t)) if done else [])
    return scheduler.update_from_output(plan, ModelRunnerOutput(ids, {r: k for k, r in enumerate(ids)}, sampled)).outputs


def step(scheduler, token=7):
    "One synchronous step; returns its plan."
    plan = scheduler.schedule()
    update(scheduler, plan, token)
    return plan


def free_ids(scheduler): return [b.block_id for b in scheduler.kv_cache_manager.block_pool.free_block_queue.get_all_free_blocks()]


def hash_int(*parts): return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:6], "little")


def next_token(tokens, vocab=97):
    "The fake model: a token in 2..vocab+1 (2 is EOS) that depends on every token before it."
    return 2 + hash_int(list(tokens)) % vocab


def solo(request, max_model_len):
    "(output ids, finish reason) of a request that meets nobody: what any schedule must give."
    params, tokens, n = request.sampling_params, list(request.prompt_token_ids), len(request.prompt_token_ids)
    while True:
        tokens.append(next_token(tokens))
        num_output = len(tokens) - n
        if num_output >= params.min_tokens:
            if tokens[-1] == params.eos_token_id or tokens[-1] in params.stop_token_ids: return tokens[n:], "stop"
            if num_output >= request.max_tokens: return tokens[n:], "length"
        if len(tokens) >= max_model_len: return tokens[n:], "length"


class FakeRunner:
    """A worker without tensors: rows, a slot-addressed cache of (position, token), and `next_token` over what it READS BACK from
    the cache.

    A hit on a block whose content was replaced or never computed, a lost token or a stale table changes the output."""
    def __init__(self, block_size, max_drafts=0, rng=None):
        self.block_size, self.max_drafts, self.rng = block_size, max_drafts, rng
        self.cache, self.tokens, self.tables = {}, {}, {}
        self.last_drafts = DraftTokenIds([], [])

    def slot(self, req_id, position):
        return self.tables[req_id][position // self.block_size] * self.block_size + position % self.block_size

    def apply_plan(self, plan):
        for req_id in plan.finished_req_ids: self.tokens.pop(req_id, None), self.tables.pop(req_id, None)
        for new in plan.scheduled_new_reqs:
            self.tokens[new.req_id], self.tables[new.req_id] = list(new.prompt_token_ids), list(new.block_ids)
        cached = plan.scheduled_cached_reqs
        for req_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if req_id in cached.all_token_ids: self.tokens[req_id] = list(cached.all_token_ids[req_id])
            if req_id in cached.resumed_req_ids: self.tables[req_id] = list(block_ids)
            elif block_ids: self.tables[req_id].extend(block_ids)
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens))
        return computed | {n.req_id: n.num_computed_tokens for n in plan.scheduled_new_reqs}

    def execute(self, plan):
        "Write the step's tokens, then read each request's whole history and sample."
        computed, ids, sampled = self.apply_plan(plan), list(plan.num_scheduled_tokens), []
        drafts = plan.scheduled_spec_decode_tokens
        for req_id, n in plan.num_scheduled_tokens.items():
            line = self.tokens[req_id] + drafts.get(req_id, [])
            for p in range(computed[req_id], computed[req_id] + n): self.cache[self.slot(req_id, p)] = (p, line[p])
        for req_id, n in plan.num_scheduled_tokens.items():
            sampled.append(self.sample(req_id, computed[req_id] + n, drafts.get(req_id, [])))
        self.last_drafts = self.propose(ids, sampled)
        return ModelRunnerOutput(ids, {r: i for i, r in enumerate(ids)}, sampled)

    def sample(self, req_id, end, drafts):
        "Tokens after the positions before `end`: none for a partial chunk, else the accepted drafts and one more."
        known = len(self.tokens[req_id])
        if end < known: return []
        history = [self.cache.get(self.slot(req_id, p)) for p in range(end)]
        assert [h and h[0] for h in history] == list(range(end)), f"{req_id}: positions read back {history}"
        out = [next_token(t for _, t in history[:known])]
        for i, draft in enumerate(drafts):
            if draft != out[-1]: break
            out.append(next_token(t for _, t in history[:known + i + 1]))
        self.tokens[req_id].extend(out)
        return out

    def propose(self, ids, sampled):
        "0 to max_drafts scripted guesses for each request that sampled: right, wrong, or right and then wrong."
        guesses = []
        for req_id, out in zip(ids, sampled):
            line, guess = list(self.tokens[req_id]), []
            for _ in range(self.rng.randint(0, self.max_drafts) if out and self.max_drafts else 0):
                token = next_token(line)
                if self.rng.random() < .4: token = 1      # never sampled, so always rejected
                guess.append(token)
                line.append(token)
            guesses.append(guess)
        return DraftTokenIds(ids, guesses)


class Engine:
    "Scheduler and fake runner in lockstep; asynchronous: with two plans in flight, executed in order."
    def __init__(self, scheduler, max_drafts=0, rng=None):
        self.scheduler, self.depth = scheduler, 2 if isinstance(scheduler, AsyncScheduler) else 1
        self.runner = FakeRunner(scheduler.cache_config.block_size, max_drafts, rng)
        self.in_flight, self.outputs, self.reasons, self.errors = deque(), {}, {}, {}

    def schedule(self):
        plan = self.scheduler.schedule()
        self.in_flight.append((plan, self.runner.execute(plan)))
        return plan

    def update(self):
        "Take in the oldest plan in flight; returns its outputs."
        plan, result = self.in_flight.popleft()
        outputs = self.scheduler.update_from_output(plan, result).outputs
        if self.runner.max_drafts: self.scheduler.update_draft_token_ids(self.runner.last_drafts)
        for o in outputs:
            self.outputs.setdefault(o.request_id, []).extend(o.new_token_ids)
            assert o.request_id not in self.reasons, f"{o.request_id} ended twice"
            if o.finish_reason is not None: self.reasons[o.request_id], self.errors[o.request_id] = str(o.finish_reason), o.error
        return outputs

    def drain(self, limit=2000):
        "Run until nothing is left; an engine that needs more than `limit` steps has hung."
        for _ in range(limit):
            if not self.in_flight and not self.scheduler.has_requests(): return self
            while len(self.in_flight) < self.depth and self.scheduler.has_requests(): self.schedule()
            self.update()
        raise AssertionError(f"not drained after {limit} steps: {self.scheduler.requests}")


def check_books(scheduler):
    "After every operation: each block has as many owners as its count says, and is free exactly when it has none."
    kv = scheduler.kv_cache_manager
    pool = kv.block_pool
    owners = Counter(b.block_id for blocks in kv.req_to_blocks.values() for b in blocks)
    free = free_ids(scheduler)
    assert len(set(free)) == len(free) == pool.get_num_free_blocks()
    for blocks in kv.req_to_blocks.values(): assert len(set(map(id, blocks))) == len(blocks)
    assert all(b.ref_cnt == owners[b.block_id] for b in pool.blocks)
    assert set(free) | set(owners) == set(range(1, pool.num_gpu_blocks)) and not set(free) & set(owners)
    holders = {r.request_id for r in scheduler.running}
    assert set(kv.req_to_blocks) == holders, (set(kv.req_to_blocks), holders)
    assert {r.request_id for r in scheduler.running} | {r.request_id for r in scheduler.waiting} == set(scheduler.requests)
    assert len(scheduler.running) + len(scheduler.waiting) == len(scheduler.requests)
    assert len(scheduler.running) <= scheduler.scheduler_config.max_num_seqs
    for block in pool.blocks: check_cached_block(pool, block)


def check_cached_block(pool, block):
    if block.block_hash is None: return
    assert block is not pool.null_block
    found = pool.get_cached_block(block.block_hash)
    assert found is not None and found.block_hash == block.block_hash
