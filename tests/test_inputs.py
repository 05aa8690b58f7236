"""What the user says to one request, on its way to the core: forms of prompts, text to ids, bad words, limits. Cases K1, K4, L3, L4, M5, H6 (front part)."""
import json
import os
import random
import threading
import time
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from litevllm.checks import as_bool, as_float, as_ids, as_int, as_list, as_text, as_texts
from litevllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from litevllm.engine.input_processor import InputProcessor, PromptLimits, Tokenization, get_tokenizer
from litevllm.inputs import ParsedPrompt, parse_prompt, plain_ids
from litevllm.messages import EngineCoreReadyResponse, EngineCoreRequest
from litevllm.sampling_params import SamplingParams

SEED = int(os.environ.get("LITEVLLM_TEST_SEED") or time.time_ns() % 10**6)
TEXT = ["a cat can catch a cab and a cape", "the cat came. The cat can concatenate, then the cat sat\nand ate a cake", "cats, cabs: caps! concat",
        "do you remember December? embers remember", "Straße, café, naïve; 12 345 6789", "one two three\n\tone\n two  three"]


def train(tok, vocab, special=(), **kw):
    tok.train_from_iterator(TEXT * 3, trainers.BpeTrainer(vocab_size=vocab, special_tokens=["<unk>", "<s>", "</s>", *special], show_progress=False, **kw))
    return tok


def byte_level(merges=60):
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return train(tok, 259 + merges, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def prefixed_bytes():
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()
    return train(tok, 320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def metaspace(scheme="always"):
    tok = Tokenizer(models.BPE(unk_token="<unk>"))
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.Metaspace(prepend_scheme=scheme), decoders.Metaspace(prepend_scheme=scheme)
    return train(tok, 120)


def llama2():
    "A space piece put in by the normaliser, words not split at all, bytes for what has no piece: the tokenizer.json of Llama 2."
    tok = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tok.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tok = train(tok, 400, special=[f"<0x{b:02X}>" for b in range(256)])
    saved = json.loads(tok.to_str())
    saved["added_tokens"] = saved["added_tokens"][:3]   # the byte tokens are ordinary ones
    tok = Tokenizer.from_str(json.dumps(saved))
    tok.pre_tokenizer = None
    tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tok.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return tok


TOKENIZERS = {"byte_level": byte_level(), "prefixed_bytes": prefixed_bytes(), "metaspace": metaspace(), "metaspace_first": metaspace("first"),
              "metaspace_never": metaspace("never"), "llama2": llama2()}


def fast(tok, template=None, **kw):
    "transformers' tokenizer, with BOS and EOS put in by `template`."
    tok = Tokenizer.from_str(tok.to_str())
    if template: tok.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<s>", 1), ("</s>", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=tok, **dict(unk_token="<unk>", bos_token="<s>", eos_token="</s>", truncation_side="left") | kw)


def processor(tok=None, vocab=None, max_model_len=64, blocks=100, block_size=4, budget=64, chunked=True, max_logprobs=20, eos=None, policy="fcfs"):
    vocab = vocab or (len(tok) if tok else 16)
    model = ModelConfig("m", "m", "m", "float32", max_model_len, 0, vocab, True, "X", tok is None, max_logprobs=max_logprobs)
    scheduler = SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=4, max_model_len=max_model_len, enable_chunked_prefill=chunked, policy=policy)
    with pytest.MonkeyPatch.context() as m:
        m.setattr("litevllm.config.read_generation_config", lambda path: {} if eos is None else {"eos_token_id": eos})
        return InputProcessor(VllmConfig(model, CacheConfig(block_size=block_size), scheduler), tok,
                              EngineCoreReadyResponse(max_model_len, blocks, "float32", True))


# ---- checks

@pytest.mark.parametrize("function, taken", [(as_int, [0, -1, 2**80, np.int8(3), np.uint64(2**63)]), (as_float, [0.5, 3, np.float32(2), np.int64(1)]),
    (as_bool, [True, False, np.True_]), (as_text, ["", "é", np.str_("a")]), (as_ids, [[], (1,), range(2), np.array([1, 2]), [np.int64(1)]]),
    (as_texts, [["a"], (), ("é",)])])
def test_checks_make_plain_values_and_nothing_else(function, taken):
    plain = {as_int: int, as_float: float, as_bool: bool, as_text: str, as_ids: list, as_texts: list}[function]
    for v in taken:
        got = function("field", v)
        assert type(got) is plain and (list(got) == list(v) if plain is list else got == v)
        if plain is list: assert set(map(type, got)) <= {int, str}
    everything = [None, True, 1, 1.5, "a", b"a", [1], ["a"], {1}, {1: 1}, np.array([1, 2]), np.array([0.5]), np.float64(0.5), np.bool_(0), object(), 1j, int]
    good = {as_int: [1], as_float: [1, 1.5, np.float64(0.5)], as_bool: [True, np.bool_(0)], as_text: ["a"], as_ids: [[1], np.array([1, 2])], as_texts: [["a"]]}[function]
    for v in everything:
        if any(v is g or type(v) is type(g) and repr(v) == repr(g) for g in good): assert type(function("field", v)) is plain
        else:
            with pytest.raises(TypeError, match="field"): function("field", v)


def test_a_bool_in_a_tensor_is_a_bool():
    import torch
    with pytest.raises(TypeError, match="field must be an integer"): as_int("field", torch.tensor(True))
    assert as_int("field", torch.tensor(3)) == 3


def test_a_list_is_copied():
    mine = [1, 2]
    for f in (as_ids, lambda n, v: as_list(n, v, "x")): assert f("a", mine) == mine and f("a", mine) is not mine


# ---- forms of prompts

@pytest.mark.parametrize("prompt", [None, 7, 1.5, b"a", bytearray(b"a"), {5, 6}, frozenset({5}), np.array([5, 6]), iter([5]), (i for i in [5]), object()])
def test_what_is_no_prompt(prompt):
    with pytest.raises(TypeError, match="a prompt is text, a list of token ids or a dict"): parse_prompt(prompt)


@pytest.mark.parametrize("ids", [{5, 6}, {5: 6}, frozenset({5}), "56", b"56", 5, None, [5, None], [5, "6"], [5.0], [True, 5], [[5]], np.array([5.0]),
                                 np.array(5), np.array([[5, 6]]), iter([5, 6])])
def test_what_are_no_ids(ids):
    with pytest.raises(TypeError, match="prompt_token_ids"): plain_ids(ids)
    if ids is None: return   # a dict without ids
    with pytest.raises(TypeError, match="prompt_token_ids"): processor().process_inputs("r", {"prompt_token_ids": ids}, SamplingParams())


def test_what_are_ids():
    import torch
    for ids in ([5, 6], (5, 6), range(5, 7), np.array([5, 6]), np.array([5, 6], dtype=np.uint8), torch.tensor([5, 6]), [np.int64(5), torch.tensor(6)]):
        assert plain_ids(ids) == [5, 6] and set(map(type, plain_ids(ids))) == {int}
        request = processor().process_inputs("r", {"prompt_token_ids": ids}, SamplingParams())
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=EngineCoreRequest).prompt_token_ids == [5, 6]


@pytest.mark.parametrize("prompt, error, words", [({}, ValueError, "neither"), ({"prompt": None}, ValueError, "neither"), ({"prompt": 5}, TypeError, "prompt.*5"),
    ({"prompt": "a", "encoder_prompt": "b", "multi_modal_data": {}}, ValueError, "encoder_prompt, multi_modal_data"), ({"text": "a"}, ValueError, "text"),
    ({"prompt": "a", "cache_salt": ""}, ValueError, "cache_salt"), ({"prompt": "a", "cache_salt": 5}, TypeError, "cache_salt"),
    ({"prompt": "a", "cache_salt": "\ud800"}, ValueError, "cache_salt"), ({1: "a"}, ValueError, "1"), ({"prompt_token_ids": [5], "prompt": ["a"]}, TypeError, "prompt")])
def test_dicts_refused(prompt, error, words):
    with pytest.raises(error, match=words): parse_prompt(prompt)


def test_dicts_taken():
    assert parse_prompt({"prompt_token_ids": [5], "prompt": "five", "cache_salt": "s"}) == ParsedPrompt("five", [5], "s")
    parsed = ParsedPrompt("a")
    assert parse_prompt(parsed) is parsed


# ---- text to ids: L4's rule, and truncation

SAYINGS = ["", "a", "a cat", "the cat came. The cat can concatenate", "Straße\n\n café 12 345", "<s>a cat", "  two  spaces "]
TEMPLATES = {"none": None, "bos": "<s> $A", "both": "<s> $A </s>", "two": "<s> <s> $A"}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", ["byte_level", "metaspace", "llama2"])
def test_text_to_ids(name, template):
    "L4: always with the tokenizer's special tokens, once more where the text has them already; cut as transformers cuts, at every length."
    tok, ours = (fast(TOKENIZERS[name], TEMPLATES[template]) for _ in range(2))
    p = processor(ours)
    ids = lambda text, **kw: p._token_ids(parse_prompt(text), Tokenization.of(kw, p.limits.longest_prompt(), p.limits.max_model_len))
    before = ours.backend_tokenizer.to_str()
    for text in SAYINGS:
        whole, bare = tok(text)["input_ids"], tok(text, add_special_tokens=False)["input_ids"]
        assert ids(text) == whole and ids(text, add_special_tokens=False) == bare
        assert template == "none" or ids(text)[0] == 1
        for n in range(len(whole) - len(bare) + 1, len(whole) + 2):
            for side in ("left", "right"):
                tok.truncation_side = ours.truncation_side = side
                assert ids(text, truncate_prompt_tokens=n) == tok(text, truncation=True, max_length=n)["input_ids"], (text, n, side)
            tok.truncation_side = ours.truncation_side = "left"
            for given, asked in ((whole, {}), (bare, dict(add_special_tokens=False))):   # a side: the whole list is cut, BOS with it
                assert ids(text, truncate_prompt_tokens=n, truncation_side="left", **asked) == given[-n:]
                assert ids(text, truncate_prompt_tokens=n, truncation_side="right", **asked) == given[:n]
            assert ids(whole, truncate_prompt_tokens=n) == whole[-n:] and ids(whole, truncate_prompt_tokens=n, truncation_side="right") == whole[:n]
        for n in range(1, len(whole) - len(bare) + 1): assert len(ids(text, truncate_prompt_tokens=n)) == min(n, len(whole))
    assert ours.backend_tokenizer.to_str() == before   # a setting of the tokenizer would be everybody's


def test_as_much_as_fits():
    tok = fast(TOKENIZERS["byte_level"], "<s> $A")
    text = "the cat can concatenate " * 20
    whole = tok(text)["input_ids"]
    for kw, fits in ((dict(), 63), (dict(max_model_len=10), 9), (dict(blocks=6), 20), (dict(blocks=6, block_size=3), 15), (dict(budget=8, chunked=False), 8),
                     (dict(budget=8), 63), (dict(max_model_len=2), 1)):
        p = processor(tok, **kw)
        cut = lambda prompt, n=-1, **params: p.process_inputs("r", prompt, SamplingParams(**params), tokenization_kwargs={"truncate_prompt_tokens": n})
        assert cut(text).prompt_token_ids == (whole[:1] + whole[-(fits - 1):] if fits > 1 else whole[-1:])
        assert cut(whole).prompt_token_ids == whole[-fits:] and cut(whole[:fits]).prompt_token_ids == whole[:fits]
        with pytest.raises(ValueError): p.process_inputs("r", whole[:fits + 1], SamplingParams())
        if fits > 9:
            assert len(cut(whole, max_tokens=None, min_tokens=60).prompt_token_ids) == min(fits, 4)   # room for what must come
    p = processor(tok)
    assert processor(None).process_inputs("r", [1, 2, 3], SamplingParams(), tokenization_kwargs={"truncate_prompt_tokens": 2}).prompt_token_ids == [2, 3]
    with pytest.raises(ValueError, match="from 1 to .*got 0"): p.process_inputs("r", text, SamplingParams(), tokenization_kwargs={"truncate_prompt_tokens": 0})
    assert p.process_inputs("r", [5] * 70, SamplingParams(), tokenization_kwargs={"truncate_prompt_tokens": 63}).prompt_token_ids == [5] * 63


@pytest.mark.parametrize("kw, error, words", [
    ({"truncate_prompt_tokens": 65}, ValueError, "64.*got 65"), ({"truncate_prompt_tokens": -2}, ValueError, "got -2"), ({"truncate_prompt_tokens": "5"}, TypeError, "'5'"),
    ({"truncate_prompt_tokens": 5.0}, TypeError, "5.0"), ({"truncate_prompt_tokens": True}, TypeError, "True"), ({"truncation_side": "middle"}, ValueError, "middle"),
    ({"truncation_side": 1}, ValueError, "truncation_side"), ({"add_special_tokens": 0}, TypeError, "add_special_tokens"), ({"max_length": 5}, ValueError, "max_length"),
    ({"truncation": True, "padding": True}, ValueError, "padding, truncation"), ([5], TypeError, "tokenization_kwargs"), ("x", TypeError, "tokenization_kwargs"),
    ({5: 5}, ValueError, "5")])
def test_tokenization_kwargs_refused_by_name(kw, error, words):
    for prompt in ("a cat", [5, 6]):
        with pytest.raises(error, match=words): processor(fast(TOKENIZERS["byte_level"])).process_inputs("r", prompt, SamplingParams(), tokenization_kwargs=kw)
    taken = processor(fast(TOKENIZERS["byte_level"])).process_inputs("r", [5, 6], SamplingParams(), tokenization_kwargs={})
    assert taken.prompt_token_ids == [5, 6]


def test_the_tokenizer_of_a_model_cuts_on_the_left(tiny_llama):
    tok = get_tokenizer(SimpleNamespace(tokenizer=tiny_llama, skip_tokenizer_init=False))
    assert tok.truncation_side == "left"
    assert Tokenization(2).encode("Once upon a time", tok) == tok("Once upon a time")["input_ids"][-2:]


def test_threads_share_a_tokenizer():
    "H6: 8 threads, each with bad words and a truncation of its own, get what one alone gets."
    tok = fast(TOKENIZERS["byte_level"], "<s> $A")
    p, text = processor(tok), "the cat can concatenate, then the cat sat and ate a cake " * 3

    def ask(n):
        kw = {"truncate_prompt_tokens": 5 + n % 40} | ({"truncation_side": ("left", "right")[n % 2]} if n % 3 else {})
        r = p.process_inputs("r", text, SamplingParams(bad_words=["cat", f"word{n % 7}"], max_tokens=5), tokenization_kwargs=kw)
        return r.prompt_token_ids, r.sampling_params.bad_words_token_ids

    expected, got, errors = [ask(n) for n in range(120)], {}, []
    def work(k):
        try:
            for n in range(k, 120, 8): got[n] = ask(n)
        except Exception as e: errors.append(e)
    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for t in threads: t.start()
    for t in threads: t.join(30)
    assert not errors and [got[n] for n in range(120)] == expected


# ---- M5: bad words

def spellings(tok, *words):
    p = SamplingParams(bad_words=list(words))
    p.update_from_tokenizer(tok)
    return p.bad_words_token_ids


def ends_with(ids, forms): return any(ids[-len(f):] == f for f in forms)


WORDS = ["cat", "concat", "remember", "ember", "the", "a", "ate a cake", "café", "6", "!", "unseen", "Zürich", "x y z"]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_no_place_for_a_bad_word_is_forgotten(name):
    "At the beginning, after a space, a line, a full stop, other words: the tokens that write the word there are a listed form, whole."
    tok, taken = fast(TOKENIZERS[name]), 0
    for word in WORDS:
        forms = spellings(tok, word)
        assert forms == spellings(tok, " " + word) and len(set(map(tuple, forms))) == len(forms) and [] not in forms
        for before in ("", " ", "the ", "The cat. ", "a\n", "\n", "one two three ", "cake, ", "12 ", ".", "Straße "):
            start, whole = (tok(t, add_special_tokens=False)["input_ids"] for t in (before, before + word))
            if whole[:len(start)] != start and not before.endswith(" "): continue   # a token with the end of `before` and the word in it
            taken += 1
            assert ends_with(whole, forms), (name, word, before, forms)
        # and a form is the word: nothing else is banned
        for form in forms: assert tok.decode(form).strip() == word or "<unk>" in tok.convert_ids_to_tokens(form), (name, word, form)
    assert taken > 9 * len(WORDS)


def test_a_word_of_several_tokens_that_is_one_after_a_space_and_the_other_way_round():
    "vLLM keeps the form after a space only where it is as long as the bare one; both kinds of words are in this vocabulary."
    tok = fast(byte_level(80))
    seen = {"longer bare": 0, "longer spaced": 0}
    for word in sorted({w.strip(".,:;!?") for t in TEXT for w in t.split()}):
        bare, spaced = (tok(t, add_special_tokens=False)["input_ids"] for t in (word, " " + word))
        forms = spellings(tok, word)
        assert bare in forms and spaced in forms, (word, forms)
        seen["longer bare"] += len(bare) > len(spaced) == 1
        seen["longer spaced"] += len(spaced) > len(bare)
    assert all(seen.values()), seen


def test_metaspace_words_inside_of_a_word():
    "The tokenizer marks the beginning of every text; how the word is written with no mark shows only behind something."
    tok = fast(TOKENIZERS["metaspace"])
    pieces = [tok.convert_ids_to_tokens(f) for f in spellings(tok, "cat")]
    assert ["▁cat"] in pieces and any("".join(p) == "cat" for p in pieces), pieces
    inside = tok("concat", add_special_tokens=False)["input_ids"]
    assert "".join(tok.convert_ids_to_tokens(inside)) == "▁concat"


def test_odd_bad_words():
    tok = fast(TOKENIZERS["byte_level"])
    assert spellings(tok) is None and SamplingParams().bad_words_token_ids is None
    assert spellings(tok, "cat", "cat", " cat") == spellings(tok, "cat")
    assert all(tok.decode(f).strip() == "" for f in spellings(tok, "  ")) and spellings(tok, "\n")
    p = SamplingParams(bad_words=["cat"])
    for _ in range(2): p.update_from_tokenizer(tok)
    assert p.bad_words_token_ids == spellings(tok, "cat")
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(p), type=SamplingParams)
    assert back.bad_words_token_ids == p.bad_words_token_ids and back == p and p.clone() == p
    swallows = Tokenizer.from_str(TOKENIZERS["byte_level"].to_str())
    swallows.normalizer = normalizers.Replace("#", "")
    with pytest.raises(ValueError, match="bad_words.*'#'"): spellings(fast(swallows), "cat", "#")


def test_bad_words_on_the_way_to_the_core():
    tok = fast(TOKENIZERS["byte_level"], "<s> $A")
    params = SamplingParams(bad_words=["cat", "a cake"])
    sent = processor(tok).process_inputs("r", "the", params).sampling_params
    assert sent.bad_words_token_ids == spellings(tok, "cat", "a cake") and params.bad_words_token_ids is None
    assert not any(1 in form for form in sent.bad_words_token_ids)   # no BOS
    top = max(t for f in sent.bad_words_token_ids for t in f)
    with pytest.raises(ValueError, match=f"bad_words holds {top}, outside of the vocabulary of {top}"): processor(tok, vocab=top).process_inputs("r", [1], params)
    assert processor(tok, vocab=top + 1).process_inputs("r", [1], params)


# ---- numbers that need the model

@pytest.mark.parametrize("limit", [-1, 0, 1, 5, 16, 20])
@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_max_logprobs(limit, name):
    "16 tokens in the vocabulary: -1 asks for all of them, and is held to the same limit; -1 as the limit is none."
    p = processor(max_logprobs=limit)
    most = 16 if limit == -1 else limit
    for asked in (None, 0, 1, 4, 5, 6, 15, 16, 17, 20, 21, -1):
        n = 16 if asked == -1 else asked or 0
        if n <= most: assert getattr(p.process_inputs("r", [1], SamplingParams(**{name: asked})).sampling_params, name) == asked
        else:
            with pytest.raises(ValueError, match=f"{name}={asked}.* asks for {n} tokens.* is {most}"): p.process_inputs("r", [1], SamplingParams(**{name: asked}))


@pytest.mark.parametrize("name", ["stop_token_ids", "logit_bias", "allowed_token_ids", "logprob_token_ids"])
def test_ids_outside_of_the_vocabulary(name):
    p = processor()
    value = lambda ids: {t: 1.0 for t in ids} if name == "logit_bias" else ids
    for ids in ([0], [15], [0, 7, 15]): assert p.process_inputs("r", [1], SamplingParams(**{name: value(ids)}))
    for ids, bad in (([16], 16), ([-1], -1), ([3, 2**40], 2**40), ([-2**70, 3], -2**70), ([3, 16, -5], 16)):
        with pytest.raises(ValueError, match=f"{name} holds {bad}, outside of the vocabulary of 16 tokens"):
            p.process_inputs("r", [1], SamplingParams(**{name: value(ids)}))


def test_top_k_of_all_tokens_and_more_is_off():
    p = processor()
    for asked, sent in ((0, 0), (-1, -1), (1, 1), (15, 15), (16, 0), (17, 0), (10**7, 0), (2**63, 0), (2**100, 0)):
        params = SamplingParams(top_k=asked)
        assert p.process_inputs("r", [1], params).sampling_params.top_k == sent and params.top_k == asked


def test_a_prompt_fits_or_the_numbers_say_why():
    "K1 and semantics 2, 9, 43, at every border: what is let through can run, what is refused can't."
    params = SamplingParams(max_tokens=1)
    for blocks in range(2, 7):
        for size in (1, 3, 4):
            for budget in (5, 8):
                for chunked in (True, False):
                    p = processor(max_model_len=14, blocks=blocks, block_size=size, budget=budget, chunked=chunked)
                    for n in range(16):
                        fits = 0 < n < 14 and -(-n // size) <= blocks - 1 and (chunked or n <= budget)
                        if fits: assert p.process_inputs("r", [1] * n, params).prompt_token_ids == [1] * n
                        else:
                            with pytest.raises(ValueError, match=f"{n} tokens|needs {-(-n // size)} KV blocks of {size} tokens, the pool has {blocks - 1}"):
                                p.process_inputs("r", [1] * n, params)
                    longest = p.limits.longest_prompt()
                    assert p.limits.check([1] * longest) is None
                    with pytest.raises(ValueError): p.limits.check([1] * (longest + 1))


def test_max_tokens_and_min_tokens_at_every_border():
    "K4, semantics 42: None is the rest of the context, more is cut to it; min_tokens beyond it is refused with the numbers."
    p = processor(max_model_len=8, eos=[2, 7])
    for n in range(1, 8):
        room = 8 - n
        for asked in (None, 1, room, room + 1, 10**9, 2**64, 10**30):
            params = SamplingParams(max_tokens=asked)
            sent = p.process_inputs("r", [1] * n, params).sampling_params
            assert sent.max_tokens == (room if asked is None else min(asked, room)) and params.max_tokens == asked
            assert p.limits.max_model_len >= n + sent.max_tokens
        for least in range(room + 3):
            params = SamplingParams(max_tokens=None, min_tokens=least)
            if least <= room: assert p.process_inputs("r", [1] * n, params).sampling_params.min_tokens == least
            else:
                with pytest.raises(ValueError, match=f"min_tokens={least}, but {n} prompt tokens leave room for {room}"): p.process_inputs("r", [1] * n, params)
    for bad in (0, -1, -10**9):
        with pytest.raises(ValueError, match=f"max_tokens must be at least 1, got {bad}"): SamplingParams(max_tokens=bad)


def test_priority_and_ids_of_requests():
    p = processor()
    assert p.process_inputs("r", [1], SamplingParams(), priority=np.int64(-3)).priority == -3
    for bad in (1.5, "1", None, True):
        with pytest.raises(TypeError, match="priority"): p.process_inputs("r", [1], SamplingParams(), priority=bad)
    for far in (2**63, -2**63 - 1):
        with pytest.raises(ValueError, match=f"priority={far} does not fit in 64 bits"): p.process_inputs("r", [1], SamplingParams(), priority=far)
    for bad in (None, 5, b"r"):
        with pytest.raises(TypeError, match="request_id"): p.process_inputs(bad, [1], SamplingParams())


def test_what_was_assigned_later_is_checked_and_normalised_too():
    p, params = processor(fast(TOKENIZERS["byte_level"], "<s> $A")), SamplingParams()
    params.stop, params.bad_words = "cat", ["dog"]
    sent = p.process_inputs("r", "a", params).sampling_params
    assert sent.stop == ["cat"] and sent.output_text_buffer_length == 2 and params.stop == "cat"
    params.top_p = 3.0
    with pytest.raises((TypeError, ValueError), match="top_p must be in"): p.process_inputs("r", "a", params)


def test_n_is_passed_on():
    sent = processor().process_inputs("r", [1], SamplingParams(n=3, seed=5)).sampling_params
    assert (sent.n, sent.seed) == (3, 5)


def test_whatever_is_let_through_the_core_can_read():
    "Random parameters, a third of them odd: refused by name here, or the same on the other side of the wire."
    print("seed", SEED)
    rng, p = random.Random(SEED), processor(fast(TOKENIZERS["byte_level"], "<s> $A"), max_logprobs=-1)
    odd = [None, True, -1, 0, 1, 2, 0.5, 3.7, 10**9, 2**64, 10**40, "a", "", "\ud800", b"a", [1], ["a"], [], {}, {1: 1.0}, {"a": 1}, {3}, np.int64(2), np.float32(0.3),
           np.array([1, 2]), float("nan"), float("inf"), -0.0, (1, 2), [2**70], [-1], {1: float("inf")}, range(3), object()]
    names = [n for n in SamplingParams.__struct_fields__ if not n.startswith("_") and n != "output_text_buffer_length"]
    sent = 0
    for _ in range(6000):
        kw = {n: rng.choice(odd) for n in rng.sample(names, rng.choice([1, 1, 1, 2, 3]))}
        try: request = p.process_inputs("r", rng.choice(["a cat", [5, 6]]), SamplingParams(**kw))
        except (TypeError, ValueError) as e:
            assert any(n in str(e) for n in kw), (SEED, kw, e)
            continue
        sent += 1
        back = msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=EngineCoreRequest)
        assert back == request, (SEED, kw)
    assert 200 < sent < 3000, sent


def test_a_priority_goes_with_the_request_and_one_that_does_not_act_is_warned_of(caplog):
    for policy, warnings in (("priority", []), ("fcfs", ["priority=-2 has no effect: a priority acts on an engine with scheduling_policy='priority'"])):
        caplog.clear()
        p = processor(policy=policy)
        assert [p.process_inputs("r", [1], SamplingParams(), priority=i).priority for i in (0, -2, 7, np.int64(3))] == [0, -2, 7, 3]
        assert [r.message for r in caplog.records] == warnings
        with pytest.raises(TypeError, match="priority must be an integer"): p.process_inputs("r", [1], SamplingParams(), priority=None)
