"""Filters, order, noise: what SamplingParams mean for a row of logits."""
import random

import numpy as np
import pytest
import torch

from litevllm.core.output import CachedRequestData, NewRequestData, SchedulerOutput
from litevllm.sampling_params import SamplingParams
from litevllm.worker.input_batch import RequestRows, prepare_inputs
from litevllm.worker.sampler import (Sampler, SamplingMetadata, apply_min_p, apply_top_k, apply_top_p, exponential_noise,
                                     filter_logits, make_sampling_metadata, noise_keys)

INF = float("inf")


def metadata_for(params, prompt_lens=None, device="cpu"):
    "The metadata of one prefill step with these requests, by the way the runner goes."
    lens = prompt_lens or [3] * len(params)
    rows = RequestRows(len(params), 64, 16)
    news = [NewRequestData(str(i), [1] * n, p, [1 + 4 * i, 2 + 4 * i, 3 + 4 * i, 4 + 4 * i][:-(-n // 16)], 0) for i, (p, n) in enumerate(zip(params, lens))]
    plan = SchedulerOutput(news, CachedRequestData(), {str(i): n for i, n in enumerate(lens)}, sum(lens))
    rows.update(plan)
    return make_sampling_metadata(rows, prepare_inputs(rows, plan), device)


def choose(logits, params, **kw):
    return Sampler()(torch.as_tensor(logits, dtype=torch.float32).clone(), metadata_for(params, **kw)).sampled_token_ids.tolist()


def race_of(n, keys): return SamplingMetadata(False, torch.ones(n), noise_keys=torch.from_numpy(keys))


def filtered(logits, params): return filter_logits(torch.as_tensor(logits, dtype=torch.float32).clone(), metadata_for(params))


def kept(logits): return [row.isfinite().nonzero()[:, 0].tolist() for row in logits]


# ---- single filters

def test_top_p_keeps_the_token_that_crosses():
    logits = torch.tensor([[.1, .2, .3, .4]]).log()
    for p, expected in ((.6, [2, 3]), (.4, [3]), (.39, [3]), (.01, [3]), (.71, [1, 2, 3]), (.95, [0, 1, 2, 3])):
        assert kept(apply_top_p(logits.clone(), torch.tensor([p]))) == [expected], p


def test_top_k_keeps_all_ties():
    assert kept(apply_top_k(torch.tensor([[1., 2, 2, 2]]), torch.tensor([2]))) == [[1, 2, 3]]


@pytest.mark.parametrize("n", [1, 8, 9])
def test_top_k_ties_in_any_batch(n):
    "M3: rows like 1,2,2,2,3 and k=3, alone and among greedy and unlimited rows."
    logits = torch.tensor([[1., 2, 2, 2, 3]]).repeat(n, 1)
    assert kept(apply_top_k(logits.clone(), torch.full((n,), 3))) == [[1, 2, 3, 4]] * n
    k = torch.tensor([3, 0, 1, 5, 10**7, 2, 0, 3, 4])[:n]
    rule = {0: [0, 1, 2, 3, 4], 1: [4], 2: [1, 2, 3, 4], 3: [1, 2, 3, 4], 4: [1, 2, 3, 4], 5: [0, 1, 2, 3, 4], 10**7: [0, 1, 2, 3, 4]}
    assert kept(apply_top_k(logits.clone(), k)) == [rule[i] for i in k.tolist()]


@pytest.mark.parametrize("k", [10**7, 6, 5, 0, -1])
def test_top_k_at_or_past_the_vocabulary_is_off(k):
    logits = torch.randn(1, 5)
    assert torch.equal(filtered(logits, [SamplingParams(top_k=k, seed=1)]), logits)


def test_top_k_one_is_argmax():
    logits = torch.randn(50, 301, generator=torch.Generator().manual_seed(3))
    assert choose(logits, [SamplingParams(top_k=1)] * 50) == logits.argmax(-1).tolist()


def test_min_p_after_temperature():
    logits = torch.tensor([[.5, .3, .15, .05]]).log()
    assert kept(apply_min_p(logits.clone(), torch.tensor([.31]))) == [[0, 1]]
    assert kept(filtered(logits, [SamplingParams(min_p=.31)])) == [[0, 1]]
    assert kept(filtered(logits, [SamplingParams(min_p=.31, temperature=2.)])) == [[0, 1, 2, 3]]   # p ratios: 1, .77, .55, .316
    assert kept(filtered(logits, [SamplingParams(min_p=.31, temperature=.5)])) == [[0, 1]]          # 1, .36, .09, .01
    assert kept(filtered(logits, [SamplingParams(min_p=1.)])) == [[0]]


def test_top_k_comes_before_top_p():
    logits = torch.tensor([[.4, .3, .2, .1]]).log()
    assert kept(filtered(logits, [SamplingParams(top_p=.55)])) == [[0, 1]]
    assert kept(filtered(logits, [SamplingParams(top_p=.55, top_k=2)])) == [[0]]   # .4/.7 = .571 crosses already


def test_top_p_ties_keep_a_fixed_number_and_the_lower_ids():
    for n in (1, 8, 9):
        assert kept(apply_top_p(torch.zeros(n, 4), torch.full((n,), .5))) == [[0, 1]] * n
        assert kept(apply_top_p(torch.tensor([[0., 1, 0, 0, 1]]).repeat(n, 1), torch.full((n,), .7))) == [[0, 1, 4]] * n   # .32 .32 .12 and two more .12


def slow_filter(logits, p):
    "One row, float64, token by token."
    x = logits.double() / p.temperature
    probs = x.softmax(-1)
    keep = probs >= p.min_p * probs.max()
    if 0 < p.top_k < len(x): keep &= x >= x[keep].sort(descending=True).values[min(p.top_k, int(keep.sum())) - 1]
    if p.top_p < 1:
        rest = x.masked_fill(~keep, -INF).softmax(-1)
        order, total, chosen = sorted(range(len(x)), key=lambda i: (-rest[i].item(), i)), 0., []
        for i in order:
            if total >= p.top_p: break
            chosen.append(i)
            total += rest[i].item()
        keep &= torch.zeros(len(x), dtype=torch.bool).index_fill(0, torch.tensor(chosen), True)
    return keep.nonzero()[:, 0].tolist()


@pytest.mark.parametrize("seed", range(5))
def test_filters_equal_a_slow_reference(seed):
    print(f"seed {seed}")
    rng = random.Random(seed)
    vocab = rng.choice([7, 97, 1500])   # 1500: past top_p's first look at the 512 likeliest
    params = [SamplingParams(temperature=rng.choice([.3, 1., 2.5, 9.]), top_k=rng.choice([0, 1, 5, 40, 10**6]),
                             top_p=rng.choice([1., .999, .9, .5, .05]), min_p=rng.choice([0, 0, .001, .2])) for _ in range(16)]
    logits = torch.randn(16, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    for got, row, p in zip(kept(filtered(logits, params)), logits, params): assert got == slow_filter(row, p), p


# ---- greedy and mixed batches

def test_greedy_rows_are_untouched_by_their_neighbours():
    logits = torch.randn(6, 200, generator=torch.Generator().manual_seed(1))
    greedy, hot = SamplingParams(temperature=0), SamplingParams(temperature=5., top_k=3, top_p=.4, min_p=.2, seed=9)
    best = logits.argmax(-1).tolist()
    assert choose(logits, [greedy] * 6) == best
    assert metadata_for([greedy] * 6).all_greedy
    mixed = choose(logits, [greedy, hot, greedy, hot, hot, greedy])
    assert [mixed[i] for i in (0, 2, 5)] == [best[i] for i in (0, 2, 5)]
    assert [mixed[i] for i in (1, 3, 4)] == choose(logits[[1, 3, 4]], [hot] * 3)


def test_a_tiny_temperature_is_random_but_sharp():
    params = SamplingParams(temperature=1e-4)
    assert params.temperature == pytest.approx(.01) and not metadata_for([params]).all_greedy
    assert set(choose(torch.tensor([[0., 1.]]).repeat(300, 1), [SamplingParams(temperature=1e-4) for _ in range(300)])) == {1}


# ---- min_tokens

def test_min_tokens_masks_end_tokens_until_reached():
    params = SamplingParams(temperature=0, min_tokens=2, max_tokens=9, stop_token_ids=[3])
    params.update_from_generation_config({"eos_token_id": [5]}, 5)
    logits = torch.tensor([[0., 1, 2, 9, 3, 8]])
    rows = RequestRows(2, 64, 16)
    plan = SchedulerOutput([NewRequestData("A", [1, 1, 1], params, [1], 0), NewRequestData("B", [1], SamplingParams(temperature=0), [2], 0)],
                           CachedRequestData(), {"A": 3, "B": 1}, 4)
    rows.update(plan)
    batch = prepare_inputs(rows, plan)
    for position, expected in ((3, 4), (4, 4), (5, 3), (6, 3)):    # outputs 1 and 2 are below min_tokens
        batch.logits_positions = np.array([position, 1])
        assert Sampler()(logits.repeat(2, 1), make_sampling_metadata(rows, batch)).sampled_token_ids.tolist() == [expected, 3], position


def test_min_tokens_with_nothing_to_mask():
    assert choose([[1., 2.]], [SamplingParams(temperature=0, min_tokens=4)]) == [1]


# ---- noise

def test_noise_is_a_function_of_seed_and_position():
    "M1: the same row gives the same token wherever it stands in the batch, whoever stands beside it."
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(2))
    for seed in (0, 42, 2**63 - 1):
        mine = SamplingParams(temperature=.8, seed=seed)
        alone = choose(logits, [mine])[0]
        for at in range(4):
            others = [SamplingParams(temperature=1.), SamplingParams(temperature=0), SamplingParams(top_k=4, seed=3)]
            batch = others[:at] + [mine] + others[at:]
            assert choose(torch.cat([torch.randn(at, 500), logits, torch.randn(3 - at, 500)]), batch)[at] == alone
    seeds = [choose(logits, [SamplingParams(temperature=5., seed=s)])[0] for s in range(30)]
    places = [choose(logits, [SamplingParams(temperature=5., seed=1)], prompt_lens=[n])[0] for n in range(1, 31)]
    assert len(set(seeds)) > 20 and len(set(places)) > 20


def test_no_two_seeds_and_positions_share_a_key():
    "Neighbouring seeds (n=3 uses seed, seed+1, seed+2) must not repeat each other's noise one position further on."
    seeds, places = np.divmod(np.arange(200 * 200), 200)
    assert len(np.unique(noise_keys(seeds.astype(np.uint64), places), axis=0)) == 200 * 200


def test_negative_and_huge_seeds_act():
    logits = torch.randn(1, 500)
    for seed in (-7, -2**63, 2**63 - 1): assert 0 <= choose(logits, [SamplingParams(seed=seed)])[0] < 500


def chi_square(counts, probs): return ((counts - counts.sum() * probs) ** 2 / (counts.sum() * probs)).sum().item()


@pytest.mark.parametrize("axis", ["seed", "position"])
def test_distribution(axis):
    "60,000 draws over 8 tokens, along seeds and along positions; 1 in 1e6 runs of a fair sampler passes 42."
    n = 60_000
    probs = torch.tensor([.3, .2, .2, .1, .1, .05, .04, .01])
    seeds = np.arange(n, dtype=np.uint64) if axis == "seed" else np.full(n, 123, np.uint64)
    places = np.full(n, 77) if axis == "seed" else np.arange(n)
    metadata = race_of(n, noise_keys(seeds, places))
    sampled = Sampler()(probs.log().repeat(n, 1), metadata).sampled_token_ids
    assert chi_square(torch.bincount(sampled, minlength=8), probs) < 42
    pairs = torch.bincount(sampled[1:] * 8 + sampled[:-1], minlength=64)   # neighbours are independent: 63 degrees of freedom
    assert chi_square(pairs, (probs[:, None] * probs).flatten()) < 135


def test_distribution_after_filters():
    n, params = 40_000, SamplingParams(temperature=2., top_k=4, top_p=.8, min_p=.1)
    logits = torch.tensor([2., 1.5, 1., .5, 0., -3.])
    metadata = metadata_for([params])
    allowed = filter_logits(logits[None].clone(), metadata)[0]
    metadata = SamplingMetadata(False, *(t.expand(n) for t in (metadata.temperature, metadata.min_p, metadata.top_k, metadata.top_p)),
                                torch.from_numpy(noise_keys(np.arange(n, dtype=np.uint64), np.full(n, 5))))
    counts = torch.bincount(Sampler()(logits.repeat(n, 1), metadata).sampled_token_ids, minlength=6)
    expected = allowed.softmax(-1)
    assert kept(allowed[None]) == [[0, 1, 2]] and counts[3:].sum() == 0      # .35 .27 .21 .17 pass top_k
    assert chi_square(counts[:3], expected[:3]) < 30


def test_noise_over_a_vocabulary_is_exponential():
    noise = exponential_noise(torch.from_numpy(noise_keys(np.arange(64, dtype=np.uint64), np.arange(64))), 49152)
    assert noise.isfinite().all() and (noise > 0).all()
    assert noise.mean().item() == pytest.approx(1, abs=.005) and noise.var().item() == pytest.approx(1, abs=.02)
    uniform = (-noise).expm1().neg()
    assert chi_square(torch.histc(uniform, 256, 0, 1), torch.full((256,), 1 / 256)) < 400     # 255 degrees of freedom
    correlation = torch.corrcoef(noise[:16])
    assert (correlation - torch.eye(16)).abs().max() < .03      # 1/sqrt(49152) = .0045


def test_rare_tokens_come_as_often_as_they_should():
    "A token of probability 1e-4: the smallest noise values decide."
    n = 200_000
    metadata = race_of(n, noise_keys(np.arange(n, dtype=np.uint64), np.arange(n)))
    hits = (Sampler()(torch.tensor([1 - 1e-4, 1e-4]).log().repeat(n, 1), metadata).sampled_token_ids == 1).sum().item()
    assert 2 <= hits <= 45, hits      # 20 expected


def test_a_single_candidate_always_wins():
    n = 100_000
    logits = torch.full((n, 3), -INF)
    logits[:, 2] = 0
    metadata = race_of(n, noise_keys(np.arange(n, dtype=np.uint64), np.arange(n)))
    assert (Sampler()(logits, metadata).sampled_token_ids == 2).all()


def test_worst_case_metadata_runs():
    out = Sampler()(torch.randn(3, 20), SamplingMetadata.worst_case(3, 20, "cpu"))
    assert out.sampled_token_ids.shape == out.failed.shape == (3,) and out.sampled_token_ids.dtype == torch.int64 and out.failed.dtype == torch.int8
