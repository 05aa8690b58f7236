"""The sampling kernels in Triton's interpreter, sanitizer and race detector on. Run by tests/test_kernels_interp.py in a process of its own."""
import random

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
import triton_tools as tools
from graph_tools import no_sync
from test_logits_processors import random_wish, wish
from test_sampler import slow_filter
from triton.runtime import interpreter

import litevllm.kernels.sampling as K
from litevllm.core.output import CachedRequestData, NewRequestData, SchedulerOutput
from litevllm.sampling_params import SamplingParams
from litevllm.worker.input_batch import RequestRows, prepare_inputs
from litevllm.worker.logits_processors import make_logits_processors
from litevllm.worker.logprobs import sampled_logprobs, take_raw
from litevllm.worker.sampler import Sampler, SamplingMetadata, exponential_noise, filter_logits, make_sampling_metadata, noise_keys

tools.install()
INF, NAN = float("inf"), float("nan")
ATOMIC = interpreter.InterpreterBuilder.create_atomic_rmw


def watched_atomic(self, op, ptr, val, mask, *rest):
    "The sanitizer for atomics: they may meet, but not outside of every tensor"
    tools.addresses(ptr, mask, "atomic")
    return ATOMIC(self, op, ptr, val, mask, *rest)


interpreter.InterpreterBuilder.create_atomic_rmw = watched_atomic


def metadata_of(n, seed=0, **columns):
    "SamplingMetadata of n rows; each column repeats the values given"
    def column(name, dtype, default=None):
        return torch.from_numpy(np.resize(np.array(columns.get(name, default)), n).astype(dtype)) if name in columns or default else None
    temperature = column("temperature", np.float32, [1.])
    chosen = np.flatnonzero(temperature.numpy())
    keys = torch.from_numpy(noise_keys(np.arange(n, dtype=np.uint64) + np.uint64(seed), np.arange(n)))
    return SamplingMetadata(False, temperature, column("min_p", np.float32), column("top_k", np.int32), column("top_p", np.float32), keys,
                            None if len(chosen) == n else chosen)


def guarded(logits, stride=None, fill=NAN):
    "The same numbers in rows that are further apart; what lies between them is NaN"
    stride = stride or logits.shape[1] + 24
    wide = torch.full((len(logits), stride), fill)
    wide[:, :logits.shape[1]] = logits
    return wide[:, :logits.shape[1]]


def kept(logits, metadata):
    cut, tie = (t[:, None] for t in K.find_cuts(logits, metadata))
    x = logits / metadata.temperature.where(metadata.temperature > 0, 1)[:, None]
    return (x > cut) | ((x == cut) & (torch.arange(x.shape[1]) < tie))


def kept_by_torch(logits, metadata):
    left = torch.ones(logits.shape, dtype=torch.bool)
    rows = torch.arange(len(logits)) if metadata.random_rows is None else torch.from_numpy(metadata.random_rows)
    left[rows] = filter_logits(logits[rows].clone(), metadata.pick(rows)) > -INF
    return left | (logits == -INF)


FILTERS = {"nothing": {}, "top_k": dict(top_k=[1, 5, 40, 0, 3000, 2]), "top_p": dict(top_p=[.9, .5, 1., .999, .05]), "min_p": dict(min_p=[.1, 0, .001, .5, 1.]),
           "all": dict(top_k=[50, 3, 0, 2000], top_p=[.9, .3, .95, .99, 1.], min_p=[0, .01, .1], temperature=[1., .3, 2.5, 0, .7])}
# what logits can look like: rows of a vocabulary of v
SHAPES = {"normal": lambda g, v: torch.randn(6, v, generator=g) * 3,
          "rounded to bfloat16": lambda g, v: (torch.randn(6, v, generator=g) * 3).bfloat16().float(),
          "few values": lambda g, v: torch.randint(0, 4, (6, v), generator=g).float(),
          "all equal": lambda g, v: torch.zeros(6, v),
          "two clouds": lambda g, v: torch.randn(6, v, generator=g) + torch.where(torch.arange(v) < 3000, 30., -30.),   # the first look finds exactly 3000
          "one wild": lambda g, v: torch.randn(6, v, generator=g).index_put((torch.arange(6), torch.randint(0, v, (6,), generator=g)),
                                                                             torch.tensor([1e30, -1e30, 3e38, -3e38, 1e-40, -0.])),
          "mostly banned": lambda g, v: torch.randn(6, v, generator=g).masked_fill_(torch.rand(6, v, generator=g) < .9, -INF)}


# less than a block, nearly one, several and a rest; more and fewer than CANDIDATES
KEPT = [(5003, shape, "all") for shape in SHAPES]
KEPT += [(5003, "normal", "top_p"), (5003, "normal", "min_p"), (5003, "few values", "top_k"), (5003, "few values", "top_p"), (5003, "all equal", "top_p"),
         (5003, "two clouds", "top_k"), (5003, "one wild", "top_p"), (5003, "mostly banned", "top_k")]
KEPT += [(vocab, shape, "all") for vocab in (7, 1500) for shape in ("normal", "few values", "mostly banned")]

@pytest.mark.parametrize("vocab, shape, filters", KEPT)
def test_the_same_tokens_are_kept_and_the_same_one_wins(vocab, shape, filters):
    "As in chapter 06, ties included; the logits stay as they are"
    logits = guarded(SHAPES[shape](torch.Generator().manual_seed(vocab), vocab))
    metadata, before = metadata_of(6, **FILTERS[filters]), logits.clone()
    ours, theirs = kept(logits, metadata) | (logits == -INF), kept_by_torch(logits, metadata)
    assert torch.equal(ours, theirs), (ours != theirs).sum(-1).tolist()
    assert torch.equal(K.sample(logits, metadata)[0], Sampler()(before.clone(), metadata).sampled_token_ids) and torch.equal(logits, before)


@pytest.mark.parametrize("seed", range(3))
def test_a_slow_reference_agrees(seed):
    "Token by token in float64"
    print(f"seed {seed}")
    rng = random.Random(seed)
    logits = torch.randn(8, 700, generator=torch.Generator().manual_seed(seed)) * 3
    params = [SamplingParams(temperature=rng.choice([.3, 1., 2.5, 9.]), top_k=rng.choice([0, 1, 5, 40, 10**6]),
                             top_p=rng.choice([1., .999, .9, .5, .05]), min_p=rng.choice([0, 0, .001, .2])) for _ in range(8)]
    columns = {name: [getattr(p, name) for p in params] for name in ("temperature", "min_p", "top_p")} | dict(top_k=[min(p.top_k, 2**31 - 1) for p in params])
    mask = kept(logits, metadata_of(8, **columns))
    for row, logit, p in zip(mask, logits, params): assert row.nonzero()[:, 0].tolist() == slow_filter(logit, p), p


def test_a_vocabulary_of_a_real_model():
    "50,000 logits: top_p over noise keeps a third of them and needs sweeps; a threshold among 30,000 equals needs none"
    logits = torch.randn(3, 50_001, generator=torch.Generator().manual_seed(1))
    logits[2] = logits[2].round()
    metadata = metadata_of(3, top_p=[.9, .999, .5])
    assert torch.equal(kept(logits, metadata), kept_by_torch(logits, metadata))


def test_rows_beyond_two_to_the_31_elements():
    "The last of 17 rows that are 2**27 logits apart"
    wide = torch.empty(17, 2**27)
    wide[16, :300] = torch.randn(300, generator=torch.Generator().manual_seed(1))
    logits = wide[:, :300]
    metadata = metadata_of(17, top_k=[20], temperature=[0.] * 16 + [1.])
    wide[:16, :300] = 0
    ids, failed = K.sample(logits, metadata)
    own = metadata.pick(slice(16, 17))
    assert ids[16] == Sampler()(logits[16:].clone(), own).sampled_token_ids[0] and not failed.any()


@pytest.mark.parametrize("filters", ["nothing", "top_k", "top_p", "all"])
def test_rows_without_a_winner(filters):
    "NaN, infinities, nothing left: told apart, wherever in the row, greedy or not; the neighbours are well"
    logits = torch.randn(7, 3000, generator=torch.Generator().manual_seed(2))
    logits[0, 2999], logits[1, 0], logits[2, 2500], logits[3], logits[4], logits[5, 17] = NAN, NAN, INF, -INF, NAN, -INF
    for greedy in (False, True):
        metadata = metadata_of(7, **FILTERS[filters] | (dict(temperature=[0.]) if greedy else dict(temperature=[.7])))
        want = Sampler()(logits.clone(), metadata)
        ids, failed = K.sample(guarded(logits), metadata)
        assert failed.tolist() == want.failed.tolist() == [2, 2, 2, 1, 2, 0, 0] and failed.dtype == torch.int8
        assert torch.equal(ids[5:], want.sampled_token_ids[5:])
    greedy = SamplingMetadata(True)
    assert K.sample(logits, greedy)[1].tolist() == [2, 2, 2, 1, 2, 0, 0] and torch.equal(K.sample(logits, greedy)[0][5:], logits[5:].argmax(-1))


def test_a_tempered_logit_that_overflows_is_seen():
    logits = torch.tensor([[0., 1e38], [1e38, 0.]])
    metadata = metadata_of(2, temperature=[.01, 1.])
    assert K.sample(logits, metadata)[1].tolist() == Sampler()(logits.clone(), metadata).failed.tolist() == [2, 0]


def test_equal_scores_go_to_the_lower_id():
    logits = torch.zeros(3, 5000)
    logits[1, [4100, 4200, 2050]] = 1
    logits[2, 4999] = 1
    assert K.sample(logits, SamplingMetadata(True))[0].tolist() == [0, 2050, 4999]


def test_noise_is_that_of_the_sampler():
    @triton.jit
    def noise(out, keys, exponential, N: tl.constexpr):
        row, ids = tl.program_id(0), tl.arange(0, N)
        tl.store(out + row * N + ids, exponential(ids, tl.load(keys + 2 * row), tl.load(keys + 2 * row + 1)))
    keys = torch.from_numpy(noise_keys(np.arange(40, dtype=np.uint64), np.arange(40)))
    got, want = torch.empty(40, 4096), exponential_noise(keys, 4096)
    noise[(40,)](got, keys, K.exponential, N=4096)
    assert ((got - want) / want).abs().max() < 5e-7 and (want < .01).sum() > 1000


@pytest.mark.parametrize("order", ["shuffled"])
def test_neither_the_order_of_programs_nor_the_neighbours_matter(order):
    logits, columns = torch.randn(6, 5003, generator=torch.Generator().manual_seed(3)) * 3, FILTERS["all"]
    metadata = metadata_of(6, **columns)
    ids, failed = K.sample(logits, metadata)
    with tools.grid_order(order): assert torch.equal(K.sample(logits, metadata)[0], ids)
    for row in range(6):
        alone = metadata.pick(slice(row, row + 1)) if metadata.temperature[row] else SamplingMetadata(True)
        assert K.sample(logits[row:row + 1], alone)[0] == ids[row]


# ---- processors

def random_rows(seed, vocab, rows_in_all=10, longest=15):
    "Requests with random wishes and histories, and the (row, position) pairs of a step with drafts"
    rng = random.Random(seed)
    params = [random_wish(rng, vocab) for _ in range(rows_in_all)]
    prompts = [[rng.randrange(vocab) for _ in range(rng.randint(1, 12))] for _ in params]
    outputs = [[rng.randrange(vocab) for _ in range(rng.randint(0, longest))] for _ in params]
    rows = RequestRows(rows_in_all, 12 + longest + 1, 4)
    for i in rng.sample(range(rows_in_all), rows_in_all):
        rows.update(SchedulerOutput([NewRequestData(str(i), prompts[i], params[i], [], 0)], CachedRequestData(), {}, 0))
    rows.token_ids[:] = np.where(rows.token_ids == 0, vocab - 1, rows.token_ids)     # behind the known tokens lies what once was there
    for i, (prompt, out) in enumerate(zip(prompts, outputs)): rows.token_ids[rows.row_of[str(i)], :len(prompt) + len(out)] = prompt + out
    which = [(i, n) for i in range(rows_in_all) for n in range(max(0, len(outputs[i]) - rng.randint(0, 4)), len(outputs[i]) + 1)]
    return rows, np.array([rows.row_of[str(i)] for i, _ in which]), np.array([len(prompts[i]) + n for i, n in which])


@pytest.mark.parametrize("seed, vocab", [(0, 5), (1, 5), (2, 40), (3, 600)])
def test_processors_change_the_same_logits_to_the_same_bits(seed, vocab, monkeypatch):
    "All kinds in one batch, with drafts, histories in one piece and in several; test_logits_processors.py holds the CPU's against float64"
    print(f"seed {seed}, vocab {vocab}")
    rows, index, positions = random_rows(seed, vocab)
    made = make_logits_processors(rows, index, positions)
    logits = torch.randn(len(index), vocab, generator=torch.Generator().manual_seed(seed)) * 4
    want = made.apply(logits.clone())
    for piece, order in ((8, "shuffled"), (256, "given")):
        monkeypatch.setattr(K, "HISTORY", piece)
        with tools.grid_order(order): assert torch.equal(made.apply(guarded(logits), K), want)


def test_a_token_that_comes_hundreds_of_times_is_penalised_once():
    params = wish(repetition_penalty=2., frequency_penalty=.25, presence_penalty=1.)
    rows = RequestRows(2, 1024, 4)
    rows.update(SchedulerOutput([NewRequestData("A", [3] * 300 + [4], params, [], 0)], CachedRequestData(), {}, 0))
    row = rows.row_of["A"]
    rows.token_ids[row, 301:901] = [3, 5] * 300
    logits = torch.tensor([[8., 8., 8., 8., -8., 800.]])
    make_logits_processors(rows, np.array([row]), np.array([901])).apply(logits, K)
    assert logits.tolist() == [[8, 8, 8, 4 - 75 - 1, -16, 400 - 75 - 1]]


def test_counts_of_long_rows_in_64_bits():
    "Logits and counts of the last row lie beyond 2**31 elements"
    params = wish(presence_penalty=1.)
    rows = RequestRows(17, 8, 4)
    for i in range(17): rows.update(SchedulerOutput([NewRequestData(str(i), [1], params, [], 0)], CachedRequestData(), {}, 0))
    rows.token_ids[:, 1] = 7
    index = np.array([rows.row_of[str(i)] for i in range(17)])
    wide = torch.empty(17, 2**27)
    wide[:, :300] = 0
    make_logits_processors(rows, index, np.full(17, 2)).apply(wide[:, :300], K)
    assert (wide[:, 7] == -1).all() and not wide[:, :7].any() and not wide[:, 8:300].any()


# ---- nothing waits

@pytest.mark.parametrize("kernels", [K, None], ids=["kernels", "torch"])
def test_a_step_is_launched_without_a_look(kernels):
    "Metadata, processors, sampler, logprobs: everything that can be asked for, in one batch"
    everything = dict(temperature=.8, seed=1, top_k=20, top_p=.9, min_p=.01, repetition_penalty=1.2, frequency_penalty=.1, presence_penalty=.1,
                      logit_bias={3: 1.}, allowed_token_ids=list(range(40)), min_tokens=3, stop_token_ids=[6], bad=[[4], [1, 5]])
    params = [wish(**everything, logprobs=3), wish(), wish(temperature=1., logprob_token_ids=[1, 2]), wish(logprobs=-1, presence_penalty=1.),
              wish(temperature=1., top_p=.5)]
    rows = RequestRows(8, 64, 4)
    plan = SchedulerOutput([NewRequestData(str(i), [1, 2, 3], p, [i + 1], 0) for i, p in enumerate(params)], CachedRequestData(),
                           {str(i): 3 for i in range(5)}, 15)
    rows.update(plan)
    batch = prepare_inputs(rows, plan)
    logits = torch.randn(5, 60, generator=torch.Generator().manual_seed(4))
    sampler = Sampler(kernels)
    with no_sync([(interpreter.GridExecutor, "__call__")]), torch.inference_mode():
        raw = take_raw(rows, batch, logits)
        out = sampler(logits.clone(), make_sampling_metadata(rows, batch))
        pending = sampled_logprobs(raw, rows, batch, out.sampled_token_ids)
    assert not out.failed.any() and out.sampled_token_ids.max() < 60
    found = pending.finish([[token] for token in out.sampled_token_ids.tolist()])
    assert {req_id: len(ids) for req_id, [(ids, _, _)] in found.items() if req_id != "0"} == {"2": len({1, 2, out.sampled_token_ids[2].item()}), "3": 60}


def test_the_sanitizer_watches_atomics():
    counts, columns = torch.zeros(1, 4, dtype=torch.int32), torch.zeros(8, 1, dtype=torch.int32)
    columns[3] = 2
    with pytest.raises(tools.OutOfBounds, match="atomic"):
        K.count_kernel[(1, 1)](counts, columns, torch.tensor([[1, 4]], dtype=torch.int32), 2, 1, 4, BLOCK=8)
