"""Cases of public bug reports, by their ids, through `LLM.generate` on real engines: P4, M1, M3, M5, M6, M8, and the forced end tokens of K5 and L3."""
import itertools
import json
import math
import random
import re

import pytest
import torch
from case_tools import check_drained, check_like, check_live, core_of, generate, greedy, hf_logits, ids, preempt_before, run_separately, solo
from parity import NEAR_TIE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from litevllm import LLM, SamplingParams
from litevllm.tiny import write_tiny_model

pytestmark = pytest.mark.timeout(60)
BOTH = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
V = 512


@pytest.fixture(autouse=True)
def in_process(monkeypatch): monkeypatch.setenv("LITEVLLM_ENABLE_MULTIPROCESSING", "0")


def random_ids(rng, n): return [rng.randrange(3, V) for _ in range(n)]


def check_values(entry, row, where):
    "Logprobs within 1e-4 of a row of transformers', and ranks the number of tokens at least as likely (where two are all but equal, either order)."
    tokens, mine = list(entry), torch.tensor([e.logprob for e in entry.values()])
    assert (mine - row[tokens]).abs().max() < 1e-4, where
    ordered, ranks = row.sort().values, torch.tensor([e.rank for e in entry.values()])
    most, least = (len(row) - torch.searchsorted(ordered, row[tokens] + d) for d in (-2e-4, 2e-4))
    assert ((least + (least == 0) <= ranks) & (ranks <= most)).all(), where


# ---- P4

RUNS = {"cold": {}, "warm": {}, "chunked": dict(max_num_batched_tokens=5, max_num_seqs=4), "chunked by 3": dict(long_prefill_token_threshold=3),
        "preempted": dict(long_prefill_token_threshold=3)}


@BOTH
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("b", [4, 16])
def test_P4_prompt_logprobs_of_a_prompt_that_is(tiny_llama, b, run, is_async):
    "b-1, b and 2b+1 ids: an entry a token, the first None, within 1e-4 of transformers; whoever does not ask may still read the cache."
    rng = random.Random(b)
    preemptions = 0
    with LLM(tiny_llama, block_size=b, async_scheduling=is_async, max_logprobs=-1, **RUNS[run]) as llm:
        for n in (b - 1, b, 2 * b + 1):
            for k in (1, 0, -1) if b == 4 else (1,):
                prompt = random_ids(rng, n)
                if run == "warm": assert generate(llm, [prompt, prompt + [9]], greedy(3))[1].num_cached_tokens in (0, n // b * b)
                happened = preempt_before(llm, 1, 4) if run == "preempted" else []
                out, other = generate(llm, [prompt, random_ids(rng, 7)], [greedy(4, prompt_logprobs=k, logprobs=1), greedy(4)])
                preemptions += len([h for h in happened if h[1]])
                assert out.num_cached_tokens == 0
                rows = hf_logits(tiny_llama, prompt).log_softmax(-1)
                assert len(out.prompt_logprobs) == n and out.prompt_logprobs[0] is None and other.prompt_logprobs is None
                for at, (entry, row) in enumerate(zip(out.prompt_logprobs[1:], rows), 1):
                    assert prompt[at] == next(iter(entry)) and len(entry) in {1: (1, 2), 0: (1,), -1: (V,)}[k]
                    check_values(entry, row, (n, at))
                    if k == 1: assert min(e.rank for e in entry.values()) == 1
                check_like(tiny_llama, prompt, ids(out), solo(tiny_llama, prompt, 4), (run, n))
                if run == "warm": assert generate(llm, prompt, greedy(1))[0].num_cached_tokens == (n - 1) // b * b
        assert (preemptions > 3) == (run == "preempted")
        check_drained(llm)


# ---- M1

def seeded(seed, n=24): return SamplingParams(temperature=0.8, seed=seed, max_tokens=n, ignore_eos=True)


@pytest.mark.parametrize("seed", [42, 0, 2**63 - 1])
@BOTH
def test_M1_a_seed_gives_the_same_tokens_in_five_runs(tiny_llama, seed, is_async):
    "Alone; beside an unseeded one; in the other order; in chunks; preempted half-way. The unseeded neighbour varies from call to call."
    rng = random.Random(1)
    prompt, other, loose = random_ids(rng, 11), random_ids(rng, 6), SamplingParams(temperature=0.8, max_tokens=24, ignore_eos=True)
    args = dict(block_size=4, async_scheduling=is_async)
    got, neighbours = {}, []
    with LLM(tiny_llama, **args) as llm:
        got["alone"] = ids(generate(llm, prompt, seeded(seed))[0])
        for name, order in (("beside", (0, 1)), ("swapped", (1, 0))):
            outs = generate(llm, [(prompt, other)[i] for i in order], [(seeded(seed), loose)[i] for i in order])
            got[name] = ids(outs[order.index(0)])
            neighbours.append(ids(outs[order.index(1)]))
        assert neighbours[0] != neighbours[1], "the unseeded one does not vary"
        assert ids(generate(llm, prompt, seeded(seed - 1))[0]) != got["alone"]
    for name, more in (("chunks of 5", dict(max_num_batched_tokens=5, max_num_seqs=2)), ("chunks of 2", dict(long_prefill_token_threshold=2))):
        with LLM(tiny_llama, **args, **more) as llm: got[name] = ids(generate(llm, [prompt, other], [seeded(seed), loose])[0])
    for name, caching, steps in (("preempted", True, (8, 15)), ("preempted, no cache", False, (5,)), ("preempted in its prompt", False, (1, 3))):
        with LLM(tiny_llama, enable_prefix_caching=caching, long_prefill_token_threshold=3, **args) as llm:
            happened = preempt_before(llm, *steps, which=0)
            got[name] = ids(generate(llm, [prompt, other], [seeded(seed), loose])[0])
            assert len(happened) == len(steps) and happened[0][0].startswith("0")
            check_drained(llm)
    with LLM(tiny_llama, num_gpu_blocks_override=12, **args) as llm:
        got["a tight pool"] = ids(generate(llm, [other, prompt], [loose, seeded(seed)])[1])
        assert core_of(llm).scheduler.make_stats().num_preemptions > 0
    assert got == dict.fromkeys(got, got["alone"])


# ---- M3

def test_M3_top_k_past_the_vocabulary_and_greedy_rows(tiny_llama):
    "10**7, V, V+1, 0, -1 are all of them; alone and in batches of 8 and 9 with greedy rows, which don't change; 1 is argmax."
    rng = random.Random(3)
    prompts = [random_ids(rng, 5) for _ in range(9)]
    plain = [solo(tiny_llama, p, 8) for p in prompts]
    random_one = lambda k, seed=5: SamplingParams(temperature=0.9, top_k=k, seed=seed, max_tokens=8, ignore_eos=True)
    with LLM(tiny_llama) as llm:
        free = ids(generate(llm, prompts[0], random_one(0))[0])
        assert free != plain[0] and ids(generate(llm, prompts[0], random_one(2))[0]) not in (free, plain[0])
        for k in (10**7, V, V + 1, 0, -1, 2**31, 2**63, 10**30, V - 1):
            for n in (1, 8, 9):
                outs = [ids(o) for o in generate(llm, prompts[:n], [random_one(k)] + [greedy(8)] * (n - 1))]
                assert (outs[0] == free or k == V - 1) and len(outs[0]) == 8, k
                for i in range(1, n): check_like(tiny_llama, prompts[i], outs[i], plain[i], (k, n))
            check_live(llm)
        for n in (1, 8, 9):
            for p, out, want in zip(prompts, generate(llm, prompts[:n], random_one(1)), plain): check_like(tiny_llama, p, ids(out), want)
        for bad in (-2, 1.5):
            with pytest.raises((ValueError, TypeError), match="top_k"): random_one(bad)


# ---- M5

def words_tokenizer():
    "A small byte-level BPE in which `block` is one token after a space and two without; `cat` is one without and two after a space."
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    text = ["a block of the block table, another block", "cat\ncat\ncat\ncat", "lock\nlock\nlock", "the big dog, the big dog"] * 9
    tok.train_from_iterator(text, trainers.BpeTrainer(vocab_size=559, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"], show_progress=False,
                                                      initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="<|im_end|>")


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    path = write_tiny_model(tmp_path_factory.mktemp("words") / "llama", vocab_size=559)
    words_tokenizer().save_pretrained(path)
    return path


def forms(tok, word): return [tok(t, add_special_tokens=False).input_ids for t in (word, " " + word)]


@pytest.mark.parametrize("word, lengths", [("block", (2, 1)), ("cat", (1, 2))])
def test_M5_both_forms_of_a_word_are_blocked(words, word, lengths):
    "Only the tokens that write the word, and two others, are allowed: without the ban the text is full of the word, in both forms; with it, free of it."
    with LLM(words) as llm:
        tok = llm.get_tokenizer()
        bare, spaced = forms(tok, word)
        assert all((len(f) == 1) == (k == 1) for f, k in zip((bare, spaced), lengths)), (bare, spaced)
        dog, comma = tok(" dog,", add_special_tokens=False).input_ids
        params = dict(allowed_token_ids=[*bare, *spaced, dog, comma], temperature=50.0, max_tokens=60, ignore_eos=True)
        prompts = ["the", "a " + word, "a,"]
        texts = lambda **kw: [o.outputs[0].text for o in generate(llm, prompts * 4, [SamplingParams(seed=seed // 3, **params, **kw) for seed in range(12)])]
        free, banned, plain_again = texts(), texts(bad_words=[word]), texts()
        assert sum(t.count(" " + word) for t in free) > 10 and sum(len(re.findall(f"(?<! ){word}", t)) for t in free) > 10 and plain_again == free
        for t in banned: assert word not in t and len(t) > 50, t
        # a listed row beside an unlisted one
        both = generate(llm, ["the", "the"], [SamplingParams(seed=0, bad_words=[word], **params), SamplingParams(seed=0, **params)])
        assert [o.outputs[0].text for o in both] == [banned[0], free[0]]
        check_live(llm)


@BOTH
def test_M5_a_phrase_bans_its_last_token_only_after_its_front(words, is_async):
    "Two tokens: after the first the second can't come; after others, and after a prompt that ends with the first, it does."
    with LLM(words, async_scheduling=is_async) as llm:
        tok = llm.get_tokenizer()
        phrase = " big dog"
        big, dog = tok(phrase, add_special_tokens=False).input_ids
        the = tok(" the", add_special_tokens=False).input_ids[-1]
        runs = lambda prompt, **kw: [ids(o) for o in generate(llm, [prompt] * 6, [SamplingParams(
            temperature=2.0, seed=seed, max_tokens=40, ignore_eos=True, allowed_token_ids=[big, dog, the], **kw) for seed in range(6)])]
        pairs = lambda texts: {pair for t in texts for pair in zip(t, t[1:])}
        assert (big, dog) in pairs(runs("a"))
        banned = pairs(runs("a", bad_words=[phrase]))
        assert (big, dog) not in banned and {(the, dog), (dog, dog), (big, the), (dog, big)} <= banned
        after = generate(llm, [[5, big]], greedy(2, bad_words=[phrase], allowed_token_ids=[big, dog], logit_bias={dog: 50.0}))[0]
        assert ids(after) == [dog, dog]      # the prompt's words are the caller's own
        forced = generate(llm, [[5]], greedy(4, bad_words=[phrase], allowed_token_ids=[big, dog, the], logit_bias={big: 20.0, dog: 10.0}))[0]
        assert ids(forced) == [big] * 4
        forced = generate(llm, [[5]], greedy(4, bad_words=[phrase], allowed_token_ids=[big, dog, the], logit_bias={big: 10.0, dog: 50.0}))[0]
        assert ids(forced) == [dog] * 4
        check_drained(llm)


@BOTH
def test_M5_an_allow_list_that_the_bans_cover(words, is_async):
    "No candidate is left: an error that says so, never token 0; after as many tokens as could be chosen. The rows beside it are as they are alone."
    with LLM(words, async_scheduling=is_async) as llm:
        tok = llm.get_tokenizer()
        cat, = forms(tok, "cat")[0]
        eos = tok.eos_token_id
        prompts = [[5, 6, 7], [8, 9], [10, 11, 12]]
        want = [solo(words, prompts[0], 6), solo(words, prompts[2], 6)]
        hopeless = {"bad word": dict(bad_words=["cat"], allowed_token_ids=[cat]), "min_tokens": dict(allowed_token_ids=[eos], min_tokens=2, ignore_eos=False),
                    "stop id": dict(allowed_token_ids=[9, 10], stop_token_ids=[9, 10], min_tokens=1),
                    "hot": dict(bad_words=["cat"], allowed_token_ids=[cat], temperature=1.0, top_p=.5, top_k=3, min_p=.1),
                    "biased": dict(bad_words=["cat"], allowed_token_ids=[cat], logit_bias={cat: 100.0, 0: 100.0})}
        for name, kw in hopeless.items():
            params = SamplingParams(**dict(temperature=0, max_tokens=6, ignore_eos=True) | kw)
            outs = generate(llm, prompts, [greedy(6), params, greedy(6)])
            assert (outs[1].outputs[0].finish_reason, ids(outs[1]), outs[1].finished) == ("error", [], True) and "no token is left" in outs[1].error, name
            for p, out, w in zip((prompts[0], prompts[2]), (outs[0], outs[2]), want): check_like(words, p, ids(out), w, name)
            check_live(llm)
        late = greedy(9, bad_words=["catcatcat"], allowed_token_ids=[cat])
        out, = generate(llm, [prompts[0]], late)
        assert (ids(out), out.outputs[0].finish_reason) == ([cat, cat], "error"), out
        check_live(llm)


# ---- M6

def adjusted(logits, p, prompt, outputs):
    "Ten lines of reference: repetition looks at prompt and output, presence and frequency at the output."
    x = logits.clone()
    if p.allowed_token_ids: x[[t for t in range(len(x)) if t not in p.allowed_token_ids]] = -torch.inf
    for t in set(prompt) | set(outputs): x[t] = x[t] / p.repetition_penalty if x[t] > 0 else x[t] * p.repetition_penalty
    for t in set(outputs): x[t] -= p.presence_penalty + p.frequency_penalty * outputs.count(t)
    return x


def check_greedy_reference(path, prompt, p, out):
    "Every token is the argmax of the adjusted logits of transformers after the same prefix, or a near tie with it."
    tokens = ids(out)
    rows = hf_logits(path, prompt + tokens[:-1])[len(prompt) - 1:]
    for i, token in enumerate(tokens):
        x = adjusted(rows[i], p, prompt, tokens[:i])
        assert x.max() - x[token] < NEAR_TIE, (prompt, i, token, int(x.argmax()))


PENALTIES = {"repetition": dict(repetition_penalty=1.8), "presence": dict(presence_penalty=2.0), "frequency": dict(frequency_penalty=1.5),
             "all": dict(repetition_penalty=1.3, presence_penalty=-0.7, frequency_penalty=0.9), "less": dict(repetition_penalty=0.6, frequency_penalty=-0.5)}


@pytest.mark.parametrize("kind", PENALTIES)
@BOTH
def test_M6_penalties_in_every_order_with_rows_that_move(tiny_llama, kind, is_async):
    """Repeats in the prompt; a penalised, a plain and a short request in all six orders; preempted and resumed; each step against the reference.

    Eight tokens are allowed, three of them the prompt's, so that it shows whatever is counted wrongly."""
    a, b, c, *_ = few = [360, 347, 107, 497, 395, 32, 406, 349]      # chosen such that each kind of penalty changes most of the answer
    repeats, few = [a, b, a, a, c, b, a, c], dict(allowed_token_ids=few)
    requests = [(repeats, greedy(16, **few, **PENALTIES[kind])), (repeats[::-1], greedy(16, **few)), ([b, a, b, b], greedy(2, **few, **PENALTIES[kind]))]
    with LLM(tiny_llama, async_scheduling=is_async, block_size=4) as llm:
        want = [generate(llm, [p], sp)[0] for p, sp in requests]
        for (p, sp), out in zip(requests, want): check_greedy_reference(tiny_llama, p, sp, out)
        assert ids(want[0]) != ids(generate(llm, [repeats], greedy(16, **few))[0]), "the penalty does nothing here"
        for order in itertools.permutations(range(3)):
            for i, out in zip(order, generate(llm, [requests[i][0] for i in order], [requests[i][1] for i in order])):
                check_greedy_reference(tiny_llama, *requests[i], out)
                assert len(ids(out)) == len(ids(want[i]))
        check_drained(llm)
    for which, caching in ((0, True), (-1, False), (1, True)):
        with LLM(tiny_llama, async_scheduling=is_async, block_size=4, enable_prefix_caching=caching, long_prefill_token_threshold=5) as llm:
            happened = preempt_before(llm, 2, 5, 8, 9, which=which)
            for (p, sp), out in zip(requests, generate(llm, *map(list, zip(*requests)))): check_greedy_reference(tiny_llama, p, sp, out)
            assert sum(n > 0 for *_, n in happened) >= 2
            check_drained(llm)


# ---- M8

@pytest.mark.parametrize("how", [
    dict(temperature=0), dict(temperature=0.3, top_k=2), dict(temperature=2.0, seed=1), dict(temperature=1.0, top_k=5, top_p=.5, min_p=.2),
    dict(temperature=0, repetition_penalty=1.5, logit_bias={9: 30.0}), dict(temperature=1.0, allowed_token_ids=[5, 6, 7, 70])], ids=str)
def test_M8_logprobs_are_raw_whatever_chose_the_token(tiny_llama, how):
    "0: the sampled token only; 1, 5, 20: the likeliest and the sampled one; -1: all, and they sum to 1; past the limit: refused. All numbers are JSON."
    rng = random.Random(8)
    prompts = [random_ids(rng, n) for n in (1, 5, 9)]
    with LLM(tiny_llama, max_logprobs=-1) as llm:
        counts = (0, 1, 5, 20, V, -1, None)
        batch = [(p, k) for p in prompts for k in counts]
        outs = generate(llm, [p for p, _ in batch], [SamplingParams(max_tokens=4, ignore_eos=True, logprobs=k, **how) for _, k in batch])
        for (p, k), out in zip(batch, outs):
            c = out.outputs[0]
            if k is None:
                assert c.logprobs is None and c.cumulative_logprob is None
                continue
            rows = hf_logits(tiny_llama, p + ids(out)[:-1])[len(p) - 1:].log_softmax(-1)
            assert len(c.logprobs) == 4
            for token, entry, row in zip(ids(out), c.logprobs, rows):
                assert token in entry and len(entry) in {0: (1,), -1: (V,), V: (V,)}.get(k, (k, k + 1))
                check_values(entry, row, (p, k))
                others = sorted(e.rank for t, e in entry.items() if t != token)
                assert not others or others[0] <= 2 and len(others) >= k - 1
                if k in (-1, V): assert abs(sum(math.exp(e.logprob) for e in entry.values()) - 1) < 1e-4
                json.dumps([e.logprob for e in entry.values()], allow_nan=False)
            assert c.cumulative_logprob == pytest.approx(sum(e[t].logprob for t, e in zip(ids(out), c.logprobs)), abs=1e-5)
        check_drained(llm)


def test_M8_past_the_limit_and_the_texts_of_tokens(tiny_llama):
    "Texts show real spaces and join to the answer, also where a character is cut; 20 is the limit unless the engine is told otherwise."
    with LLM(tiny_llama) as llm:
        for name, k in itertools.product(("logprobs", "prompt_logprobs"), (21, 512, 10**9, -1)):
            with pytest.raises(ValueError, match=rf"{name}.*20|20.*{name}"): generate(llm, [[5, 6]], greedy(1, **{name: k}))
            check_live(llm)
        for name in ("logprobs", "prompt_logprobs"):
            with pytest.raises(ValueError, match=f"{name}.*-2"): greedy(1, **{name: -2})
            generate(llm, [[5, 6]], greedy(1, **{name: 20}))
        tok = llm.get_tokenizer()
        for text in ("Once upon a time there was", "Où est la gare? Straße, Äpfel", "naïve café 😀"):
            script = tok(text, add_special_tokens=False).input_ids
            out, = generate(llm, text, greedy(3, prompt_logprobs=3))
            shown = [e[t].decoded_token for t, e in zip(script[1:], out.prompt_logprobs[1:])]
            assert tok.decode(script[:1]) + "".join(shown) == text and not any("\u0120" in s or "\u2581" in s for s in shown), shown
            assert any(s.startswith(" ") for s in shown)
        hot = SamplingParams(temperature=3.0, seed=2, max_tokens=40, ignore_eos=True, logprobs=0)
        out, = generate(llm, "Once upon", hot)
        shown = "".join(e[t].decoded_token for t, e in zip(ids(out), out.outputs[0].logprobs))
        assert shown.rstrip("\ufffd") == out.outputs[0].text.rstrip("\ufffd") and "\ufffd" in shown, (shown, out.outputs[0].text)


# ---- K5: the answer ends with its first token

@BOTH
@pytest.mark.parametrize("force", ["allowed_token_ids", "logit_bias"])
def test_K5_an_end_token_comes_first(tiny_llama, force, is_async):
    "EOS, a stop id, and a stop string: text empty, reason 'stop', one token counted; the two good requests beside it go on."
    good = [[5, 6, 7], [8, 9]]
    want = [solo(tiny_llama, p, 6) for p in good]
    with LLM(tiny_llama, async_scheduling=is_async) as llm:
        eos = llm.get_tokenizer().eos_token_id
        only = lambda t: {"allowed_token_ids": [t]} if force == "allowed_token_ids" else {"logit_bias": {t: 100.0}}
        for kw, reason in ((only(eos), None), (only(70) | dict(stop_token_ids=[70], ignore_eos=True), 70),
                           (only(70) | dict(stop=[llm.get_tokenizer().decode([70])], ignore_eos=True), llm.get_tokenizer().decode([70]))):
            for place in range(3):
                prompts, params = [*good[:place], [20, 21], *good[place:]], [greedy(6)] * 2
                params.insert(place, SamplingParams(temperature=0, max_tokens=6, **kw))
                outs = generate(llm, prompts, params)
                out = outs.pop(place)
                c = out.outputs[0]
                assert (c.text, len(c.token_ids), c.finish_reason, c.stop_reason, out.error) == ("", 1, "stop", reason, None), (kw, c)
                for p, o, w in zip(good, outs, want): check_like(tiny_llama, p, ids(o), w)
        check_live(llm)
        done = run_separately(llm.llm_engine, ("a", good[0], greedy(6)), ("b", [20, 21], SamplingParams(temperature=0, **only(eos))), ("c", "", greedy(6)))
        assert ids(done["a"]) == want[0] and ids(done["b"]) == [eos] and isinstance(done["c"], ValueError)
        check_drained(llm)


# ---- L3

def with_files(tmp_path, generation, config, **kw):
    "A tiny model whose tokenizer's EOS is 2, with this generation_config.json (None: no such file) and these changes to config.json (None: drop it)."
    path = write_tiny_model(tmp_path / "model", **kw)
    (tmp_path / "model" / "generation_config.json").unlink(missing_ok=True)
    if generation is not None: (tmp_path / "model" / "generation_config.json").write_text(json.dumps(generation))
    file = tmp_path / "model" / "config.json"
    fields = json.loads(file.read_text()) | config
    file.write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))
    return path


END_TOKENS = {
    "a list": (dict(eos_token_id=[2, 50, 60]), {}, {2, 50, 60}),
    "a list without the tokenizer's": (dict(eos_token_id=[50, 60]), {}, {2, 50, 60}),
    "another id": (dict(eos_token_id=50), {}, {2, 50}),
    "a file that does not speak of it": (dict(temperature=0.5), dict(eos_token_id=50), {2}),
    "config.json alone": (None, dict(eos_token_id=[50, 60]), {2, 50, 60}),
    "the tokenizer alone": (None, dict(eos_token_id=None), {2}),
}


@pytest.mark.parametrize("case", END_TOKENS)
def test_L3_each_end_token_stops_and_ignore_eos_ignores_all(tmp_path, case):
    generation, config, ends = END_TOKENS[case]
    with LLM(with_files(tmp_path, generation, config)) as llm:
        for token in (2, 50, 60, 70):
            for force in (dict(logit_bias={token: 100.0}), dict(allowed_token_ids=[token])):
                for own in ({}, dict(stop_token_ids=[80])):      # an own stop id must not push out the model's
                    both = [SamplingParams(temperature=0, max_tokens=4, ignore_eos=i, **force, **own) for i in (False, True)]
                    stopped, ignoring = generate(llm, [[5, 6, 7]] * 2, both)
                    assert (ids(stopped), stopped.outputs[0].finish_reason) == (([token], "stop") if token in ends else ([token] * 4, "length")), (token, force)
                    assert (ids(ignoring), ignoring.outputs[0].finish_reason) == ([token] * 4, "length")
            at_least, = generate(llm, [[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4, min_tokens=3, logit_bias={token: 100.0}))
            assert (token in ids(at_least)[:3]) == (token not in ends)
        own, = generate(llm, [[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4, logit_bias={80: 100.0}, stop_token_ids=[80]))
        assert (ids(own), own.outputs[0].stop_reason) == ([80], 80)
        check_live(llm)


def test_L3_an_end_token_that_no_logit_stands_for(tmp_path):
    "A list longer than the vocabulary: it neither ends nor masks anything, and breaks nothing."
    with LLM(with_files(tmp_path, {"eos_token_id": [2, 600]}, {})) as llm:
        out, = generate(llm, [[5, 6, 7]], SamplingParams(temperature=0, max_tokens=5, min_tokens=3, logit_bias={2: 100.0}))
        assert len(ids(out)) == 4 and 2 not in ids(out)[:3] and ids(out)[3] == 2 and out.outputs[0].finish_reason == "stop"
        check_live(llm)


def test_L3_no_end_token_anywhere(tmp_path):
    "It loads, and every answer ends by its length."
    path = with_files(tmp_path, None, dict(eos_token_id=None, pad_token_id=None))
    tok = PreTrainedTokenizerFast(tokenizer_file=f"{path}/tokenizer.json")
    tok.save_pretrained(path)
    with LLM(path) as llm:
        assert llm.get_tokenizer().eos_token_id is None
        for token in (0, 2, 50):
            out, = generate(llm, [[5, 6, 7]], SamplingParams(temperature=0, max_tokens=5, logit_bias={token: 100.0}))
            assert (ids(out), out.outputs[0].finish_reason) == ([token] * 5, "length")
        check_live(llm)


def test_L3_defaults_of_the_file_apply_where_no_parameters_are_given(tmp_path):
    """repetition_penalty and others act in generate() and chat() without parameters; whoever gives parameters gets those; 'vllm' is neutral, and
    the EOS list stays."""
    generation = dict(eos_token_id=[2, 50], repetition_penalty=5.0, temperature=0.0, max_new_tokens=9)
    path = with_files(tmp_path, generation, {})
    prompt = [7, 8, 7, 300]
    with LLM(path) as llm:
        default = llm.get_default_sampling_params()
        assert (default.repetition_penalty, default.temperature, default.max_tokens) == (5.0, 0.0, 9)
        out, = llm.generate([prompt], use_tqdm=False)
        assert len(ids(out)) <= 9
        check_greedy_reference(path, prompt, SamplingParams(repetition_penalty=5.0), out)
        plain, = generate(llm, [prompt], greedy(9))
        check_greedy_reference(path, prompt, SamplingParams(), plain)
        assert ids(plain)[:len(ids(out))] != ids(out)
        talk = [{"role": "user", "content": "Hello"}]
        said, = llm.chat(talk, use_tqdm=False)
        check_greedy_reference(path, said.prompt_token_ids, SamplingParams(repetition_penalty=5.0), said)
    with LLM(path, generation_config="vllm") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
        out, = generate(llm, [prompt], SamplingParams(temperature=0, max_tokens=4, logit_bias={50: 100.0}))
        assert ids(out) == [50] and out.outputs[0].finish_reason == "stop"
