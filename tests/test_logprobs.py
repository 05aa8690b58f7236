"""Logprobs of outputs and prompts against transformers (cases P4, M8), and requests that can get no token (M5, N7)."""
import random
from collections import deque
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from litevllm.core.async_scheduler import AsyncScheduler
from litevllm.core.output import CachedRequestData, ModelRunnerOutput, NewRequestData, SchedulerOutput
from litevllm.core.request import Request, RequestRefused
from litevllm.core.scheduler import Scheduler
from litevllm.engine.core import check_request
from litevllm.messages import EngineCoreRequest
from litevllm.sampling_params import SamplingParams
from litevllm.tiny import write_tiny_model
from litevllm.worker.logprobs import token_logprobs
from core_tools import add, check_books, make_scheduler, step
from worker_harness import make_worker

V, BS, TOLERANCE = 512, 4, 1e-4
PROMPT = [(i * 37 + 11) % V for i in range(2 * BS + 1)]


@pytest.fixture(scope="module")
def path(tmp_path_factory): return write_tiny_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def worker(path): return make_worker(path, num_gpu_blocks_override=256)


@pytest.fixture(scope="module")
def hf(path):
    "hf(token_ids): transformers' log_softmax, [len, vocab]."
    model, known = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), {}
    @torch.inference_mode()
    def logprobs(token_ids):
        if (key := tuple(token_ids)) not in known: known[key] = model(torch.tensor([token_ids])).logits[0].float().log_softmax(-1)
        return known[key]
    return logprobs


class Served:
    "What came of one request."
    def __init__(self): self.tokens, self.logprobs, self.prompt_logprobs, self.reason, self.error, self.outputs = [], [], [], None, None, 0

    def take(self, out):
        assert self.reason is None, "an output after the last one"
        self.tokens += out.new_token_ids
        if out.new_logprobs is not None:
            assert len(out.new_logprobs) == len(out.new_token_ids)
            self.logprobs += out.new_logprobs
        if out.new_prompt_logprobs is not None:
            assert self.outputs == 0, "prompt logprobs belong to the first output"
            self.prompt_logprobs.append(out.new_prompt_logprobs)
        self.outputs += 1
        if out.finish_reason is not None: self.reason, self.error = str(out.finish_reason), out.error


def serve(worker, prompts, params, blocks=200, is_async=False, rounds=1, between=lambda scheduler, number: None, **scheduler_args):
    """Real scheduler, real worker; asynchronous: plans run in order, two ahead of the results. A list of `Served`, and the number of preemptions.

    rounds: the same prompts again, the prefix cache warm. Afterwards pool, rows and collector must be empty."""
    config = worker.vllm_config
    scheduler = (AsyncScheduler if is_async else Scheduler)(replace(config.scheduler_config, async_scheduling=is_async, **scheduler_args),
                                                            replace(config.cache_config, num_gpu_blocks=blocks))
    served, in_flight, delivered, preemptions, steps = {}, deque(), set(), 0, 0
    for number in range(rounds):
        for i, (prompt, p) in enumerate(zip(prompts, params)):
            served[f"{i}-{number}"] = Served()
            scheduler.add_request(Request(f"{i}-{number}", prompt, p.clone(), arrival_time=float(i), block_hasher=scheduler.block_hasher))
        while scheduler.has_requests() or in_flight:
            if scheduler.has_requests():
                between(scheduler, steps)
                plan = scheduler.schedule()
                preemptions += len(plan.preempted_req_ids)
                result = worker.execute_model(plan)
                in_flight.append((plan, result))
                assert not delivered & set(result.prompt_logprobs_dict), "once a request"
                delivered |= set(result.prompt_logprobs_dict)
                assert all(len(entries) == len(result.sampled_token_ids[result.req_id_to_index[r]]) for r, entries in result.logprobs.items())
            if len(in_flight) == 1 + is_async or not scheduler.has_requests():
                for out in scheduler.update_from_output(*in_flight.popleft()).outputs: served[out.request_id].take(msgpack(out))
                if (drafts := worker.take_draft_token_ids()) is not None: scheduler.update_draft_token_ids(drafts)
            steps += 1
            assert steps < 2000
    check_books(scheduler)
    assert scheduler.make_stats().num_free_blocks == blocks - 1
    assert not worker.model_runner.rows.row_of and not worker.model_runner.rows.requests and not worker.model_runner.prompt_logprobs.found
    return list(served.values()), preemptions


def msgpack(out): return msgspec.msgpack.decode(msgspec.msgpack.encode(out), type=type(out))


def check_entry(entry, token, row, k=None, listed=None):
    "One (ids, logprobs, ranks) against a row of transformers' logprobs; where two tokens lie within the tolerance, either order is right."
    ids, values, ranks = entry
    assert ids[0] == token and len(set(ids)) == len(ids) == len(values) == len(ranks)
    assert torch.allclose(torch.tensor(values), row[ids], atol=TOLERANCE, rtol=0), (values, row[ids])
    def bounds(i): return int((row >= row[i] + 2 * TOLERANCE).sum()) + 1, int((row >= row[i] - 2 * TOLERANCE).sum())
    assert bounds(token)[0] <= ranks[0] <= bounds(token)[1]
    if listed is not None:
        assert ids[1:] == [i for i in dict.fromkeys(listed) if i != token]
        assert all(bounds(i)[0] <= rank <= bounds(i)[1] for i, rank in zip(ids, ranks))
        return
    k = V if k == -1 else min(k, V)
    assert len(ids) == k + (ranks[0] > k)
    assert values[1:] == sorted(values[1:], reverse=True)
    missing = ranks[0] if ranks[0] <= k else None      # the token stands in front, not at its place
    assert ranks[1:] == [r for r in range(1, k + 1) if r != missing]
    assert all(bounds(i)[0] <= rank <= bounds(i)[1] for i, rank in zip(ids, ranks))


def check_sampled(served, prompt, params, hf):
    rows = hf(prompt + served.tokens)[len(prompt) - 1:]
    assert len(served.logprobs) == (len(served.tokens) if params.num_logprobs is not None else 0)
    for entry, token, row in zip(served.logprobs, served.tokens, rows): check_entry(entry, token, row, params.logprobs, params.logprob_token_ids)


def check_prompt(served, prompt, k, hf):
    assert len(served.prompt_logprobs) == 1, "once"
    (entries,), rows = served.prompt_logprobs, hf(prompt)
    assert len(entries) == len(prompt) - 1
    for entry, token, row in zip(entries, prompt[1:], rows): check_entry(entry, token, row, k)


def greedy(n=4, **kw): return SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, **kw)


# ---- one entry

@pytest.mark.parametrize("seed", range(3))
def test_entries_are_those_of_a_slow_reference(seed):
    print(f"seed {seed}")
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    n, vocab = 9, 50
    logprobs = torch.randn(n, vocab, generator=generator).log_softmax(-1)
    tokens = [rng.randrange(vocab) for _ in range(n)]
    counts = [rng.choice([-1, 0, 1, 3, 49, 50, 51, 10**12]) for _ in range(n)]
    listed = {row: [rng.randrange(vocab) for _ in range(rng.randint(1, 128))] for row in sorted(rng.sample(range(n), 3))}
    flat = [(row, i) for row, ids in listed.items() for i in ids]
    entries = token_logprobs(logprobs, torch.tensor(tokens), np.array(counts), tuple(np.array(flat).T))
    for row, (values, token, count) in enumerate(zip(logprobs.tolist(), tokens, counts)):
        true_rank = [sum(v >= value for v in values) for value in values]
        order = sorted(range(vocab), key=lambda i: -values[i])[:vocab if count < 0 else count]
        others = [i for i in dict.fromkeys(listed.get(row, order)) if i != token]
        ids = [token, *others]
        assert entries[row] == (ids, [values[i] for i in ids], [true_rank[i] for i in ids])


def test_equal_logprobs_share_the_rank_of_the_last():
    logprobs = torch.tensor([[2., 1., 2., 0.]]).log_softmax(-1)
    entry, = token_logprobs(logprobs, torch.tensor([2]), np.array([1]))
    assert entry[0][0] == 2 and entry[2][0] == 2 and entry[2][1:] in ([], [1])


# ---- sampled tokens

def mixed_params(seed):
    "What can be asked for beside what can change the choice: raw logprobs may not see any of the latter."
    rng = random.Random(seed)
    asked = [dict(), dict(logprobs=0), dict(logprobs=1), dict(logprobs=5), dict(logprobs=-1), dict(logprobs=V + 7),
             dict(logprob_token_ids=[3, 500, 3, 77]), dict(logprob_token_ids=list(range(100, 228)))]
    ways = [dict(temperature=0), dict(temperature=0.7, seed=1), dict(temperature=1.5, seed=2, top_k=3), dict(temperature=1., seed=3, top_p=.5, min_p=.1),
            dict(temperature=0, repetition_penalty=1.7, frequency_penalty=1.), dict(temperature=0, logit_bias={9: 50.}),
            dict(temperature=.9, seed=4, allowed_token_ids=[5, 6, 7]), dict(temperature=0, min_tokens=5, stop_token_ids=[4])]
    rng.shuffle(ways)
    return [SamplingParams(max_tokens=rng.randint(5, 7), ignore_eos=True, **a, **w) for a, w in zip(asked, ways)]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_mixed_batch(worker, hf, seed, is_async):
    print(f"seed {seed}")
    params = mixed_params(seed)
    prompts = [[(i * 7 + 13 * j + seed) % V for j in range(1 + i)] for i in range(len(params))]
    plain, _ = serve(worker, prompts, [replace_asked(p) for p in params], is_async=is_async)
    served, _ = serve(worker, prompts, params, is_async=is_async)
    for s, without, prompt, p in zip(served, plain, prompts, params):
        assert s.tokens == without.tokens and s.reason == "length" and not without.logprobs
        check_sampled(s, prompt, p, hf)


def replace_asked(params):
    params = params.clone()
    params.logprobs = params.logprob_token_ids = None
    return params


def test_all_sum_to_one_whatever_the_temperature(worker):
    params = [SamplingParams(max_tokens=3, ignore_eos=True, logprobs=-1, seed=5, temperature=t, top_k=k) for t, k in ((0, 0), (0.3, 2), (2.0, 0))]
    for s in serve(worker, [PROMPT] * 3, params)[0]:
        for ids, values, ranks in s.logprobs:
            assert sorted(ids) == list(range(V)) and sorted(ranks) == list(range(1, V + 1))
            assert torch.tensor(values).exp().sum().item() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("spoil", [0, .4, 1])
def test_drafts_change_no_logprob(path, hf, spoil):
    worker, rng = make_worker(path, num_gpu_blocks_override=64), random.Random(7)
    prompts = [PROMPT, PROMPT[:2], [100]]
    params = [greedy(11, logprobs=2, prompt_logprobs=1), greedy(9, logprob_token_ids=[1, 2]), greedy(8)]
    plain, _ = serve(worker, prompts, params, 40)
    full = [p + s.tokens for p, s in zip(prompts, plain)]
    class Proposer:
        def propose(self, req_ids, known):
            known = [next(f for p, f in zip(prompts, full) if k[:len(p)] == p)[len(k):len(k) + rng.randint(0, 3)] for k in known]
            return [[(t + (rng.random() < spoil)) % V for t in draft] for draft in known]
    worker.model_runner.proposer = Proposer()
    for blocks in (40, 7):    # the small pool preempts
        served, preemptions = serve(worker, prompts, params, blocks, num_speculative_tokens=3)
        assert [s.tokens for s in served] == [s.tokens for s in plain] and (preemptions > 0) == (blocks == 7)
        assert spoil == 1 or sum(s.outputs for s in served) < sum(s.outputs for s in plain)
        for s, prompt, p in zip(served, prompts, params): check_sampled(s, prompt, p, hf)
        check_prompt(served[0], prompts[0], 1, hf)


# ---- the prompt's tokens

LENGTHS = [1, 2, BS - 1, BS, BS + 1, 2 * BS + 1]

@pytest.mark.parametrize("how", [dict(), dict(is_async=True), dict(rounds=2), dict(rounds=2, is_async=True), dict(max_num_batched_tokens=3, max_num_seqs=2),
                                 dict(long_prefill_token_threshold=2, is_async=True)], ids=str)
def test_prompt_logprobs(worker, hf, how):
    prompts = [PROMPT[:n] for n in LENGTHS for _ in range(4)] + [PROMPT]
    asked = [0, 1, 5, -1] * len(LENGTHS) + [None]
    params = [greedy(2, prompt_logprobs=k, logprobs=k and 1, skip_reading_prefix_cache=(i % 3 == 0 and None)) for i, k in enumerate(asked)]
    served, _ = serve(worker, prompts, params, **how)
    for s, prompt, k in zip(served, prompts * 2, asked * 2):
        assert len(s.tokens) == 2
        if k is None: assert not s.prompt_logprobs
        else: check_prompt(s, prompt, k, hf)


def test_many_prompt_positions_are_projected_in_blocks(path, hf, monkeypatch):
    "A prompt longer than a block, with two others beside it: the blocks cut through requests."
    worker, sizes = make_worker(path, max_num_batched_tokens=600), []
    compute = worker.model_runner.model.compute_logits
    monkeypatch.setattr(worker.model_runner.model, "compute_logits", lambda hidden: sizes.append(len(hidden)) or compute(hidden))
    prompts = [PROMPT, [(i * 91 + 3) % V for i in range(250)], [(i * 13 + 3) % V for i in range(200)]]
    served, _ = serve(worker, prompts, [greedy(1, prompt_logprobs=k) for k in (2, 0, 1)], 128)
    assert sizes == [256, len(PROMPT) - 1 + 249 + 199 - 256, 3]
    for s, prompt, k in zip(served, prompts, (2, 0, 1)): check_prompt(s, prompt, k, hf)


def test_a_neighbour_warms_the_cache(worker, hf):
    "A has filled the cache without asking; B, which asks, may not read it, and C, which does not ask, may."
    config = worker.vllm_config
    scheduler = Scheduler(replace(config.scheduler_config, async_scheduling=False), replace(config.cache_config, num_gpu_blocks=50))
    for name, k, hit in (("A", None, 0), ("B", 1, 0), ("C", None, 8)):
        served = Served()
        scheduler.add_request(Request(name, PROMPT, greedy(3, prompt_logprobs=k), block_hasher=scheduler.block_hasher))
        while scheduler.has_requests():
            plan = scheduler.schedule()
            for out in scheduler.update_from_output(plan, worker.execute_model(plan)).outputs:
                if out.num_cached_tokens is not None: assert out.num_cached_tokens == hit
                served.take(out)
        if k is not None: check_prompt(served, PROMPT, k, hf)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("at", range(13))
def test_preempted_at_every_point(worker, hf, at, chunk, is_async):
    "Preempted before step `at`, if it runs then: between chunks, before and after its first token."
    happened = []
    def preempt(scheduler, number):
        chosen = scheduler.requests.get("0-0")
        if number != at or chosen not in scheduler.running: return
        original = scheduler._schedule_running
        def with_victim(step):     # in the scheduler's own way, where it would do it for want of a block
            scheduler._schedule_running = original
            scheduler.running.remove(chosen)
            scheduler._preempt_request(step, chosen)
            original(step)
        scheduler._schedule_running = with_victim
        happened.append(chosen.num_computed_tokens)
    prompts, params = [PROMPT, PROMPT[:3]], [greedy(3, prompt_logprobs=1, logprobs=1), greedy(3)]
    served, preemptions = serve(worker, prompts, params, is_async=is_async, between=preempt, long_prefill_token_threshold=chunk)
    assert preemptions == len(happened) >= (1 <= at <= -(-len(PROMPT) // chunk))
    check_prompt(served[0], PROMPT, 1, hf)
    check_sampled(served[0], PROMPT, params[0], hf)
    assert [len(s.tokens) for s in served] == [3, 3]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_tight_pool(worker, hf, is_async):
    prompts = [PROMPT[:n] for n in (9, 5, 8, 1, 4)]
    params = [greedy(12, prompt_logprobs=k, logprobs=0) for k in (1, 0, -1, 5, None)]
    served, preemptions = serve(worker, prompts, params, 11, is_async=is_async, long_prefill_token_threshold=3)
    assert preemptions > 2
    for s, prompt, p in zip(served, prompts, params):
        check_sampled(s, prompt, p, hf)
        if p.prompt_logprobs is not None: check_prompt(s, prompt, p.prompt_logprobs, hf)


def test_an_abort_half_way_leaves_nothing(worker):
    def abort(scheduler, number):
        if number == 2: scheduler.finish_requests("0-0", 6)
    served, _ = serve(worker, [PROMPT], [greedy(prompt_logprobs=1)], between=abort, long_prefill_token_threshold=2)
    assert served[0].outputs == 0


# ---- requests that can get no token

def hopeless(after=0, **kw):
    """No token is left after `after` tokens: 5 and 6 are allowed, 6 wins, and the bad words forbid 5 always and 6 after so many."""
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, allowed_token_ids=[5, 6], logit_bias={6: 100.}, **kw)
    params._bad_words_token_ids = [[5], [6] * (after + 1)]
    return params


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("after", range(4))
def test_no_token_is_left(worker, after, is_async):
    "The hopeless one ends with the tokens it has; its neighbours do not notice."
    prompts = [PROMPT, PROMPT[:3], [9, 8, 7], [100]]
    others = [greedy(6), hopeless(after), SamplingParams(temperature=.8, seed=3, max_tokens=7, ignore_eos=True, logprobs=1), greedy(5, prompt_logprobs=1)]
    alone = [serve(worker, [prompt], [p])[0][0] for prompt, p in zip(prompts, others)]
    served, _ = serve(worker, prompts, others, is_async=is_async)
    for s, a in zip(served, alone): assert (s.tokens, s.reason, s.error) == (a.tokens, a.reason, a.error)
    assert (served[1].tokens, served[1].reason) == ([6] * after, "error") and served[1].outputs == after + 1
    assert served[1].error.startswith("no token is left") and "all 512 tokens" in served[1].error
    assert all(s.reason == "length" and s.error is None for s in (served[0], served[2], served[3]))


@pytest.mark.parametrize("is_async", [False, True])
def test_every_request_of_a_step_is_hopeless(worker, is_async):
    served, _ = serve(worker, [PROMPT, [1], [2, 3]], [hopeless(logprobs=1, prompt_logprobs=1), hopeless(), hopeless(1, logprobs=-1)], is_async=is_async)
    assert [(s.tokens, s.reason) for s in served] == [([], "error"), ([], "error"), ([6], "error")]
    assert len(served[0].prompt_logprobs[0]) == len(PROMPT) - 1 and len(served[2].logprobs) == 1
    assert serve(worker, [PROMPT], [greedy(3)], is_async=is_async)[0][0].reason == "length"


@pytest.mark.parametrize("is_async", [False, True])
def test_hopeless_while_blocks_are_short(worker, is_async):
    "Preemption and failure in the same few steps."
    prompts = [PROMPT[:n] for n in (9, 5, 8, 1, 4)]
    params = [greedy(12), hopeless(6), greedy(12, prompt_logprobs=0), hopeless(8), hopeless(3)]
    served, preemptions = serve(worker, prompts, params, 9, is_async=is_async)
    assert preemptions > 0 and [s.reason for s in served] == ["length", "error", "length", "error", "error"]
    assert [s.tokens for s in served[1::2]] == [[6] * 6, [6] * 8] and served[4].tokens == [6] * 3


def test_a_partial_prefill_beside_it_has_no_row_that_could_fail(worker):
    served, _ = serve(worker, [PROMPT, [1], PROMPT[1:]], [greedy(2), hopeless(), greedy(2)], long_prefill_token_threshold=2)
    assert [s.reason for s in served] == ["length", "error", "length"] and served[1].outputs == 1


@pytest.mark.parametrize("after", range(1, 5))
def test_a_failed_draft_row_is_no_failure_yet(path, after):
    "With drafts the hopeless position lies in the middle of a step: the tokens before it are kept, as without drafts."
    worker = make_worker(path, num_gpu_blocks_override=64)
    class Sixes:
        def propose(self, req_ids, known): return [[6, 6, 6] for _ in req_ids]
    worker.model_runner.proposer = Sixes()
    served, _ = serve(worker, [PROMPT, [1]], [hopeless(after, logprobs=1), greedy(5)], 60, num_speculative_tokens=3)
    assert (served[0].tokens, served[0].reason) == ([6] * after, "error") and len(served[0].logprobs) == after
    assert served[1].reason == "length"


SICK = 300     # the token whose embedding is not a number


@pytest.fixture(scope="module")
def sick_worker(path):
    worker = make_worker(path, num_gpu_blocks_override=64)
    worker.model_runner.model.model.embed_tokens.weight[SICK] = float("nan")
    return worker


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("params", [dict(temperature=0), dict(temperature=1.), dict(temperature=.7, top_p=.5), dict(temperature=.7, top_k=2),
                                    dict(temperature=2., min_p=.1), dict(temperature=1., logprobs=2, prompt_logprobs=1)], ids=str)
def test_logits_that_are_not_finite(sick_worker, worker, params, is_async):
    "However the token is chosen. The others are well, those after it too, though their blocks hold its NaN."
    prompts = [PROMPT, [1, SICK, 2, 3, 4], [7, 7], PROMPT[:5]]
    way = SamplingParams(max_tokens=4, ignore_eos=True, seed=1, **params)
    healthy = serve(worker, prompts, [way] * 4)[0]
    served, _ = serve(sick_worker, prompts, [way] * 4, 12, is_async=is_async, rounds=2)
    for i, s in enumerate(served):
        if i % 4 == 1: assert (s.tokens, s.reason) == ([], "error") and s.error.startswith("the logits are not finite")
        else: assert s.tokens == healthy[i % 4].tokens and s.reason == "length"


@pytest.mark.parametrize("is_async", [False, True])
def test_the_log_has_one_line_for_each_failure(sick_worker, capsys, is_async):
    "A contradiction of the caller's is a warning, a broken model an error; once, though async steps fail twice; and again when an id comes back."
    for _ in range(2):
        served, _ = serve(sick_worker, [PROMPT, [1, SICK, 2], [3]], [hopeless(), greedy(3), hopeless(2)], is_async=is_async)
        assert [s.reason for s in served] == ["error"] * 3
        lines = [line for line in capsys.readouterr().err.splitlines() if "model_runner" in line]
        assert len(lines) == 3, lines
        assert sum("WARNING" in line and "no token is left" in line for line in lines) == 2
        assert sum("ERROR" in line and "not finite" in line for line in lines) == 1
        assert not sick_worker.model_runner.failed


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_logit_that_is_no_number(worker, monkeypatch, value):
    "NaN or infinity at a single token is seen through every filter; -inf is only a token that can't come."
    compute = worker.model_runner.model.compute_logits
    def spoiled(hidden):
        logits = compute(hidden)
        logits[:, 77] = value
        return logits
    monkeypatch.setattr(worker.model_runner.model, "compute_logits", spoiled)
    ways = [dict(temperature=0), dict(), dict(top_p=.5), dict(top_k=1), dict(top_k=2), dict(min_p=.1), dict(top_k=3, top_p=.9), dict(repetition_penalty=1.5)]
    reason = "length" if value == -float("inf") else "error"
    for group in (ways, ways[1:]):     # with a greedy row among them and without
        served, _ = serve(worker, [PROMPT] * len(group), [SamplingParams(max_tokens=2, ignore_eos=True, seed=3, logprobs=1, **way) for way in group])
        assert [s.reason for s in served] == [reason] * len(group)
        assert reason == "length" or all(s.error.startswith("the logits are not finite") for s in served)


def test_float16_overflow_is_an_error(tmp_path):
    "Case N7: weights 300 times too large leave float16's range; float32 has room."
    path = write_tiny_model(tmp_path / "big")
    for dtype, reason in (("float32", "length"), ("float16", "error")):
        worker = make_worker(path, dtype=dtype, num_gpu_blocks_override=32)
        for name, weight in worker.model_runner.model.named_parameters():
            if "norm" not in name: weight.data.mul_(300)
        served, _ = serve(worker, [PROMPT, [3]], [greedy(3), SamplingParams(max_tokens=3, ignore_eos=True)], 32)
        assert [s.reason for s in served] == [reason] * 2, (dtype, [s.tokens for s in served])


# ---- the scheduler's part

def result(plan, sampled, **extras):
    ids = list(plan.num_scheduled_tokens)
    return ModelRunnerOutput(ids, {r: i for i, r in enumerate(ids)}, [sampled.get(r, []) for r in ids], **extras)


ENTRY = ([1], [-.5], [1])

def test_logprobs_are_cut_with_the_tokens():
    s = make_scheduler()
    add(s, "A", 3, max_tokens=2, logprobs=0)
    step(s, 7)
    plan = s.schedule()
    out, = s.update_from_output(plan, result(plan, {"A": [7, 8, 9]}, logprobs={"A": [ENTRY] * 3})).outputs
    assert (out.new_token_ids, out.new_logprobs, str(out.finish_reason)) == ([7], [ENTRY], "length")


@pytest.mark.parametrize("is_async", [False, True])
def test_errors_free_the_blocks_and_spare_the_others(is_async):
    s = make_scheduler(is_async=is_async)
    for name in "ABC": add(s, name, 5)
    plan = s.schedule()
    late = s.schedule() if is_async else None
    outs = {o.request_id: o for o in s.update_from_output(plan, result(plan, {"A": [7], "C": [8]}, errors={"B": "no token is left"})).outputs}
    assert (outs["B"].new_token_ids, outs["B"].error, str(outs["B"].finish_reason), outs["B"].num_cached_tokens) == ([], "no token is left", "error", 0)
    assert outs["A"].error is outs["C"].error is outs["A"].finish_reason is None
    assert set(s.requests) == {"A", "C"}
    check_books(s)
    if is_async: assert [o.request_id for o in s.update_from_output(late, result(late, {r: [9] for r in "ABC"})).outputs] == ["A", "C"]
    assert s.schedule().finished_req_ids == {"B"}


def test_the_schedulers_own_error_keeps_its_words():
    "B is ended by the scheduler while its step is in flight; its output goes out with A's, which has logprobs."
    s = make_scheduler()
    add(s, "A", 3, logprobs=0)
    b = add(s, "B", 3, logprobs=0)
    plan = s.schedule()
    s._fail_request(b, "outgrown")
    outs = s.update_from_output(plan, result(plan, {"A": [7], "B": [7]}, logprobs={"A": [ENTRY], "B": [ENTRY]})).outputs
    assert [(o.request_id, o.error, o.new_token_ids, o.new_logprobs) for o in outs] == [("B", "outgrown", [], []), ("A", None, [7], [ENTRY])]


def test_an_error_of_a_preempted_and_of_an_aborted_request():
    "Asynchronous: while the step that fails is in flight, A is pushed out of running, and B is aborted."
    s = make_scheduler(blocks=5, is_async=True)
    add(s, "B", 4, max_tokens=9)
    add(s, "A", 7, max_tokens=9)
    first = s.schedule()
    s.update_from_output(first, result(first, {"A": [7], "B": [7]}))
    failing, late = s.schedule(), s.schedule()
    assert late.preempted_req_ids == {"A"}
    s.finish_requests("B", 6)
    out, = s.update_from_output(failing, result(failing, {}, errors={"A": "broken", "B": "broken"})).outputs
    assert (out.request_id, str(out.finish_reason), out.error) == ("A", "error", "broken")
    assert s.update_from_output(late, result(late, {"B": [7]})).outputs == [] and not s.has_unfinished_requests()
    check_books(s)


# ---- raw clients

def raw(prompt=(1, 2, 3), **fields):
    "A request as a client without our checks could send it."
    params = SamplingParams(max_tokens=2)
    for name, value in fields.items(): setattr(params, name, value)
    return EngineCoreRequest("raw", list(prompt), params, 0.0)


BAD = [(dict(logit_bias={V: 1.}), "logit_bias has ids from 512"), (dict(logit_bias={-1: 1.}), "from -1"), (dict(logit_bias={1: float("nan")}), "logit_bias.*nan"),
       (dict(logit_bias={1: 1e300}), r"logit_bias.*to 1e\+30"), (dict(logit_bias={"1": 1.}), "int"), (dict(allowed_token_ids=[5, V]), "from 5 to 512"),
       (dict(allowed_token_ids=[]), "empty"),
       (dict(logprob_token_ids=[-3]), "logprob_token_ids has ids from -3"), (dict(_bad_words_token_ids=[[1], [2, V]]), "bad_words has ids from 1 to 512"),
       (dict(_bad_words_token_ids=5), "array"), (dict(stop_token_ids=[V]), "stop_token_ids"), (dict(_all_stop_token_ids={V}, min_tokens=1), "min_tokens"),
       (dict(top_k=2**63), "top_k=9223372036854775808 does not fit"), (dict(top_k=2**80), "top_k"), (dict(top_k=-5), "top_k"), (dict(top_k=2.5), "top_k"),
       (dict(logprobs=2**63), "logprobs"), (dict(prompt_logprobs=2**64), "prompt_logprobs"), (dict(prompt_logprobs=-2), "prompt_logprobs"),
       (dict(min_tokens=2**63 - 2, max_tokens=None), "min_tokens"), (dict(temperature=-1.), "temperature"), (dict(temperature="hot"), "temperature"),
       (dict(temperature=10**400), "temperature"), (dict(temperature=float("nan")), "temperature"), (dict(seed=2**70), "seed"), (dict(top_p=0.), "top_p"),
       (dict(repetition_penalty=0.), "repetition_penalty"), (dict(structured_outputs=object()), "object")]


@pytest.mark.parametrize("fields, words", BAD, ids=[str(f) for f, _ in BAD])
def test_bad_requests_are_refused_in_the_core(worker, fields, words):
    with pytest.raises(RequestRefused, match=words): check_request(raw(**fields), worker.vllm_config.model_config)


@pytest.mark.parametrize("fields, words", BAD, ids=[str(f) for f, _ in BAD])
def test_bad_requests_do_not_pass_the_wire(worker, fields, words):
    "As the input thread does it: decode, then check. What can't be encoded can't be sent."
    try: data = msgspec.msgpack.encode(raw(**fields))
    except (TypeError, OverflowError): return
    with pytest.raises((msgspec.ValidationError, RequestRefused), match=words):
        check_request(msgspec.msgpack.decode(data, type=EngineCoreRequest), worker.vllm_config.model_config)


@pytest.mark.parametrize("prompt", [[V], [-1], [True], ["a"], [1.0], list(range(256))])
def test_bad_prompts_are_refused_in_the_core(worker, prompt):
    with pytest.raises(RequestRefused): check_request(raw(prompt), worker.vllm_config.model_config)


NASTY = [0, 1, -1, 5, V - 1, V, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 1e-30, .5, 1., 2., 1e30, 1e38, float("inf"), None, True, [], [0], [V - 1], [V],
         [3] * 300,
         {5: -1e38, 6: 1e38}, {0: 1.}, {V: 1.}, [[7]], [[]], [[1, 2, 3], [V - 1]], [["a"]], "a", {3, 4}]


def test_what_is_accepted_can_be_run(worker):
    "4000 requests of random fields: whatever `check_request` lets through must not raise in a step, alone or beside others."
    rng, accepted = random.Random(11), []
    names = ["n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "seed", "stop_token_ids",
             "min_tokens", "logprobs", "prompt_logprobs", "logprob_token_ids", "logit_bias", "allowed_token_ids", "_bad_words_token_ids", "_all_stop_token_ids"]
    print("seed 11")
    for _ in range(4000):
        fields = {name: rng.choice(NASTY) for name in rng.sample(names, rng.randint(1, 3))}
        request = raw([rng.randrange(V) for _ in range(rng.randint(1, 6))], max_tokens=None, **fields)
        try: check_request(request, worker.vllm_config.model_config)
        except RequestRefused: continue
        accepted.append(request)
    assert len(accepted) > 300
    for start in range(0, len(accepted), 8):
        group = accepted[start:start + 8]
        new = [NewRequestData(str(i), r.prompt_token_ids, r.sampling_params, [2 * i + 1, 2 * i + 2], 0) for i, r in enumerate(group)]
        counts = {n.req_id: len(n.prompt_token_ids) for n in new}
        out = worker.execute_model(SchedulerOutput(new, CachedRequestData(), counts, sum(counts.values())))
        assert all((len(t) == 1) != (r in out.errors) for r, t in zip(out.req_ids, out.sampled_token_ids))
        known = CachedRequestData(list(counts), new_block_ids=[None] * len(group), num_computed_tokens=list(counts.values()))
        worker.execute_model(SchedulerOutput([], known, dict.fromkeys(counts, 1), len(group)))
        end = SchedulerOutput.make_empty()
        end.finished_req_ids |= set(counts)
        worker.execute_model(end)
