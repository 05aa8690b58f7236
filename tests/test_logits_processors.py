"""Penalties, bias, allow-lists, bad words, min_tokens: each row of each step against a slow reference, whatever happens to the row."""
import random
from collections import Counter, deque
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from worker_harness import GREEDY, Driver, make_worker, run_scheduler

from litevllm.core.async_scheduler import AsyncScheduler
from litevllm.core.output import CachedRequestData, NewRequestData, SchedulerOutput
from litevllm.core.request import Request
from litevllm.sampling_params import SamplingParams
from litevllm.tiny import write_tiny_model
from litevllm.worker import model_runner
from litevllm.worker.input_batch import NOT_ASKED, RaggedColumn, RequestRows, prepare_inputs, write_sampled
from litevllm.worker.logits_processors import make_logits_processors
from litevllm.worker.sampler import Sampler, make_sampling_metadata

INF = float("inf")


def wish(bad=None, **kw):
    "SamplingParams with the bad words given as token ids, as the front end would have spelled them."
    params = SamplingParams(**dict(temperature=0, max_tokens=None, ignore_eos=True) | kw)
    params._bad_words_token_ids = bad
    return params


def reference(logits, p, prompt, outputs):
    "The adjusted logits of one row, in float64, by the book: the order and the math of vLLM's documentation."
    x = [v if p.allowed_token_ids is None or i in p.allowed_token_ids else -INF for i, v in enumerate(logits.double().tolist())]
    for word in p.bad_words_token_ids or []:
        if len(word) - 1 <= len(outputs) and outputs[len(outputs) - len(word) + 1:] == word[:-1]: x[word[-1]] = -INF
    if len(outputs) < p.min_tokens: x = [-INF if i in p.all_stop_token_ids else v for i, v in enumerate(x)]
    for i, bias in (p.logit_bias or {}).items(): x[i] += bias
    seen, counts = {*prompt, *outputs}, Counter(outputs)
    for i in seen: x[i] = x[i] / p.repetition_penalty if x[i] > 0 else x[i] * p.repetition_penalty
    for i, n in counts.items(): x[i] -= n * p.frequency_penalty + p.presence_penalty
    return torch.tensor(x)


def assert_same(got, expected, what=""):
    assert torch.equal(got.isinf(), expected.isinf()) and torch.allclose(got.double(), expected.double(), rtol=1e-5, atol=1e-5), what


# ---- the columns

@pytest.mark.parametrize("seed", range(3))
def test_ragged_column_is_a_list_of_lists(seed):
    print(f"seed {seed}")
    rng = random.Random(seed)
    column, expected = RaggedColumn(7, np.int64, np.float32), {row: ([], []) for row in range(7)}
    for _ in range(3000):
        row, n = rng.randrange(7), rng.choice([0, 0, 1, 2, 5, 60])
        expected[row] = [rng.randrange(2**40) for _ in range(n)], [float(rng.randrange(99)) for _ in range(n)]
        column.set(row, *expected[row])
        index = [rng.randrange(7) for _ in range(rng.randrange(5))]
        owner, ids, values = column.gather(np.array(index, np.int64))
        assert list(zip(owner.tolist(), ids.tolist(), values.tolist())) == [(i, *pair) for i, r in enumerate(index) for pair in zip(*expected[r])]
    assert len(column.values[0]) < 7 * 60 * 2 + 60     # garbage does not pile up


def test_columns_of_a_request():
    rows = RequestRows(2, 32, 4)
    full = wish(bad=[[5], [7, 8, 9]], presence_penalty=.5, frequency_penalty=-.25, repetition_penalty=1.5, logit_bias={3: 2.5, 4: -1},
                allowed_token_ids=[9, 8], logprobs=3, prompt_logprobs=-1, stop_token_ids=[2], min_tokens=4)
    news = [NewRequestData("A", [1, 1, 6], full, [1], 0), NewRequestData("B", [1], wish(logprob_token_ids=[4, 2]), [2], 0)]
    rows.update(SchedulerOutput(news, CachedRequestData(), {}, 0))
    a, b = rows.row_of["A"], rows.row_of["B"]
    assert (rows.prompt_len[a], rows.min_len[a], rows.num_logprobs[a], rows.num_prompt_logprobs[a]) == (3, 7, 3, -1)
    assert (rows.presence_penalty[a], rows.frequency_penalty[a], rows.repetition_penalty[a]) == (.5, -.25, 1.5)
    assert (rows.prompt_len[b], rows.num_logprobs[b], rows.num_prompt_logprobs[b]) == (1, 2, NOT_ASKED)
    assert rows.changes_logits[a] and not rows.changes_logits[b]
    index = np.array([b, a])
    lists = {name: [x.tolist() for x in getattr(rows, name).gather(index)] for name in
             ("stop_ids", "allowed_token_ids", "logit_bias", "bad_words", "logprob_token_ids", "prompt_set")}
    assert lists == {"stop_ids": [[1], [2]], "allowed_token_ids": [[1, 1], [9, 8]], "logit_bias": [[1, 1], [3, 4], [2.5, -1]],
                     "bad_words": [[1] * 4, [5, 7, 8, 9], [0, 2, 1, 0]], "logprob_token_ids": [[0, 0], [4, 2]], "prompt_set": [[1, 1], [1, 6]]}
    rows.update(SchedulerOutput([], CachedRequestData(), {}, 0, finished_req_ids={"A"}))
    rows.update(SchedulerOutput([NewRequestData("C", [1], GREEDY, [1], 0)], CachedRequestData(), {}, 0))
    assert rows.row_of["C"] == a and not rows.changes_logits[a]     # nothing of A's is left in its row
    assert all(not getattr(rows, name).length[a] for name in lists) and rows.num_logprobs[a] == rows.num_prompt_logprobs[a] == NOT_ASKED


# ---- one batch, every kind

def random_wish(rng, vocab):
    "Any combination, each wish in one of two rows, and plain rows among them."
    if rng.random() < .2: return wish()
    some = lambda least, most: rng.sample(range(vocab), min(vocab, rng.randint(least, most)))
    kw = {"presence_penalty": rng.uniform(-2, 2), "frequency_penalty": rng.uniform(-2, 2), "repetition_penalty": rng.choice([.5, 1.3, 3.]),
          "logit_bias": {i: rng.uniform(-9, 9) for i in some(1, 9)}, "allowed_token_ids": some(1, vocab), "min_tokens": rng.randint(1, 9),
          "bad": [[rng.randrange(vocab) for _ in range(rng.choice([1, 1, 2, 2, 3, 30]))] for _ in range(rng.randint(1, 12))]}
    return wish(stop_token_ids=some(1, 3), **{k: v for k, v in kw.items() if rng.random() < .5})


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("vocab", [5, 40, 600])      # 5: tokens repeat all the time, and bad words match
def test_all_combinations_in_one_batch(vocab, seed):
    print(f"vocab {vocab}, seed {seed}")
    rng, torch_rng = random.Random(seed), torch.Generator().manual_seed(seed)
    params = [random_wish(rng, vocab) for _ in range(24)]
    prompts = [[rng.randrange(vocab) for _ in range(rng.randint(1, 12))] for _ in params]
    outputs = [[rng.randrange(vocab) for _ in range(rng.randint(0, 15))] for _ in params]
    rows = RequestRows(24, 32, 4)
    for i in rng.sample(range(24), 24): rows.update(SchedulerOutput([NewRequestData(str(i), prompts[i], params[i], [], 0)], CachedRequestData(), {}, 0))
    for i, out in enumerate(outputs): rows.token_ids[rows.row_of[str(i)], len(prompts[i]):len(prompts[i]) + len(out)] = out
    # each request stands in the batch with as many positions as it has drafts, in any order of requests
    which = [(i, upto) for i in rng.sample(range(24), 24) for upto in range(max(0, len(outputs[i]) - rng.randint(0, 4)), len(outputs[i]) + 1)]
    index = np.array([rows.row_of[str(i)] for i, _ in which])
    positions = np.array([len(prompts[i]) + upto for i, upto in which])
    logits = torch.randn(len(which), vocab, generator=torch_rng) * 4
    got = make_logits_processors(rows, index, positions).apply(logits.clone())
    for row, ((i, upto), before) in enumerate(zip(which, logits)):
        assert_same(got[row], reference(before, params[i], prompts[i], outputs[i][:upto]), f"row {row}: {params[i]}")
        if not rows.changes_logits[index[row]]: assert torch.equal(got[row], before)


def test_each_penalty_by_hand():
    "semantics 52, 53: seen 1 (prompt), 2 (prompt and output, twice), 3 (output); logits of either sign."
    logits = torch.tensor([2., 2., 2., -2., 2.])
    for kw, expected in ((dict(repetition_penalty=2.), [2, 1, 1, -4, 2]), (dict(frequency_penalty=.5), [2, 2, 1, -2.5, 2]),
                         (dict(presence_penalty=.5), [2, 2, 1.5, -2.5, 2]), (dict(repetition_penalty=.5, frequency_penalty=1.), [2, 4, 2, -2, 2])):
        rows = RequestRows(1, 32, 4)
        rows.update(SchedulerOutput([NewRequestData("A", [1, 2, 1], wish(**kw), [], 0)], CachedRequestData(), {}, 0))
        rows.token_ids[0, 3:6] = [2, 3, 2]
        assert make_logits_processors(rows, np.array([0]), np.array([6])).apply(logits[None].clone())[0].tolist() == expected, kw


# ---- what pays for it

class Calls(TorchDispatchMode):
    "The torch operations that run, by name."
    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func.__name__.split(".")[0]] += 1
        return func(*args, **kwargs or {})


def batch_of(params, prompt=(1, 2, 3)):
    rows = RequestRows(len(params), 64, 4)
    news = [NewRequestData(str(i), list(prompt), p, [i + 1], 0) for i, p in enumerate(params)]
    plan = SchedulerOutput(news, CachedRequestData(), {str(i): len(prompt) for i in range(len(params))}, len(prompt) * len(params))
    rows.update(plan)
    return rows, prepare_inputs(rows, plan)


def test_a_plain_batch_pays_nothing():
    "Greedy: one argmax, and nothing made for the device. Random: the calls that the filters and the race need, and no scatter or gather."
    rows, batch = batch_of([GREEDY] * 4)
    with Calls() as calls:
        metadata = make_sampling_metadata(rows, batch)
        Sampler()(torch.zeros(4, 9), metadata)
    assert metadata.processors is None and metadata.all_greedy and calls.names["argmax"] == 1
    assert set(calls.names) <= {"zeros", "argmax", "detach", "lift_fresh"}     # the last two are numpy looking at memory
    rows, batch = batch_of([SamplingParams(seed=i) for i in range(4)])
    with Calls() as calls: Sampler()(torch.zeros(4, 9), make_sampling_metadata(rows, batch))
    assert not set(calls.names) & {"index", "index_put_", "scatter_", "sort", "topk", "sum", "cumsum"}, calls.names


def test_the_number_of_calls_does_not_grow_with_the_rows():
    one = wish(bad=[[4], [1, 5]], presence_penalty=1., repetition_penalty=1.2, logit_bias={3: 1.}, allowed_token_ids=[3, 4, 5], min_tokens=2, stop_token_ids=[6])
    counts = []
    for n in (2, 7, 50):
        rows, batch = batch_of([one] * n)
        with Calls() as calls: make_sampling_metadata(rows, batch).processors.apply(torch.zeros(n, 9))
        counts.append(calls.names)
    assert counts[0] == counts[1] == counts[2] and counts[0]["index_put_"] == 5


# ---- allow-list and ban-list

def left(params, vocab=9, outputs=(), prompt=(1, 2, 3)):
    "The candidates of the next token, after prompt and outputs."
    rows, batch = batch_of([params], prompt)
    rows.token_ids[0, len(prompt):len(prompt) + len(outputs)] = outputs
    processors = make_logits_processors(rows, batch.logits_rows, batch.logits_positions + len(outputs))
    return processors.apply(torch.zeros(1, vocab))[0].isfinite().nonzero()[:, 0].tolist()


def test_a_phrase_bans_its_last_token_only_after_its_front():
    phrase = wish(bad=[[4, 5, 6]])
    everything = list(range(9))
    for outputs in ((), (4,), (5,), (4, 5, 0), (5, 4), (4, 4), (3, 5)): assert left(phrase, outputs=outputs) == everything, outputs
    for outputs in ((4, 5), (4, 4, 5), (4, 5, 4, 5)): assert left(phrase, outputs=outputs) == [0, 1, 2, 3, 4, 5, 7, 8], outputs
    assert left(phrase, prompt=(1, 4, 5)) == everything             # the prompt's words are the caller's own
    assert left(phrase, prompt=(1, 4), outputs=(5,)) == everything  # half of the front is
    assert left(wish(bad=[[7]])) == [0, 1, 2, 3, 4, 5, 6, 8]        # a word of one token, always
    assert left(wish(bad=[[5, 5]]), outputs=(5,)) == [0, 1, 2, 3, 4, 6, 7, 8]
    assert left(wish(bad=[list(range(8)) * 30 + [8]]), outputs=(7,)) == everything      # longer than the model's context
    assert left(wish(bad=[[4], [4], [0, 4]]), outputs=(0,)) == [0, 1, 2, 3, 5, 6, 7, 8]  # the same ban thrice


def test_an_allow_list_covered_by_bans_leaves_nothing():
    "M5: no token 0 by accident. The chosen logit is -inf, for the runner to see; neighbours are as they would be alone."
    logits = torch.tensor([[9., 1, 2, 3, 4]])
    covered = dict(allowed_token_ids=[3, 4], bad=[[3], [4]], logit_bias={3: 100., 0: 100.}, frequency_penalty=-2.)
    for kw in ({}, dict(temperature=1., seed=1), dict(temperature=2., seed=2, top_k=2, top_p=.5, min_p=.1)):
        for plain in (wish(), wish(temperature=1., seed=7), wish(temperature=1., seed=8, top_p=.5)):
            rows, batch = batch_of([plain, wish(**covered | kw), wish(allowed_token_ids=[3, 4])], prompt=(1, 2, 0))
            changed = logits.repeat(3, 1)
            ids, failed = Sampler()(changed, make_sampling_metadata(rows, batch))
            assert failed.tolist() == [0, 1, 0] and ids[2] == 4
            rows, batch = batch_of([plain])
            assert ids[0] == Sampler()(logits.clone(), make_sampling_metadata(rows, batch)).sampled_token_ids[0]
    assert left(wish(allowed_token_ids=[3, 4], stop_token_ids=[3, 4], min_tokens=1)) == []
    assert left(wish(allowed_token_ids=[3, 4, 4, 3], bad=[[3]])) == [4]
    assert left(wish(allowed_token_ids=list(range(9)))) == list(range(9))


@pytest.mark.parametrize("kw", [{}, dict(temperature=1.), dict(temperature=1., top_p=.9), dict(temperature=1., top_k=3, min_p=.1, top_p=.9)])
def test_numbers_that_are_none_stay_visible(kw):
    "A row of NaN gives a NaN, not a -inf: broken weights must not read as 'everything was forbidden'. The rows beside it don't notice."
    logits = torch.tensor([[0., 1., 2., 3.], [0., float("nan"), 2., 3.], [0., 1., float("inf"), 3.]])
    for order in permutations(range(3)):
        rows, batch = batch_of([wish(seed=i, **kw) for i in range(3)])
        failed = Sampler()(logits[list(order)], make_sampling_metadata(rows, batch)).failed.tolist()
        assert failed == [0 if which == 0 else 2 for which in order], order


# ---- through the runner, with all that can happen to a row

@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    return make_worker(write_tiny_model(tmp_path_factory.mktemp("lp")/"tiny", vocab_size=300), max_model_len=128, num_gpu_blocks_override=600)


class Watch:
    "Stands in for the runner's sampler; compares the processed logits of each row of each step with the reference."
    def __init__(self, monkeypatch, worker):
        self.compared = 0
        monkeypatch.setattr(model_runner, "make_sampling_metadata", self.make)
        monkeypatch.setattr(worker.model_runner, "sampler", self)

    def make(self, rows, batch, device):
        names = {row: req_id for req_id, row in rows.row_of.items()}
        known = [rows.requests[names[row]] for row in batch.logits_rows.tolist()]
        self.rows = [(s.sampling_params, rows.token_ids[row, :p].tolist(), s.prompt_len)
                     for s, row, p in zip(known, batch.logits_rows.tolist(), batch.logits_positions.tolist())]
        return make_sampling_metadata(rows, batch, device)

    def __call__(self, logits, metadata):
        changed = logits.clone()
        if metadata.processors is not None: metadata.processors.apply(changed)
        for row, (params, tokens, n) in enumerate(self.rows):
            assert_same(changed[row], reference(logits[row], params, tokens[:n], tokens[n:]), f"{params} after {tokens[n:]}")
            self.compared += metadata.processors is not None
        return Sampler()(logits, metadata)


REPEATS = [7, 8, 7, 7, 9, 8, 7, 11, 7]
TRIO = {"penalised": (REPEATS, dict(repetition_penalty=1.4, frequency_penalty=.6, presence_penalty=.4, max_tokens=18)),
        "plain": (REPEATS[::-1] + [5], dict(max_tokens=2)),
        "listed": ([3, 4, 5, 3], dict(allowed_token_ids=[3, 4, 5, 6], bad=[[3, 3], [4, 5], [6]], logit_bias={5: 4., 3: 2.5}, min_tokens=7,
                                      stop_token_ids=[5], frequency_penalty=.3, max_tokens=18))}
HEAT = {"greedy": {}, "random": dict(temperature=1.5, seed=11, top_p=.95)}


def trio(heat): return {name: (prompt, wish(**kw | HEAT[heat])) for name, (prompt, kw) in TRIO.items()}


def alone(worker, prompt, params): return run_scheduler(worker, [prompt], [params], 600)[0][0]


@pytest.mark.parametrize("heat", HEAT)
def test_three_requests_in_all_orders(worker, monkeypatch, heat):
    "M6, M1: the middle one ends early and rows move; each step is compared, and the tokens are those of each request alone."
    requests, watch = trio(heat), Watch(monkeypatch, worker)
    expected = {name: alone(worker, *request) for name, request in requests.items()}
    assert len(expected["plain"]) == 2 and len(set(expected["penalised"])) > 9
    for order in permutations(requests):
        got, _, _ = run_scheduler(worker, *zip(*(requests[name] for name in order)), 600)
        assert dict(zip(order, got)) == expected, order
    assert watch.compared > 150


@pytest.mark.parametrize("heat", HEAT)
@pytest.mark.parametrize("blocks, budget", [(8, 256), (8, 5), (8, 3), (12, 7)])
def test_preempted_and_chunked(worker, monkeypatch, heat, blocks, budget):
    requests, watch = trio(heat), Watch(monkeypatch, worker)
    expected = [alone(worker, *request) for request in requests.values()]
    for order in ((0, 1, 2), (2, 0, 1)):
        requests_in_order = [list(requests.values())[i] for i in order]
        got, _, preempted = run_scheduler(worker, *zip(*requests_in_order), blocks, max_num_batched_tokens=budget, max_num_seqs=3)
        assert got == [expected[i] for i in order] and watch.compared > 30
        assert preempted or blocks > 8


def test_rows_taken_over_between_steps(worker, monkeypatch):
    "By hand: preempted at every length, while another takes the row; then back in another row."
    watch = Watch(monkeypatch, worker)
    for name, (prompt, params) in trio("random").items():
        expected = alone(worker, prompt, params)[:8]
        for at in range(1, len(expected)):
            driver = Driver(worker)
            driver.add("A", prompt, params)
            driver.run("A", at)
            driver.preempt("A")
            driver.add("B", REPEATS, wish(bad=[[i] for i in range(200)], repetition_penalty=.7, presence_penalty=-2.))
            driver.run("B", 2)
            for outputs in range(at + 1, len(expected) + 1):
                driver.step({r: min(4, len(driver.requests[r].tokens) - driver.requests[r].computed) for r in "BA"})
                driver.run("A", outputs)
            assert driver.finish("A").outputs[:len(expected)] == expected, (name, at)
            driver.finish("B")
            worker.execute_model(driver.plan({}, {}))
    assert watch.compared > 100


@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_drafts_see_the_drafts_before_them(worker, monkeypatch, right):
    "Penalties and bad words of a draft's row count the drafts before it; the tokens are those without drafts."
    watch = Watch(monkeypatch, worker)
    for name, (prompt, params) in trio("greedy").items():
        expected = alone(worker, prompt, params)
        driver = Driver(worker)
        driver.add("A", prompt, params)
        driver.add("B", REPEATS, wish(presence_penalty=2.))
        driver.step({"A": len(prompt), "B": len(REPEATS)})
        while len(driver.requests["A"].outputs) < len(expected):
            n = len(driver.requests["A"].outputs)
            drafts = [t if i < right else (t + 1) % 300 for i, t in enumerate(expected[n:n + 3])]
            driver.step({"B": 1, "A": 1 + len(drafts)} if n % 2 else {"A": 1 + len(drafts), "B": 1}, {"A": drafts} if drafts else {})
        assert driver.finish("A").outputs[:len(expected)] == expected, name
        driver.finish("B")
        worker.execute_model(driver.plan({}, {}))
    assert watch.compared > 40


@pytest.mark.parametrize("heat", HEAT)
def test_planned_ahead(worker, monkeypatch, heat):
    "Asynchronous: step k+1 is planned before the scheduler has seen step k's tokens; the rows have them, and that is enough."
    requests, watch = trio(heat), Watch(monkeypatch, worker)
    expected = {name: alone(worker, *request) for name, request in requests.items()}
    config = worker.vllm_config
    for blocks in (60, 10):
        for order in permutations(requests):
            scheduler = AsyncScheduler(replace(config.scheduler_config, async_scheduling=True, max_num_batched_tokens=11),
                                       replace(config.cache_config, num_gpu_blocks=blocks))
            for name in order: scheduler.add_request(Request(name, requests[name][0], requests[name][1].clone(), block_hasher=scheduler.block_hasher))
            got, in_flight = {name: [] for name in order}, deque()
            while scheduler.has_requests() or in_flight:
                plan = scheduler.schedule()
                in_flight.append((plan, worker.execute_model(plan)))
                while in_flight and (len(in_flight) == 2 or not plan.num_scheduled_tokens):
                    for out in scheduler.update_from_output(*in_flight.popleft()).outputs: got[out.request_id] += out.new_token_ids
            assert got == expected, order
    assert watch.compared > 300


def test_a_word_is_never_said(worker):
    "M5: random text from four tokens at a high temperature; without the ban the phrases come, with it they don't."
    bad = [[3, 3], [4, 5, 6], [6, 4]]
    said = lambda tokens: [word for word in bad if any(tokens[i:i + len(word)] == word for i in range(len(tokens)))]
    base = dict(allowed_token_ids=[3, 4, 5, 6], temperature=9., max_tokens=90)
    free, banned = ([wish(seed=s, bad=b, **base) for s in range(6)] for b in (None, bad))
    texts, _, _ = run_scheduler(worker, [[3, 4, 5]] * 12, free + banned, 600)
    assert [w for w in bad if any(w in said(t) for t in texts[:6])] == bad and not any(said(t) for t in texts[6:])
    assert all(set(t) == {3, 4, 5, 6} and len(t) == 90 for t in texts)


def test_min_tokens_through_the_scheduler(worker):
    "The end token is all but certain, and comes exactly when it may."
    for n in (0, 1, 4, 12):
        params = [wish(logit_bias={9: 100.}, stop_token_ids=[9], min_tokens=n, max_tokens=20, temperature=t) for t in (0, 1.)]
        for tokens in run_scheduler(worker, [[1, 2], [3]], params, 600)[0]: assert len(tokens) == n + 1 and tokens[-1] == 9 and 9 not in tokens[:-1]


def test_a_row_that_gets_no_token_leaves_the_others_theirs():
    "The runner ends a request in which nothing was left; the tokens of its neighbours still go to their own rows."
    for failed in range(3):
        rows, batch = batch_of([GREEDY] * 3)
        write_sampled(rows, batch, [[] if i == failed else [40 + i] for i in range(3)])
        for i in range(3):
            row = rows.row_of[str(i)]
            assert rows.token_ids[row, :rows.num_tokens[row]].tolist() == [1, 2, 3] + [40 + i] * (i != failed)
