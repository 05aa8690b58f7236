"""The front process without a model: detokenizer, stop strings, output states, refusals. Cases D1, D3, D4, K4, K5, I2, L3, L4."""
import itertools, json, os, random, subprocess, sys, time

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from litevllm.config import CacheConfig, EngineArgs, ModelConfig, SchedulerConfig, VllmConfig
from litevllm.engine.detokenizer import DecodeWindow, IncrementalDetokenizer, check_stop_strings
from litevllm.engine.input_processor import InputProcessor
from litevllm.engine.llm_engine import LLMEngine
from litevllm.engine.output_processor import OutputProcessor
from litevllm.messages import EngineCoreOutput, EngineCoreReadyResponse, EngineCoreRequest, FinishReason
from litevllm.sampling_params import RequestOutputKind, SamplingParams

SEED = int(os.environ.get("LITEVLLM_TEST_SEED") or time.time_ns() % 10**6)
KINDS = list(RequestOutputKind)

STRINGS = """Hello, world!|  two spaces  in   a row |tabs\tand\nnewlines\r\n|naïve café, Straße, Ærøskøbing|Zażółć gęślą jaźń
Příliš žluťoučký kůň|Ξεσκεπάζω την ψυχοφθόρα βδελυγμία|Съешь же ещё этих мягких булок|Є її ґанок|ქართული ენა
Հայերեն լեզու|שלום עולם|مرحبا بالعالم|فارسی زبان است|हिन्दी में नमस्ते|বাংলা ভাষা|தமிழ் மொழி|తెలుగు భాష|ಕನ್ನಡ ಭಾಷೆ|മലയാളം
ไทยภาษาไม่มีช่องว่าง|ລາວ|ဗမာစာ|ភាសាខ្មែរ|བོད་སྐད་|አማርኛ|日本語の文字|カタカナとひらがな|中文没有空格|繁體中文測試|한국어 문장입니다|𠜎𠜱𠝹
😀|👩‍👩‍👧‍👦 family|🇩🇪🇯🇵 flags|👍🏽 skin|e\u0301 combining|Z̸͑a̷͝l̶̾g̴̈o|ﷺ|½ ¾ ∑ ∫ √ ∞|→ ⇒ ↔|♔♕♖|🜁🜂|𝕄𝕒𝕥𝕙|𝄞 music|\u200bzero\u200cwidth
def f(x):\n    return x**2  # code|<|im_start|> as text
"quotes" and 'apostrophes' don't|MiXeD 123 4567 89.0|mixed 中 and é and 😀 end 😀""".replace("\n", "|").split("|")
STRINGS = [s.replace("\\n", "\n").replace("\\t", "\t") for s in STRINGS]


def train(tok, strings, vocab_size, special, **kw):
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False, **kw)
    tok.train_from_iterator(strings * 3, trainer)
    return tok


def byte_level(vocab_size=512):
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return train(tok, STRINGS, vocab_size, ["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def metaspace():
    tok = Tokenizer(models.BPE(unk_token="<unk>"))
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return train(tok, STRINGS, 700, ["<unk>", "<s>", "</s>"])


def byte_fallback():
    "Llama's kind: a space piece, and single-byte tokens for what has no piece of its own."
    tok = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tok.pre_tokenizer = pre_tokenizers.Metaspace()
    tok.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    special = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    train(tok, [s for s in STRINGS if s.isascii()], 400, special)
    saved = json.loads(tok.to_str())
    saved["added_tokens"] = saved["added_tokens"][:3]   # the byte tokens are ordinary ones
    return Tokenizer.from_str(json.dumps(saved))


TOKENIZERS = {"byte_level": byte_level(), "metaspace": metaspace(), "byte_fallback": byte_fallback()}


def pieces(*vocab, special=()):
    "A tokenizer whose text is its pieces joined: for scripted outputs."
    tok = Tokenizer(models.WordLevel({p: i for i, p in enumerate(vocab)}, unk_token=vocab[0]))
    tok.decoder = decoders.Fuse()
    tok.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(tokenizer_object=tok)


def fast(tok, **kw): return PreTrainedTokenizerFast(tokenizer_object=tok, **kw)


def request(prompt_ids=(0,), rid="r-00000000", **params):
    return EngineCoreRequest(rid, list(prompt_ids), SamplingParams(**params), 0.0, external_req_id=rid.split("-")[0])


def deltas(tok, prompt_ids, ids, group=1, **params):
    "The text of each step."
    detok = IncrementalDetokenizer.from_new_request(tok, request(prompt_ids, max_tokens=None, **params))
    steps = [ids[i:i + group] for i in range(0, len(ids), group)]
    out = []
    for i, step in enumerate(steps):
        last = i == len(steps) - 1
        detok.update(step, False, last)
        out.append(detok.get_next_output_text(last, True))
    assert detok.output_token_ids == list(ids) and "".join(out) == detok.output_text
    return out


def continuation(tok, prompt_ids, ids, skip):
    "What the output adds to the prompt's text: all of it after the common part."
    before = tok.decode(prompt_ids, skip_special_tokens=skip)
    both = tok.decode(prompt_ids + ids, skip_special_tokens=skip)
    return both[len(os.path.commonprefix([before, both])):]


# ---------------------------------------------------------------- D1, D3: text from ids

def test_strings_there_are_fifty(): assert len(STRINGS) >= 50 and len(set(STRINGS)) == len(STRINGS)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_deltas_are_the_full_text(name):
    "D1: every script, the prompt cut off at every place; no broken character is shown, nothing lost, nothing twice."
    tok = TOKENIZERS[name]
    hf = fast(tok)
    for s in STRINGS:
        ids = tok.encode(s, add_special_tokens=False).ids
        assert name == "metaspace" or tok.decode(ids).lstrip() == s.lstrip()
        for cut in range(len(ids)):
            prompt, out = ids[:cut], ids[cut:]
            got = deltas(hf, prompt, out)
            assert "".join(got) == continuation(tok, prompt, out, True), (name, s, cut)
            assert "".join(deltas(hf, prompt, out, group=3)) == "".join(got), (name, s, cut)
            if "\ufffd" not in tok.decode(out): assert not any("\ufffd" in d for d in got), (name, s, cut, got)
            assert not any(0xD800 <= ord(c) < 0xE000 for d in got for c in d)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_random_ids(name):
    "D3: 12,000 random sequences in all, special, unknown, broken ids. Nothing raises; where decoding is monotone, nothing differs."
    print("seed", SEED)
    rng, tok = random.Random(SEED), TOKENIZERS[name]
    hf, vocab = fast(tok), tok.get_vocab_size()
    exact = 0
    for n in range(4000):
        low, top = rng.choice([(0, vocab + 5), (0, 260), (259, vocab)])   # all; mostly single bytes; mostly pieces
        ids = [rng.randrange(low, top) for _ in range(rng.randint(1, 64))]
        cut, skip = rng.randint(0, min(6, len(ids) - 1)), rng.random() < 0.5
        prompt, out = ids[:cut], ids[cut:]
        got = "".join(deltas(hf, prompt, out, group=rng.randint(1, 4), skip_special_tokens=skip))
        want = continuation(tok, prompt, out, skip)
        # byte fallback takes back what it has said: one more byte turns the characters before it into U+FFFD
        takes_back = name == "byte_fallback" and "\ufffd" in tok.decode(ids, skip_special_tokens=skip)
        if not takes_back:
            exact += 1
            assert got == want, (SEED, n, name, prompt, out, skip)
    assert exact > 1000   # the rest is for "nothing raises"


def test_ids_that_no_tokenizer_takes():
    tok = fast(TOKENIZERS["byte_level"])
    a, b = TOKENIZERS["byte_level"].encode("ab").ids[0], TOKENIZERS["byte_level"].encode("b").ids[0]
    assert "".join(deltas(tok, [a], [a, -1, 10**6, 2**31, 2**32, 2**70, b])) == TOKENIZERS["byte_level"].decode([a, b])


def test_bad_bytes_cost_no_more_than_good_ones():
    "A model that only writes broken characters must not decode its whole output at every token."
    tok = TOKENIZERS["byte_level"]
    lone = tok.token_to_id("\u013d") or tok.encode("é").ids[-1]
    cases = {"lone bytes": [lone] * 4000, "special tokens": [0] * 4000, "unknown ids": [10**6] * 4000,
             "first bytes": [tok.token_to_id("ð")] * 4000, "split across": [tok.token_to_id("ð"), lone, lone] * 1300}
    for name, ids in cases.items():
        work = 0
        def decode(some):
            nonlocal work
            work += len(some)
            return tok.decode(some, skip_special_tokens=True)
        window = DecodeWindow(decode, [5])
        text = "".join(map(window.step, ids)) + window.flush()
        assert text == tok.decode([5] + ids)[len(tok.decode([5])):], name
        assert work < 40 * len(ids), (name, work / len(ids))


def test_special_tokens_and_long_prompts():
    tok = TOKENIZERS["metaspace"]
    hf, (hello, world) = fast(tok), (tok.encode(w).ids for w in ("naïve", "café"))
    eos = tok.token_to_id("</s>")
    for n in (0, 1, 7, 8, 9, 40):   # the space before "café" survives any number of skipped tokens between
        assert "".join(deltas(hf, hello + [eos] * n, world)) == " café"
        assert "".join(deltas(hf, hello, [eos] * n + world)) == " café"
    assert "".join(deltas(hf, [], world)) == "café"
    assert "</s>" in "".join(deltas(hf, hello, [eos] + world, skip_special_tokens=False))
    long = hello * 5000
    start = time.perf_counter()
    for _ in range(20): deltas(hf, long, world)
    assert time.perf_counter() - start < 1.0   # only the prompt's end is decoded


def test_spaces_between_special_tokens():
    "Off, with special tokens shown: an added token right after another has no space before it; nothing else changes."
    print("seed", SEED)
    rng = random.Random(SEED)
    words = Tokenizer(models.WordLevel({"yes": 0, "no": 1}, unk_token="no"))   # without a decoder: a space between any two
    words.add_special_tokens(["<a>", "<b>"])
    words.add_tokens(["added"])
    names, hf = ["yes", "no", "<a>", "<b>", "added"], fast(words)
    off = dict(skip_special_tokens=False, spaces_between_special_tokens=False)
    for n in range(300):
        ids = [rng.randrange(5) for _ in range(rng.randint(1, 12))]
        want = "".join((" " if i < 2 or n == 0 or ids[n - 1] < 2 else "") + names[i] for n, i in enumerate(ids))
        group = rng.randint(1, 3)
        assert "".join(deltas(hf, [0], ids, group=group, **off)) == want, (ids, group)
        plain = "".join(" " + names[i] for i in ids)
        assert "".join(deltas(hf, [0], ids, group=group, skip_special_tokens=False)) == plain
        shown = "".join(deltas(hf, [0], ids, group=group, spaces_between_special_tokens=False))   # skipped ones: no effect
        assert shown == continuation(words, [0], ids, True)
    for name, tok in TOKENIZERS.items():   # decoders that put no spaces of their own: no effect
        hf = fast(tok)
        for _ in range(200):
            ids = [rng.choice([0, 1, 2, rng.randrange(tok.get_vocab_size())]) for _ in range(rng.randint(1, 20))]
            got, want = (deltas(hf, [5], ids, skip_special_tokens=False, spaces_between_special_tokens=x) for x in (False, True))
            assert got == want, (name, ids)


def test_tokenizer_without_fast_backend():
    class Slow:
        def decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces): return "".join(map(chr, ids))
    assert "".join(deltas(Slow(), [97], [98, 99, -1, 10**9, 100])) == "bcd"


# ---------------------------------------------------------------- D4: stop strings

STOP, BEFORE, AFTER = "abacabd", "xab", "aq"


def cuts(text):
    "All ways to cut text into pieces."
    for marks in itertools.product((0, 1), repeat=len(text) - 1):
        out, start = [], 0
        for i, m in enumerate(marks, 1):
            if m: out, start = out + [text[start:i]], i
        yield out + [text[start:]]


TEXT = BEFORE + STOP + AFTER
SUBSTRINGS = sorted({TEXT[i:j] for i in range(len(TEXT)) for j in range(i + 1, len(TEXT) + 1)})
SPLIT_TOK = pieces(*SUBSTRINGS)
ID = {p: i for i, p in enumerate(SUBSTRINGS)}


def generate(tok, steps, kind=RequestOutputKind.CUMULATIVE, end=FinishReason.LENGTH, end_reason=None, rid="r-00000000", **params):
    "All RequestOutputs of one request whose core sends `steps` and then ends; and what the core was told to abort."
    proc = OutputProcessor(tok)
    proc.add_request(request([0], rid, output_kind=kind, max_tokens=None, **params), "p")
    outs, aborts = [], []
    for i, ids in enumerate(steps):
        last = i == len(steps) - 1
        res = proc.process_outputs([EngineCoreOutput(rid, list(ids), end if last else None, end_reason if last else None)])
        outs += res.request_outputs
        aborts += res.reqs_to_abort
    assert not proc.request_states and not proc.external_req_ids
    return outs, aborts


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_over_every_token_boundary(include):
    "A 7-character stop string with false starts, the text cut into tokens in all 2048 ways."
    for parts in cuts(TEXT):
        ids = [ID[p] for p in parts]
        ends = list(itertools.accumulate(map(len, parts)))
        done = next(i for i, e in enumerate(ends) if e >= len(BEFORE + STOP))   # the token that completes it
        want = BEFORE + STOP if include else BEFORE
        for kind in KINDS:
            outs, aborts = generate(SPLIT_TOK, [[i] for i in ids], kind, stop=[STOP], include_stop_str_in_output=include)
            final = outs[-1].outputs[0]
            assert (final.finish_reason, final.stop_reason) == ("stop", STOP)
            assert aborts == (["r-00000000"] if done < len(ids) - 1 else []), parts   # the core is told, unless it had ended too
            texts = [o.outputs[0].text for o in outs]
            if kind is RequestOutputKind.DELTA:
                assert "".join(texts) == want, parts
                assert [t for o in outs for t in o.outputs[0].token_ids] == ids[:done + 1]
            else:
                assert texts[-1] == want and final.token_ids == ids[:done + 1], parts
                assert all(want.startswith(t) for t in texts), parts   # nothing shown that is taken back
            assert [o.finished for o in outs] == [False] * (len(outs) - 1) + [True]
        groups = [ids[:2], ids[2:]] if len(ids) > 2 else [ids]
        group, _ = generate(SPLIT_TOK, groups, stop=[STOP], include_stop_str_in_output=include)
        assert group[-1].outputs[0].text == want


@pytest.mark.parametrize("text", ["xabacab", "abaca", "a", "abacabacab"])
def test_false_start_is_flushed(text):
    "The end comes with text still held back: it is all given out."
    for parts in cuts(text):
        tok = pieces(*sorted(set(parts)))
        ids = [[sorted(set(parts)).index(p)] for p in parts]
        for kind in KINDS:
            outs, aborts = generate(tok, ids, kind, stop=[STOP])
            joined = "".join(o.outputs[0].text for o in outs) if kind is RequestOutputKind.DELTA else outs[-1].outputs[0].text
            assert joined == text and aborts == []
            assert (outs[-1].outputs[0].finish_reason, outs[-1].outputs[0].stop_reason) == ("length", None)


@pytest.mark.parametrize("parts,stop,include,text,reason", [
    (["a", "b", "c", "d", "e"], ["cd"], False, "ab", "cd"),
    (["a", "b", "c", "d", "e"], ["cd"], True, "abcd", "cd"),
    (["abcde"], ["cd"], True, "abcd", "cd"),
    (["xx", "ab"], ["b", "ab"], False, "xxa", "b"),        # list order, not place in the text
    (["xx", "ab"], ["ab", "b"], False, "xx", "ab"),
    (["x", "a", "b"], ["ab", "a"], False, "x", "a"),       # "a" is there a token before "ab" could be
    (["stop", "x"], ["stop"], False, "", "stop"),          # the first token is it
    (["s", "x"], ["s"], True, "s", "s"),
    (["ab", "ab"], ["bab", "ba"], False, "a", "bab"),
    (["é", "😀é"], ["😀"], False, "é", "😀"),
])
def test_stop_strings(parts, stop, include, text, reason):
    vocab = sorted(set(parts))
    for kind in KINDS:
        outs, _ = generate(pieces(*vocab), [[vocab.index(p)] for p in parts], kind, stop=stop, include_stop_str_in_output=include)
        joined = "".join(o.outputs[0].text for o in outs) if kind is RequestOutputKind.DELTA else outs[-1].outputs[0].text
        assert (joined, outs[-1].outputs[0].stop_reason, outs[-1].outputs[0].finish_reason) == (text, reason, "stop")


def test_min_tokens_passes_over_stop_strings():
    tok = pieces("a", "b", "c")
    run = lambda n: generate(tok, [[0], [1], [0], [1], [2]], stop=["b"], min_tokens=n)[0][-1].outputs[0]
    assert [run(n).text for n in (0, 1, 2, 3, 4)] == ["a", "a", "aba", "aba", "ababc"]
    assert [run(n).finish_reason for n in (1, 2, 4)] == ["stop", "stop", "length"]
    grouped = lambda ids, n: generate(tok, [ids], stop=["b"], min_tokens=n)[0][-1].outputs[0].text   # several tokens in one step
    assert grouped([0, 1, 0, 2], 2) == "abac" and grouped([0, 1, 0, 1, 2], 2) == "aba"


def test_check_stop_strings():
    assert check_stop_strings("abcd", 0, ["a"], False) is None
    assert check_stop_strings("abcd", 1, ["ab"], False) is None       # old text is not searched again
    assert check_stop_strings("abcd", 1, ["cd"], False) == ("cd", 2)  # but may be the start of a hit
    assert check_stop_strings("abcd", 4, ["cd"], True) == ("cd", -1)
    assert check_stop_strings("abcde", 4, ["cd"], True) == ("cd", 4)
    print("seed", SEED)
    rng = random.Random(SEED)
    for _ in range(3000):
        text = "".join(rng.choices("ab", k=rng.randint(1, 9)))
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
        new = rng.randint(1, len(text))
        ends = {s: [i for i in range(len(text)) if text.startswith(s, i) and i + len(s) > len(text) - new] for s in stops}
        want = next(((s, ends[s][0]) for s in stops if ends[s]), None)
        assert check_stop_strings(text, new, stops, False) == want, (text, stops, new)


# ---------------------------------------------------------------- output states

TOK = pieces("a", "b", "c", "d", special=["<eos>"])
EOS = 4


def test_eos_first_gives_empty_text():
    "K5: the token is there, its text is not."
    for kind in KINDS:
        out = generate(TOK, [[EOS]], kind, end=FinishReason.STOP)[0][-1]
        c = out.outputs[0]
        assert (c.text, c.token_ids, c.finish_reason, c.stop_reason, out.finished) == ("", [EOS], "stop", None, True)


def test_stop_token_in_text_only_with_include():
    run = lambda **kw: generate(TOK, [[0], [2]], end=FinishReason.STOP, end_reason=2, stop_token_ids=[2], **kw)[0][-1].outputs[0]
    assert (run().text, run().token_ids, run().stop_reason) == ("a", [0, 2], 2)
    assert run(include_stop_str_in_output=True).text == "ac"
    # a stop string that the same token would complete is not seen without its text
    assert run(stop=["c"]).stop_reason == 2


def test_output_kinds():
    cum, delta, final = (generate(TOK, [[0], [1], [2]], k)[0] for k in KINDS)
    cum_pairs, delta_pairs, final_pairs = ([(o.outputs[0].text, o.outputs[0].token_ids) for o in x] for x in (cum, delta, final))
    assert cum_pairs == [("a", [0]), ("ab", [0, 1]), ("abc", [0, 1, 2])]
    assert delta_pairs == [("a", [0]), ("b", [1]), ("c", [2])] and final_pairs == [("abc", [0, 1, 2])]
    assert [o.outputs[0].finish_reason for o in cum] == [None, None, "length"]
    o = final[0]
    assert (o.request_id, o.prompt, o.prompt_token_ids, o.outputs[0].index, o.error) == ("r", "p", [0], 0, None)


@pytest.mark.parametrize("kind", KINDS)
def test_error_keeps_what_there_is(kind):
    proc = OutputProcessor(TOK)
    proc.add_request(request(output_kind=kind, stop=["zzzz"]), None)
    outs = proc.process_outputs([EngineCoreOutput("r-00000000", [0, 1])]).request_outputs
    res = proc.process_outputs([EngineCoreOutput("r-00000000", [], FinishReason.ERROR, error="needs 9 blocks, the pool has 5")])
    outs += res.request_outputs
    last = outs[-1]
    assert (last.finished, last.outputs[0].finish_reason, last.error) == (True, "error", "needs 9 blocks, the pool has 5")
    assert "".join(o.outputs[0].text for o in outs) == "ab" if kind is RequestOutputKind.DELTA else last.outputs[0].text == "ab"
    assert res.reqs_to_abort == [] and not proc.has_unfinished_requests()


def test_detokenize_off_and_no_tokenizer():
    for tok, kw in ((TOK, dict(detokenize=False)), (None, {})):
        out = generate(tok, [[0], [1, EOS]], end=FinishReason.STOP, **kw)[0][-1].outputs[0]
        assert (out.text, out.token_ids, out.finish_reason) == ("", [0, 1, EOS], "stop")


def test_num_cached_tokens_is_of_the_first_output():
    proc = OutputProcessor(TOK)
    proc.add_request(request(), None)
    first = proc.process_outputs([EngineCoreOutput("r-00000000", [0], num_cached_tokens=16)]).request_outputs[0]
    last = proc.process_outputs([EngineCoreOutput("r-00000000", [0], FinishReason.LENGTH)]).request_outputs[0]
    assert first.num_cached_tokens == last.num_cached_tokens == 16


def test_aborts():
    "By the caller's id or the internal one, twice, unknown, with output on its way."
    proc = OutputProcessor(TOK)
    for rid in ("a-1", "a-2", "b-1", "c-1"): proc.add_request(request(rid=rid), None)
    assert proc.abort_requests(["zzz", "a", "a"]) == ["a-1", "a-2"]
    assert proc.abort_requests(["a", "a-1"]) == []
    assert proc.abort_requests("b") == ["b-1"]                           # one id is one id, not its letters
    assert proc.abort_requests(["c"], internal=True) == []
    assert proc.abort_requests(["c-1"], internal=True) == ["c-1"]
    assert proc.abort_requests(["c", "c-1"]) == []
    late = [EngineCoreOutput(r, [0], FinishReason.LENGTH) for r in ("a-1", "a-2", "b-1", "c-1", "never")]
    res = proc.process_outputs(late)
    assert res.request_outputs == [] and res.reqs_to_abort == [] and proc.external_req_ids == {}


def test_internal_id_in_use():
    proc = OutputProcessor(TOK)
    proc.add_request(request(), None)
    with pytest.raises(ValueError, match="r-00000000"): proc.add_request(request(), None)
    assert proc.get_num_unfinished_requests() == 1


def test_one_bad_stream_does_not_touch_the_others():
    class Broken:
        "A tokenizer that can't take id 3."
        def decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces):
            if 3 in ids: raise RuntimeError("byte 0xff")
            return "".join("abc"[i] for i in ids)
    proc = OutputProcessor(Broken())
    for rid in ("x-1", "y-1"): proc.add_request(request([0], rid), None)
    proc.process_outputs([EngineCoreOutput("x-1", [3]), EngineCoreOutput("y-1", [1])])
    last = [EngineCoreOutput(rid, [t], FinishReason.LENGTH) for rid, t in (("x-1", 1), ("y-1", 2))]
    res = proc.process_outputs(last)
    assert [o.outputs[0].text for o in res.request_outputs] == ["b", "bc"]
    assert res.request_outputs[0].outputs[0].token_ids == [3, 1]


# ---------------------------------------------------------------- input: what is refused, and with which words

def processor(tmp_path, tok=TOK, generation=None, config=None, blocks=64, block_size=4, budget=64, chunked=True):
    if generation is not None: (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "config.json").write_text(json.dumps(config or {}))
    model = ModelConfig(model=str(tmp_path), served_model_name="m", tokenizer=str(tmp_path), dtype="float32", max_model_len=32,
                        seed=0, vocab_size=5, enforce_eager=True, architecture="X", skip_tokenizer_init=tok is None)
    scheduler = SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=4, max_model_len=32, enable_chunked_prefill=chunked)
    return InputProcessor(VllmConfig(model, CacheConfig(block_size=block_size), scheduler), tok,
                          EngineCoreReadyResponse(32, blocks, "float32", True))


@pytest.mark.parametrize("prompt,error,words", [
    ([], ValueError, ["empty", "0 tokens"]), ("", ValueError, ["empty"]), ({"prompt_token_ids": []}, ValueError, ["empty"]),
    ([1] * 32, ValueError, ["32", "31"]), ([1] * 40, ValueError, ["40", "32"]),
    ([0, 5], ValueError, ["5", "position 1"]), ([0, 1, -1], ValueError, ["-1", "position 2"]),
    ([0, 1.0], TypeError, ["1.0"]), ([True], TypeError, ["True"]), (["a"], TypeError, ["'a'"]),
    (None, TypeError, ["NoneType"]), (3, TypeError, ["int"]), (b"a", TypeError, ["bytes"]), ({"prompt": 3}, TypeError, ["int"]),
    ({}, ValueError, ["prompt_token_ids"]), ({"prompt": "a", "multi_modal_data": 1}, ValueError, ["multi_modal_data"]),
    ({"prompt": "a", "cache_salt": ""}, ValueError, ["cache_salt"]),
    ({"prompt": "a", "cache_salt": 3}, TypeError, ["cache_salt", "int"]),
    ("ab\ud800", ValueError, ["position 2"]),
])
def test_prompts_refused(tmp_path, prompt, error, words):
    with pytest.raises(error) as e: processor(tmp_path).process_inputs("r", prompt, SamplingParams())
    assert all(w in str(e.value) for w in words), str(e.value)


def test_prompts_taken(tmp_path):
    np = pytest.importorskip("numpy")
    p = processor(tmp_path)
    ids = lambda prompt: p.process_inputs("r", prompt, SamplingParams()).prompt_token_ids
    assert ids([1] * 31) == [1] * 31
    assert ids((1, 2)) == ids(np.array([1, 2])[0:2].tolist()) == ids({"prompt_token_ids": np.array([1, 2])}) == [1, 2]
    assert all(type(t) is int for t in ids([np.int64(1)]))
    assert ids({"prompt": "other text", "prompt_token_ids": [3]}) == [3]     # ids win, as in vLLM
    assert ids("a") == ids({"prompt": "a"}) == [0]
    r = p.process_inputs("id", {"prompt_token_ids": [1], "cache_salt": "s"}, SamplingParams(), 12.5, -3)
    assert (r.cache_salt, r.arrival_time, r.priority, r.external_req_id) == ("s", 12.5, -3, "id")
    assert len(r.request_id) == 11 and r.request_id.startswith("id-") and int(r.request_id[3:], 16) >= 0
    assert r.request_id != p.process_inputs("id", [1], SamplingParams()).request_id


def test_prompt_too_large_for_pool_or_step(tmp_path):
    "The numbers of semantics 2 and 9; the largest that fits passes."
    small = processor(tmp_path, blocks=6, block_size=4)   # five usable
    assert small.process_inputs("r", [1] * 20, SamplingParams())
    with pytest.raises(ValueError, match="needs 6 KV blocks of 4 tokens, the pool has 5"):
        small.process_inputs("r", [1] * 21, SamplingParams())
    whole = processor(tmp_path, chunked=False, budget=8)
    assert whole.process_inputs("r", [1] * 8, SamplingParams())
    with pytest.raises(ValueError, match="9 tokens.* 8 .*chunked prefill is off"):
        whole.process_inputs("r", [1] * 9, SamplingParams())
    assert processor(tmp_path, budget=8).process_inputs("r", [1] * 9, SamplingParams())


def test_max_tokens(tmp_path):
    "K4: None is the rest of the context; more than that is cut to it; the caller's object stays as it was."
    p = processor(tmp_path)
    for asked, got in ((None, 22), (10**9, 22), (10**30, 22), (22, 22), (5, 5)):
        params = SamplingParams(max_tokens=asked)
        assert p.process_inputs("r", [1] * 10, params).sampling_params.max_tokens == got and params.max_tokens == asked
    for bad in (0, -1):
        with pytest.raises(ValueError, match=str(bad)): SamplingParams(max_tokens=bad)
    with pytest.raises(ValueError, match="min_tokens=23.*10.*22.*32"):
        p.process_inputs("r", [1] * 10, SamplingParams(max_tokens=None, min_tokens=23))


def test_params_refused(tmp_path):
    p = processor(tmp_path)
    for kw, word in ((dict(extra_args={"a": 1}), "extra_args"), (dict(thinking_token_budget=3), "thinking_token_budget=3"),
                     (dict(stop_token_ids=[5]), "5"), (dict(stop_token_ids=[-1]), "-1"), (dict(logprobs=21), "21")):
        with pytest.raises(ValueError) as e: p.process_inputs("r", [1], SamplingParams(**kw))
        assert word in str(e.value)
    with pytest.raises(TypeError, match="dict"): p.process_inputs("r", [1], {"temperature": 0})
    with pytest.raises(TypeError, match="int"): p.process_inputs(3, [1], SamplingParams())
    with pytest.raises(TypeError, match="priority"): p.process_inputs("r", [1], SamplingParams(), priority=1.5)
    no_tok = processor(tmp_path, tok=None)
    assert no_tok.process_inputs("r", [1], SamplingParams()).prompt_token_ids == [1]
    for prompt, params in (("a", SamplingParams()), ([1], SamplingParams(stop="x")), ([1], SamplingParams(bad_words=["x"]))):
        with pytest.raises(ValueError, match="skip_tokenizer_init"): no_tok.process_inputs("r", prompt, params)


@pytest.mark.parametrize("generation,config,tok_eos,eos,stops,everything", [
    ({"eos_token_id": [4, 2]}, {}, "<eos>", 4, [2], {2, 4}),      # a list: the tokenizer's is EOS, the others are stop ids
    ({"eos_token_id": 2}, {}, "<eos>", 4, [2], {2, 4}),           # another than the tokenizer's: both end it
    ({"eos_token_id": [2, 3]}, {}, None, None, [2, 3], {2, 3}),
    ({}, {"eos_token_id": 1}, "<eos>", 4, [], {4}),               # the file is there: config.json is not asked
    (None, {"eos_token_id": 1}, "<eos>", 4, [1], {1, 4}),
    (None, {}, None, None, [], set()),                            # none anywhere: ends by length
    ({"eos_token_id": [4, 99]}, {}, "<eos>", 4, [], {4}),         # no logit stands for 99: never sampled, never masked
])
def test_end_tokens(tmp_path, generation, config, tok_eos, eos, stops, everything):
    "L3: the union ends the output; ignore_eos ignores all of them; what the user asked for stays."
    tok = pieces("a", "b", "c", "d", special=["<eos>"])
    tok.eos_token = tok_eos
    p = processor(tmp_path, tok, generation, config)
    got = p.process_inputs("r", [1], SamplingParams()).sampling_params
    assert (got.eos_token_id, got.stop_token_ids, got.all_stop_token_ids) == (eos, stops, everything)
    own = p.process_inputs("r", [1], SamplingParams(stop_token_ids=[0])).sampling_params
    assert set(own.stop_token_ids) == {0, *stops} and own.all_stop_token_ids == everything | {0}
    ignoring = p.process_inputs("r", [1], SamplingParams(ignore_eos=True, stop_token_ids=[0])).sampling_params
    assert (ignoring.eos_token_id, ignoring.stop_token_ids) == (None, [0])


def test_bos_rule(tmp_path):
    "L4: generate() adds the tokenizer's special tokens to text, always, as vLLM does; token ids are taken as they are."
    tok = Tokenizer(models.WordLevel({"<s>": 0, "a": 1, "b": 2}, unk_token="a"))
    tok.pre_tokenizer = pre_tokenizers.Whitespace()
    tok.add_special_tokens(["<s>"])
    tok.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    p = processor(tmp_path, fast(tok, bos_token="<s>"))
    ids = lambda prompt: p.process_inputs("r", prompt, SamplingParams()).prompt_token_ids
    assert ids("a b") == [0, 1, 2] and ids("<s>a b") == [0, 0, 1, 2] and ids([1, 2]) == [1, 2]
    assert ids("") == [0]   # BOS alone is a prompt


# ---------------------------------------------------------------- with a real core

@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    from litevllm.tiny import write_tiny_model
    patch = pytest.MonkeyPatch()
    patch.setenv("LITEVLLM_ENABLE_MULTIPROCESSING", "0")
    model = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    engine = LLMEngine.from_engine_args(EngineArgs(model, device="cpu", block_size=4, num_gpu_blocks_override=400))
    patch.undo()
    yield engine
    assert drained(engine)
    engine.close()


def drained(engine):
    "Nobody running, nobody waiting, every block back, no state left."
    for _ in range(5): engine.engine_core.get_output()   # a late step may still have to hand its blocks back
    front = engine.output_processor
    idle = engine.engine_core.get_request_counts() == (0, 0) and engine.reset_prefix_cache()
    return idle and not front.request_states | front.external_req_ids


def run(engine, *requests):
    "Results by the caller's id, each as the list of its RequestOutputs."
    for rid, prompt, params in requests: engine.add_request(rid, prompt, params)
    outs = {rid: [] for rid, *_ in requests}
    while engine.has_unfinished_requests():
        for o in engine.step(): outs[o.request_id].append(o)
    assert all(o[-1].finished and not any(x.finished for x in o[:-1]) for o in outs.values())
    return outs


@pytest.mark.timeout(120)
def test_hot_requests_all_finish(engine):
    "D3 end to end: temperature 5 writes broken bytes; all finish, and in all three kinds the text is that of the ids."
    tok = engine.tokenizer._tokenizer
    hot = dict(temperature=5.0, max_tokens=30, ignore_eos=True, stop=["never, ever"])
    make = lambda kind: [(f"{kind.name}{n}", "Once upon a time", SamplingParams(seed=n, output_kind=kind, **hot))
                         for n in range(16)]
    results = {k: run(engine, *make(k)) for k in KINDS}
    broken = 0
    for n in range(16):
        final, = results[RequestOutputKind.FINAL_ONLY][f"FINAL_ONLY{n}"]
        c = final.outputs[0]
        assert (len(c.token_ids), c.finish_reason) == (30, "length")
        assert c.text == continuation(tok, final.prompt_token_ids, c.token_ids, True)
        assert "".join(o.outputs[0].text for o in results[RequestOutputKind.DELTA][f"DELTA{n}"]) == c.text
        assert sum((o.outputs[0].token_ids for o in results[RequestOutputKind.DELTA][f"DELTA{n}"]), []) == c.token_ids
        assert results[RequestOutputKind.CUMULATIVE][f"CUMULATIVE{n}"][-1].outputs[0] == c
        broken += "\ufffd" in c.text
    assert broken > 8   # or it was no test


@pytest.mark.timeout(120)
def test_first_token_may_end_it(engine):
    "K5 among others: the first token is a stop token, or completes a stop string; the rest of the batch goes on."
    greedy = dict(temperature=0, max_tokens=12)
    whole = run(engine, ("w", "Hello, my name is", SamplingParams(**greedy)))["w"][-1].outputs[0]
    ids = engine.tokenizer("Hello, my name is")["input_ids"]
    after = next(n for n in range(1, 12) if engine.tokenizer.decode(whole.token_ids[n]).isascii())   # it has a text of its own
    piece = engine.tokenizer.decode(whole.token_ids[after])
    outs = run(engine, ("id", "Hello, my name is", SamplingParams(stop_token_ids=whole.token_ids[:1], **greedy)),
               ("string", ids + whole.token_ids[:after], SamplingParams(stop=piece, ignore_eos=True, **greedy | {"max_tokens": 200})),
               ("w", "Hello, my name is", SamplingParams(**greedy)))
    end = {k: v[-1].outputs[0] for k, v in outs.items()}
    assert (end["id"].text, end["id"].token_ids, end["id"].stop_reason) == ("", whole.token_ids[:1], whole.token_ids[0])
    assert (end["string"].text, end["string"].token_ids, end["string"].stop_reason) == ("", [whole.token_ids[after]], piece)
    assert end["w"] == whole
    assert drained(engine)   # the core was told of the stop string: it does not write the other 199 tokens


@pytest.mark.timeout(120)
def test_refusals_and_aborts_leave_the_others_alone(engine):
    good = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    alone = run(engine, ("a", [5, 6, 7], good))["a"][-1].outputs[0]
    engine.add_request("a", [5, 6, 7], good)
    for prompt in ("", [], [600], [5] * 256, None):
        with pytest.raises((ValueError, TypeError)): engine.add_request("bad", prompt, good)
    with pytest.raises(TypeError): engine.add_request("bad", [5], None)
    for n in range(20): engine.add_request(f"x{n % 7}", [5 + n], SamplingParams(max_tokens=200, ignore_eos=True))
    first = engine.step()
    engine.abort_request([f"x{n}" for n in range(7)] * 2 + ["nobody"])
    assert engine.get_num_unfinished_requests() == 1
    engine.add_request("x0", [5, 6, 7], good)   # the id of one that was aborted, while its outputs may be on their way
    outs = first
    while engine.has_unfinished_requests(): outs += engine.step()
    ends = {o.request_id: o.outputs[0] for o in outs if o.finished}
    assert ends == {"a": alone, "x0": alone} and drained(engine)


def test_imports_stay_light():
    code = ("import sys, litevllm.engine.input_processor, litevllm.engine.output_processor, litevllm.engine.detokenizer;"
            "heavy = {'torch', 'transformers', 'tokenizers', 'numpy'} & sys.modules.keys(); assert not heavy, heavy")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
