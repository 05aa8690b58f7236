"""What the user gets: logprobs with their texts, merged deltas, n answers, aborts at any moment. Semantics 40, 44-47, 55, 57; cases I2, M8, S6."""
import itertools
import math
import os
import random
import time

import pytest
import torch
from test_frontend import STRINGS, TOKENIZERS, continuation, fast, pieces

from litevllm import LLM, SamplingParams
from litevllm.config import EngineArgs
from litevllm.engine.llm_engine import LLMEngine
from litevllm.engine.logprobs import LogprobsProcessor, TokenTexts
from litevllm.engine.output_processor import OutputProcessor
from litevllm.engine.parallel_sampling import ParentRequest, internal_ids
from litevllm.logprobs import FlatLogprobs, Logprob, append_logprobs_for_next_position, create_prompt_logprobs
from litevllm.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from litevllm.outputs import CompletionOutput, RequestOutput
from litevllm.sampling_params import RequestOutputKind

SEED = int(os.environ.get("LITEVLLM_TEST_SEED") or time.time_ns() % 10**6)
CUMULATIVE, DELTA, FINAL_ONLY = KINDS = list(RequestOutputKind)
TOK = pieces("a", "b", "c", "d", "x", "y", special=["<eos>"])
A, B, C, D, X, Y, EOS = range(7)


def request(rid="r-00000000", prompt=(0, 1), **params):
    return EngineCoreRequest(rid, list(prompt), SamplingParams(**{"max_tokens": None} | params), 0.0, external_req_id=rid.split("-")[0])


def entry(token_id, k=2, base=-0.5):
    "One position as the core sends it: the token itself, then the k likeliest."
    others = [t for t in range(k + 1) if t != token_id][:k]
    return [token_id, *others], [base - token_id / 8, *(base - t / 8 for t in others)], [token_id + 1, *(t + 1 for t in others)]


def out(rid, ids, end=None, logprobs=False, **kw):
    return EngineCoreOutput(rid, list(ids), end, new_logprobs=[entry(t) for t in ids] if logprobs else None, **kw)


def is_empty(proc): return not (proc.request_states or proc.external_req_ids or proc.parent_requests)


# ---------------------------------------------------------------- the containers

def random_position(rng):
    if rng.random() < 0.1: return None
    return {t: Logprob(-rng.random(), rng.randint(1, 9), rng.choice(["a", "", None])) for t in rng.sample(range(50), rng.randint(1, 6))}


def test_flat_is_a_list_of_dicts():
    "Whatever is asked of a list of dicts, flat columns give the same: 300 random histories."
    print("seed", SEED)
    rng = random.Random(SEED)
    for _ in range(300):
        nested, flat = [], FlatLogprobs()
        for _ in range(rng.randint(0, 8)):
            more, how = [random_position(rng) for _ in range(rng.randint(0, 3))], rng.choice(("append", "extend", "extend by columns"))
            nested += more
            other = FlatLogprobs()
            other.extend(more)
            if how == "append": [flat.append(m) for m in more]
            else: flat.extend(more if how == "extend" else other)
        assert list(flat) == nested and len(flat) == len(nested)
        for i in range(-len(nested), len(nested)): assert flat[i] == nested[i]
        for _ in range(20):
            cut = slice(*(rng.choice([None, *range(-9, 10)]) for _ in range(2)), rng.choice([None, None, 1, 2, -1, -3]))
            part = flat[cut]
            assert isinstance(part, FlatLogprobs) and list(part) == nested[cut], (SEED, cut)
            assert part.end_indices == [] or max(part.end_indices) == len(part.token_ids) == len(part.logprobs) == len(part.ranks)
        flat.extend(flat)
        assert list(flat) == nested + nested


def test_flat_refuses_what_it_can_not_do():
    flat = create_prompt_logprobs(True)
    append_logprobs_for_next_position(flat, [5, 7], [-0.1, -2.0], [1, 2], ["x", "y"])
    assert list(flat) == [None, {5: Logprob(-0.1, 1, "x"), 7: Logprob(-2.0, 2, "y")}]
    for bad in (2, -3):
        with pytest.raises(IndexError): flat[bad]
    with pytest.raises(TypeError): flat["0"]
    with pytest.raises(TypeError, match="set"): flat[0] = None
    with pytest.raises(TypeError, match="deleted"): del flat[0]
    with pytest.raises(TypeError, match="inserted"): flat.insert(0, None)
    with pytest.raises(TypeError): flat.pop()
    assert len(flat) == 2 and list(flat[1]) == [5, 7]          # the token itself comes first


# ---------------------------------------------------------------- texts of tokens (M8: real spaces, parts of characters)

def chain(tok, prompt, ids, alternatives=(), **params):
    "The processor after `ids`, which came one by one, each with `alternatives` beside it."
    lp = LogprobsProcessor.from_new_request(tok, request(prompt=prompt, logprobs=1, **params))
    for t in ids:
        row = [t, *(a for a in alternatives if a != t)]
        lp.update_from_output(EngineCoreOutput("r", [t], new_logprobs=[(row, [-0.5] * len(row), list(range(1, len(row) + 1)))]))
    return lp


def decoded(logprobs): return [next(iter(p.values())).decoded_token for p in logprobs]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_m8_token_texts_join_to_the_text(name):
    "Byte-level BPE, Metaspace, byte fallback; every script, the prompt cut off at every place. Spaces are kept, parts wait."
    tok = TOKENIZERS[name]
    hf, texts, spaces, waited = fast(tok), None, 0, 0
    for s in STRINGS:
        ids = tok.encode(s, add_special_tokens=False).ids
        for cut in range(1, len(ids)):
            lp = LogprobsProcessor.from_new_request(hf, request(prompt=ids[:cut], logprobs=0), texts)
            texts = lp.texts
            for t in ids[cut:]: lp.update_from_output(EngineCoreOutput("r", [t], new_logprobs=[([t], [-1.0], [1])]))
            got, want = decoded(lp.logprobs), continuation(tok, ids[:cut], ids[cut:], False)
            takes_back = name == "byte_fallback" and tok.decode(ids[:cut]).endswith("\ufffd")   # its decoder unsays what stood before a part
            if "\ufffd" in want or takes_back: continue
            assert "".join(got) == want, (name, s, cut)
            assert not any("\ufffd" in g for g in got), (name, s, cut, got)
            spaces += sum(g.startswith(" ") for g in got)
            waited += got.count("")
        if len(ids) > 1:                                 # and the prompt's own, all but the first
            lp = LogprobsProcessor.from_new_request(hf, request(prompt=ids, prompt_logprobs=0), texts)
            lp.update_from_output(EngineCoreOutput("r", [], new_prompt_logprobs=[([t], [-1.0], [1]) for t in ids[1:]]))
            want = continuation(tok, ids[:1], ids[1:], False)
            if "\ufffd" not in want: assert "".join(decoded(lp.prompt_logprobs[1:])) == want, (name, s)
    assert spaces > 100
    assert waited > 100 or name == "metaspace"           # which has no part of a character


@pytest.mark.parametrize("name", TOKENIZERS)
def test_m8_each_candidate_shows_what_it_would_add(name):
    "Beside each token others that were not chosen: text so far + theirs is the decoding of ids so far + theirs."
    print("seed", SEED)
    rng, tok = random.Random(SEED), TOKENIZERS[name]
    hf, checked = fast(tok), 0
    vocab = tok.get_vocab_size()
    for s in rng.sample(STRINGS, 20):
        ids = tok.encode(s, add_special_tokens=False).ids
        candidates = rng.sample(range(vocab), 4)
        lp = chain(hf, ids[:1], ids[1:], candidates)
        for i, position in enumerate(lp.logprobs):
            before = tok.decode(ids[:1], skip_special_tokens=False).rstrip("\ufffd") + "".join(decoded(lp.logprobs[:i]))
            for c, p in position.items():
                after = tok.decode([*ids[:i + 1], c], skip_special_tokens=False)
                if "\ufffd" in after or not after.startswith(before): continue
                checked += 1
                assert p.decoded_token == after[len(before):], (SEED, name, s, i, c)
    assert checked > 200


def test_m8_a_character_in_four_tokens():
    "The parts have no text, the last one has all of it; another candidate in that place shows the character that it would make."
    tok = TOKENIZERS["byte_level"]
    hf, byte = fast(tok), {b: tok.token_to_id(ch) for b, ch in byte_alphabet().items()}
    first, second = "😀".encode(), "😁".encode()
    assert first[:3] == second[:3]
    lp = chain(hf, [byte[65]], [byte[b] for b in first], alternatives=[byte[second[3]], byte[66]])
    assert decoded(lp.logprobs) == ["", "", "", "😀"]
    assert lp.logprobs[3][byte[second[3]]].decoded_token == "😁" and lp.logprobs[0][byte[66]].decoded_token == "B"
    # a character that the prompt began: the output's token completes it
    assert decoded(chain(hf, [byte[b] for b in first[:2]], [byte[b] for b in first[2:]]).logprobs) == ["", "😀"]
    # a part that never gets its rest: nothing raises, nothing waits for ever, what follows is as it should be
    assert decoded(chain(hf, [byte[65]], [byte[first[0]], byte[66], byte[67]]).logprobs) == ["", "\ufffdB", "C"]
    endless = decoded(chain(hf, [byte[65]], [byte[0x80]] * 40 + [byte[66], byte[67]]).logprobs)
    assert endless[-1] == "C" and "".join(endless).count("\ufffd") >= 30


def byte_alphabet():
    "byte -> the character that stands for it in a byte-level vocabulary (GPT-2's table)."
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(rest)}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_m8_random_ids_never_raise(name):
    print("seed", SEED)
    rng, tok = random.Random(SEED), TOKENIZERS[name]
    hf, vocab = fast(tok), tok.get_vocab_size()
    for _ in range(150):
        low, top = rng.choice([(0, vocab + 5), (0, 260), (259, vocab)])
        ids = [rng.randrange(low, min(top, vocab)), *(rng.randrange(low, top) for _ in range(rng.randint(1, 39)))]   # a prompt has a text
        lp = chain(hf, ids[:1], ids[1:], alternatives=rng.sample(range(vocab), 2))
        got = decoded(lp.logprobs)
        assert all(isinstance(g, str) for g in got) and len(got) == len(ids) - 1
        want = continuation(tok, ids[:1], ids[1:], False)
        if "\ufffd" not in tok.decode(ids, skip_special_tokens=False): assert "".join(got) == want, (SEED, name, ids)


def test_texts_are_none_without_text_and_shared_with_it():
    assert decoded(chain(TOK, [A], [B, EOS], detokenize=False).logprobs) == [None, None]
    assert decoded(chain(None, [A], [B, EOS]).logprobs) == [None, None]
    assert decoded(chain(TOK, [A], [B, EOS]).logprobs) == ["b", "<eos>"]      # the end token is shown here, in the text it is not
    proc = OutputProcessor(TOK)
    for n in range(3): proc.add_request(request(f"{n}-0", logprobs=1), None)
    proc.add_request(request("3-0"), None)
    made = [s.logprobs_processor for s in proc.request_states.values()]
    assert made[0].texts is made[1].texts is made[2].texts and made[3] is None   # one table for all; nothing for who asks for nothing

    class Odd:
        "Takes no id above 3, and says so."
        calls = 0
        def encode(self, text, add_special_tokens): return [0]
        def decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces):
            self.calls += 1
            return "".join("abcd"[i] for i in ids)
    odd = Odd()
    texts = TokenTexts(odd)
    assert [texts[t] for t in (1, 9, 1, 9, 3)] == ["b", "", "b", "", "d"]
    before = odd.calls
    assert [texts[t] for t in (1, 9, 3) * 50] == ["b", "", "d"] * 50 and odd.calls == before   # looked up, not decoded again


# ---------------------------------------------------------------- one request's outputs (semantics 55)

def play(kind, steps, flat=False, end=FinishReason.LENGTH, prompt_logprobs=None, logprobs=2, **params):
    "All RequestOutputs of a request whose core sends `steps` and then ends."
    proc = OutputProcessor(TOK)
    proc.add_request(request(output_kind=kind, flat_logprobs=flat, logprobs=logprobs, prompt_logprobs=prompt_logprobs, **params), "ab")
    outs = []
    for i, ids in enumerate(steps):
        kw = dict(new_prompt_logprobs=[entry(B, 1)]) if i == 0 and prompt_logprobs is not None else {}
        outs += proc.process_outputs([out("r-00000000", ids, end if i == len(steps) - 1 else None, logprobs is not None, **kw)]).request_outputs
    assert is_empty(proc)
    return outs


def random_steps(rng): return [[rng.randrange(6) for _ in range(rng.choice([0, 1, 1, 1, 3]))] for _ in range(rng.randint(1, 8))]


@pytest.mark.parametrize("flat", [False, True])
def test_s55_deltas_of_logprobs_join_to_the_cumulative_ones(flat):
    "One or several tokens a step, or none; all kinds of output, both kinds of container."
    print("seed", SEED)
    rng = random.Random(SEED)
    for _ in range(60):
        steps = random_steps(rng)
        cum, delta, final = (play(kind, steps, flat, prompt_logprobs=1, stop=["zzz"]) for kind in KINDS)
        nested = play(FINAL_ONLY, steps, False, prompt_logprobs=1)[-1]
        want = nested.outputs[0]
        ids = [t for s in steps for t in s]
        assert want.token_ids == ids and len(want.logprobs) == len(ids)
        assert [list(p) for p in want.logprobs] == [entry(t)[0] for t in ids]                # the token itself comes first
        assert [p[t].rank for p, t in zip(want.logprobs, ids)] == [t + 1 for t in ids]
        assert want.cumulative_logprob == pytest.approx(sum(-0.5 - t / 8 for t in ids))
        assert nested.prompt_logprobs == [None, {B: Logprob(-0.625, 2, "b"), A: Logprob(-0.5, 1, "a")}]
        for last in (cum[-1], final[-1]):
            assert list(last.outputs[0].logprobs) == want.logprobs and list(last.prompt_logprobs) == nested.prompt_logprobs
        joined = [p for o in delta for p in o.outputs[0].logprobs]
        assert joined == want.logprobs and all(len(o.outputs[0].logprobs) == len(o.outputs[0].token_ids) for o in delta)
        assert [o.prompt_logprobs is not None for o in delta] == [True] + [False] * (len(delta) - 1)   # once
        assert list(delta[0].prompt_logprobs) == nested.prompt_logprobs
        assert delta[-1].outputs[0].cumulative_logprob == cum[-1].outputs[0].cumulative_logprob == want.cumulative_logprob
        n = 0
        for o, s in zip(cum, steps):                                                          # an output kept does not grow
            n += len(s)
            assert len(o.outputs[0].token_ids) == len(o.outputs[0].logprobs) == n
        kinds = {type(o.outputs[0].logprobs) for o in cum + delta + final} | {type(o.prompt_logprobs) for o in cum + final}
        assert kinds == {FlatLogprobs if flat else list}


def test_logprobs_only_where_asked_for():
    for params in (dict(logprobs=None), dict(logprobs=None, prompt_logprobs=1), dict(logprobs=0), dict(logprobs=None, logprob_token_ids=[A, B])):
        sampled = params["logprobs"] is not None or "logprob_token_ids" in params
        proc = OutputProcessor(TOK)
        proc.add_request(request(**params), None)
        kw = dict(new_prompt_logprobs=[entry(B, 1)]) if params.get("prompt_logprobs") else {}
        o, = proc.process_outputs([out("r-00000000", [C], FinishReason.LENGTH, sampled, **kw)]).request_outputs
        c = o.outputs[0]
        assert (c.logprobs is not None) == (c.cumulative_logprob is not None) == sampled
        assert (o.prompt_logprobs is not None) == bool(kw)


def test_prompt_of_one_token_and_an_end_before_the_first_output():
    for flat in (False, True):
        proc = OutputProcessor(TOK)
        proc.add_request(request(prompt=[A], prompt_logprobs=1, flat_logprobs=flat), None)
        proc.add_request(request("two-0", prompt=[A, B], prompt_logprobs=1, logprobs=1, flat_logprobs=flat), None)
        ends = [out("r-00000000", [A], FinishReason.LENGTH), out("two-0", [], FinishReason.ERROR, error="no room")]
        one, two = proc.process_outputs(ends).request_outputs
        assert list(one.prompt_logprobs) == [None]
        assert two.prompt_logprobs is None and list(two.outputs[0].logprobs) == [] and two.outputs[0].cumulative_logprob == 0


LAST = dict(
    s40_eos=([[A], [B, EOS]], dict(end=FinishReason.STOP), "ab", None),
    s40_stop_id=([[A], [D]], dict(end=FinishReason.STOP, end_reason=D), "a", D),
    s40_stop_id_included=([[A], [D]], dict(end=FinishReason.STOP, end_reason=D, include_stop_str_in_output=True), "ad", D),
    s44_stop_string=([[A], [B], [C], [D], [A]], dict(stop=["cd"]), "ab", "cd"),
    s44_included=([[A], [B], [C, D, A], [A]], dict(stop=["cd"], include_stop_str_in_output=True), "abcd", "cd"),
    s45_first_in_list_order=([[X, X], [A, B], [A]], dict(stop=["b", "ab"]), "xxa", "b"),
    s46_held_back_to_the_end=([[A], [X], [X]], dict(stop=["xxx"]), "axx", None),
    s46_not_before_min_tokens=([[X], [Y], [A], [X], [Y], [A]], dict(stop=["xy"], min_tokens=3), "xya", "xy"))


@pytest.mark.parametrize("case", LAST)
def test_s40_s44_s45_s46_ids_text_and_logprobs_of_the_end(case):
    "Whatever is cut off the text, ids and logprobs are of every token that was made, in all kinds of output."
    steps, kw, text, reason = LAST[case]
    core = {k: kw.get(k) for k in ("end", "end_reason")}
    for kind in KINDS:
        proc = OutputProcessor(TOK)
        params = {k: v for k, v in kw.items() if k not in core}
        proc.add_request(request(output_kind=kind, logprobs=2, **params), None)
        outs = []
        for i, ids in enumerate(steps):
            last = i == len(steps) - 1
            end, reason_of_core = (FinishReason.LENGTH if core["end"] is None else core["end"], core["end_reason"]) if last else (None, None)
            outs += proc.process_outputs([out("r-00000000", ids, end, True, stop_reason=reason_of_core)]).request_outputs
        assert is_empty(proc) and [o.finished for o in outs] == [False] * (len(outs) - 1) + [True]
        parts = [o.outputs[0] for o in outs] if kind is DELTA else [outs[-1].outputs[0]]
        ids = [t for p in parts for t in p.token_ids]
        assert "".join(p.text for p in parts) == text and parts[-1].stop_reason == reason
        assert ids == [t for s in steps for t in s][:len(ids)] and [next(iter(e)) for p in parts for e in p.logprobs] == ids
        assert parts[-1].cumulative_logprob == pytest.approx(sum(-0.5 - t / 8 for t in ids))
        assert parts[-1].finish_reason == ("length" if case == "s46_held_back_to_the_end" else "stop")


# ---------------------------------------------------------------- RequestOutput.add

@pytest.mark.parametrize("flat", [False, True])
def test_merged_deltas_are_the_whole(flat):
    "A slow reader's deltas, merged in groups of any size, hold what a fast one got; n answers at once, which come interleaved."
    print("seed", SEED)
    rng = random.Random(SEED)
    for _ in range(40):
        n = rng.randint(1, 3)
        scripts = [random_steps(rng) for _ in range(n)]
        whole = run_children(FINAL_ONLY, scripts, rng=None, flat=flat)[-1]
        outs = run_children(DELTA, scripts, rng=rng, flat=flat)
        while len(outs) > 1:                       # merge neighbours until one is left
            i = rng.randrange(len(outs) - 1)
            outs[i].add(outs.pop(i + 1), aggregate=True)
        assert outs[0].outputs == whole.outputs and outs[0].prompt_logprobs == whole.prompt_logprobs
        assert (outs[0].finished, outs[0].error, outs[0].num_cached_tokens) == (True, None, whole.num_cached_tokens)
        cum = run_children(CUMULATIVE, scripts, rng=rng, flat=flat)
        merged = cum[0]
        for o in cum[1:]: merged.add(o, aggregate=False)
        assert merged.outputs == whole.outputs and merged.prompt_logprobs == whole.prompt_logprobs and merged.finished


def test_add_takes_over_what_comes_late():
    first = RequestOutput("r", None, [1], None, [CompletionOutput(1, "x", [4], None, None)], False)
    kept = first.outputs[0].token_ids
    first.add(RequestOutput("r", None, [1], [None], [CompletionOutput(0, "a", [5], -1.0, [{}], finish_reason="error")], False, error="no room"), True)
    first.add(RequestOutput("r", None, [1], None, [CompletionOutput(1, "y", [6], None, None, finish_reason="stop", stop_reason=6)], True), True)
    assert [(c.index, c.text, c.token_ids, c.finish_reason, c.stop_reason) for c in first.outputs] \
        == [(0, "a", [5], "error", None), (1, "xy", [4, 6], "stop", 6)]
    assert (first.prompt_logprobs, first.error, first.finished, kept) == ([None], "no room", True, [4])


def test_repr_names_what_there_is():
    o = RequestOutput("7", "ab", [0, 1], None, [CompletionOutput(0, "c", [2], None, None, finish_reason="stop")], True, error=None)
    assert eval(repr(o), dict(RequestOutput=RequestOutput, CompletionOutput=CompletionOutput)) == o
    assert "error" not in repr(o) and "error='no room'" in repr(RequestOutput("7", None, [], None, [], True, error="no room"))


# ---------------------------------------------------------------- n answers (semantics 57)

def run_children(kind, scripts, rng, flat=False):
    "All RequestOutputs of a request with one answer per script; `rng` mixes the children's steps, None takes them in turn."
    proc = OutputProcessor(TOK)
    parent = ParentRequest(request(n=len(scripts), output_kind=kind, seed=3, logprobs=2, prompt_logprobs=1, flat_logprobs=flat))
    for i, child in enumerate(parent.children): proc.add_request(child, "ab", parent, i)
    left, outs = {i: list(s) for i, s in enumerate(scripts)}, []
    started = set()
    while left:
        step = []
        for i in (rng.sample(sorted(left), rng.randint(1, len(left))) if rng else sorted(left)):
            ids, end = left[i].pop(0), FinishReason.LENGTH if not left[i] else None
            kw = {} if i in started else dict(num_cached_tokens=16 * i, new_prompt_logprobs=[entry(B, 1)] if i == 0 else None)
            started.add(i)
            if end is not None: del left[i]
            step.append(out(parent.children[i].request_id, ids, end, True, **kw))
        outs += proc.process_outputs(step).request_outputs
    assert is_empty(proc)
    return outs


def test_s57_children():
    params = dict(n=3, seed=7, temperature=0.5, prompt_logprobs=1, logprobs=2, stop=["q"], max_tokens=9)
    parent_request = EngineCoreRequest("r-0123abcd", [1, 2, 3], SamplingParams(**params), 5.0, "salt", 4, "r")
    parent = ParentRequest(parent_request)
    assert [c.request_id for c in parent.children] == internal_ids(parent_request) == ["0_r-0123abcd", "1_r-0123abcd", "2_r-0123abcd"]
    for i, c in enumerate(parent.children):
        p = c.sampling_params
        assert (p.n, p.seed, p.temperature, p.logprobs, p.stop, p.max_tokens) == (1, 7 + i, 0.5, 2, ["q"], 9)
        assert p.prompt_logprobs == (1 if i == 0 else None)                 # the same for all: computed once
        assert (c.prompt_token_ids, c.arrival_time, c.cache_salt, c.priority, c.external_req_id) == ([1, 2, 3], 5.0, "salt", 4, "r")
    assert (parent_request.sampling_params.n, parent_request.sampling_params.seed) == (3, 7)   # what was given is as it was
    assert internal_ids(request()) == ["r-00000000"]
    no_seed = ParentRequest(request(n=2))
    assert [c.sampling_params.seed for c in no_seed.children] == [None, None]


class Queue(list):
    "Takes what a consumer would."
    def put(self, item): self.append(item)


ENDS = ("eos", "stop_id", "length", "stop_string", "error", "abort_child")
REASON = dict(eos=("stop", None), stop_id=("stop", D), length=("length", None), stop_string=("stop", "xy"), error=("error", None),
              abort_child=("abort", None))


def end_child(proc, rid, how):
    "Brings one child to its end; the RequestOutputs that process_outputs returned, and what the core must be told."
    if how == "abort_child": return [], proc.abort_requests([rid], internal=True)
    o = dict(eos=out(rid, [EOS], FinishReason.STOP), stop_id=out(rid, [D], FinishReason.STOP, stop_reason=D), length=out(rid, [B], FinishReason.LENGTH),
             stop_string=out(rid, [X, Y]), error=out(rid, [], FinishReason.ERROR, error=f"{rid} needs 9 KV blocks, the pool has 5"))[how]
    res = proc.process_outputs([o])
    return res.request_outputs, res.reqs_to_abort


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_s57_children_end_in_every_order_for_every_reason(n, kind):
    "Exactly one finished output, the last; answers in order; each with its own reason; an error is the request's, the others are whole."
    print("seed", SEED)
    rng = random.Random(SEED)
    for order in itertools.permutations(range(n)):
        for with_queue in (False, True):
            hows = [rng.choice(ENDS) for _ in range(n)] if with_queue or n < 2 else [rng.choice(ENDS[:-1]) for _ in range(n)]
            if not with_queue and n == 1: hows = [h if h != "abort_child" else "eos" for h in hows]
            proc, queue, told = OutputProcessor(TOK), Queue(), []
            whole = request(n=n, output_kind=kind, stop=["xy"], logprobs=None)
            parent = ParentRequest(whole) if n > 1 else None
            children = parent.children if parent else [whole]
            for i, c in enumerate(children): proc.add_request(c, "ab", parent, i, queue if with_queue else None)
            outs = proc.process_outputs([out(c.request_id, [A, C]) for c in children]).request_outputs
            for i in order:
                got, aborts = end_child(proc, children[i].request_id, hows[i])
                outs += got
                told += aborts
                late = proc.process_outputs([out(children[i].request_id, [B], FinishReason.LENGTH)])   # it was in flight
                assert late.request_outputs == late.reqs_to_abort == []
            assert is_empty(proc)
            if with_queue:
                assert outs == []
                outs = list(queue)
            assert [o.finished for o in outs] == [False] * (len(outs) - 1) + [True], (SEED, order, hows)
            assert told == [children[i].request_id for i in order if hows[i] in ("stop_string", "abort_child")]
            assert all(o.request_id == "r" and o.prompt == "ab" and o.prompt_token_ids == [0, 1] for o in outs)
            answers = {}
            if kind is DELTA:
                for o in outs:
                    c, = o.outputs
                    text, ids, _, _ = answers.get(c.index, ("", [], None, None))
                    answers[c.index] = text + c.text, ids + c.token_ids, c.finish_reason, c.stop_reason
            else:
                assert kind is CUMULATIVE or [c.index for c in outs[0].outputs] == list(range(n)) and len(outs) == 1
                for o in outs: answers |= {c.index: (c.text, c.token_ids, c.finish_reason, c.stop_reason) for c in o.outputs}
            more = dict(eos=("", [EOS]), stop_id=("", [D]), length=("b", [B]), stop_string=("", [X, Y]), error=("", []), abort_child=("", []))
            for i, how in enumerate(hows):
                assert answers[i] == ("ac" + more[how][0], [A, C] + more[how][1], *REASON[how]), (SEED, order, hows, i)
            failed = [children[i].request_id for i in order if hows[i] == "error"]
            assert outs[-1].error == (f"{failed[0]} needs 9 KV blocks, the pool has 5" if failed else None)


def test_all_children_in_one_step():
    for kind in KINDS:
        proc, parent = OutputProcessor(TOK), ParentRequest(request(n=3, output_kind=kind))
        for i, c in enumerate(parent.children): proc.add_request(c, None, parent, i)
        outs = proc.process_outputs([out(c.request_id, [A], FinishReason.LENGTH) for c in reversed(parent.children)]).request_outputs
        assert [[c.index for c in o.outputs] for o in outs] == ([[0, 1, 2]] if kind is FINAL_ONLY else [[2], [1], [0]])
        assert [o.finished for o in outs][-1] and is_empty(proc)


def test_prompt_facts_of_n_answers():
    "The first child tells of the prompt, whoever ends last; later children find its blocks in the cache, which is no hit of the request."
    for order in itertools.permutations(range(3)):
        for kind in KINDS:
            proc, parent = OutputProcessor(TOK), ParentRequest(request(n=3, output_kind=kind, prompt_logprobs=1))
            for i, c in enumerate(parent.children): proc.add_request(c, None, parent, i)
            rid = [c.request_id for c in parent.children]
            outs = proc.process_outputs([out(rid[1], [A], num_cached_tokens=32),
                                         out(rid[0], [A], num_cached_tokens=16, new_prompt_logprobs=[entry(B, 1)]),
                                         out(rid[2], [A], num_cached_tokens=32)]).request_outputs
            for i in order: outs += proc.process_outputs([out(rid[i], [B], FinishReason.LENGTH)]).request_outputs
            has = [o.prompt_logprobs is not None for o in outs]
            assert has == {CUMULATIVE: [False] + [True] * 5, DELTA: [False, True] + [False] * 4, FINAL_ONLY: [True]}[kind]
            assert outs[-1].num_cached_tokens == 16


# ---------------------------------------------------------------- S6: aborts, front part

@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_s6_aborts_at_any_moment(kind):
    "200 histories against a model of three rules: one last output a request, nothing after it, the core told of what it still runs."
    print("seed", SEED)
    rng = random.Random(SEED)
    for round_ in range(200):
        proc, n_added = OutputProcessor(TOK), 0
        in_core: dict[str, tuple[str, int]] = {}                   # internal id -> (its request, tokens so far), as the core has it
        queues: dict[str, Queue] = {}                              # by the parent's internal id
        external: dict[str, str] = {}
        for _ in range(60):
            what = rng.random()
            if what < 0.3:
                name, n, n_added = rng.choice("abc"), rng.randint(1, 3), n_added + 1        # ids are used again, also at the same time
                whole = request(f"{name}-{n_added:08x}", n=n, output_kind=kind, stop=["xy"])
                parent = ParentRequest(whole) if n > 1 else None
                queue = queues[whole.request_id] = Queue()
                external[whole.request_id] = name
                for i, c in enumerate(parent.children if parent else [whole]):
                    proc.add_request(c, None, parent, i, queue)
                    in_core[c.request_id] = whole.request_id, 0
            elif what < 0.7 and in_core:
                outs = []
                for rid in rng.sample(sorted(in_core), rng.randint(1, len(in_core))):
                    end = rng.choice([None, None, None, FinishReason.LENGTH, FinishReason.STOP, FinishReason.ERROR])
                    outs.append(out(rid, [X, Y] if end is None and rng.random() < 0.1 else [A], end, error="no room" if end == 3 else None))
                    if end is not None: del in_core[rid]
                res = proc.process_outputs(outs)
                assert res.request_outputs == []
                for rid in res.reqs_to_abort: in_core.pop(rid)
            else:
                internal = rng.random() < 0.5
                known = sorted(proc.request_states) + sorted(proc.parent_requests) + sorted(queues) if internal else ["a", "b", "c"]
                ids = rng.choices(known + ["nobody", "0_nobody-00000000"], k=rng.randint(1, 4))
                before = set(proc.request_states)
                told = proc.abort_requests(ids, internal)
                assert len(told) == len(set(told)) and set(told) == before - set(proc.request_states)
                hit = {r for r in before if any(i in (r, r.partition("_")[2]) if internal else external[whole_id(r)] == i for i in ids)}
                assert set(told) == hit, (SEED, round_, ids)
                assert proc.abort_requests(ids, internal) == []
                for rid in told: in_core.pop(rid)
            assert set(proc.request_states) <= set(in_core) and set(in_core) == set(proc.request_states)
            assert {whole_id(r) for r in in_core} == {w for w, q in queues.items() if not (q and q[-1].finished)}
        proc.abort_requests(["a", "b", "c"])
        assert is_empty(proc)
        for whole, queue in queues.items():
            assert [o.finished for o in queue] == [False] * (len(queue) - 1) + [True], (SEED, round_, whole)
            ends = [c.finish_reason for o in queue for c in o.outputs if c.finish_reason]
            assert len({c.index for o in queue for c in o.outputs}) == len(ends)            # each answer ended once
            assert all(o.request_id == external[whole] for o in queue)


def whole_id(rid): return rid.partition("_")[2] or rid


def test_an_abort_hands_over_what_was_held_back():
    "Semantics 46 and 47: characters before a possible stop string, and bytes before the rest of a character, wait; at the end they come."
    tok = TOKENIZERS["byte_level"]
    hf = fast(tok)
    ids = tok.encode("Straße 😀", add_special_tokens=False).ids
    for kind in KINDS:
        for cut in range(1, len(ids)):
            proc, queue = OutputProcessor(hf), Queue()
            proc.add_request(request(prompt=ids[:1], output_kind=kind, stop=["never, ever"], logprobs=0), None, queue=queue)
            for t in ids[1:cut]: proc.process_outputs([EngineCoreOutput("r-00000000", [t], new_logprobs=[([t], [-1.0], [1])])])
            assert proc.abort_requests(["r"]) == ["r-00000000"] and is_empty(proc)
            c = queue[-1].outputs[0]
            assert (c.finish_reason, c.stop_reason, queue[-1].finished) == ("abort", None, True)
            text = "".join(o.outputs[0].text for o in queue) if kind is DELTA else c.text
            assert text == continuation(tok, ids[:1], ids[1:cut], True)
            entries = sum(len(o.outputs[0].logprobs) for o in queue) if kind is DELTA else len(c.logprobs)
            assert entries == cut - 1


def test_who_waits_at_a_queue_learns_of_the_end_once():
    proc, shared, own = OutputProcessor(TOK), Queue(), Queue()
    parent = ParentRequest(request("p-0", n=3))
    for i, c in enumerate(parent.children): proc.add_request(c, None, parent, i, shared)
    proc.add_request(request("q-0"), None, queue=shared)
    proc.add_request(request("o-0"), None, queue=own)
    proc.add_request(request("s-0"), None)
    error = RuntimeError("the core is gone")
    proc.propagate_error(error)
    assert shared == own == [error] and proc.get_num_unfinished_requests() == 6
    assert len(proc.abort_requests(["p", "q", "o", "s"])) == 6 and is_empty(proc)
    assert [o.finished for o in shared[1:]] == [False, False, True, True] and [o.finished for o in own[1:]] == [True]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_one_output_that_can_not_be_processed_is_one_requests_end(kind, ended, n):
    "A detokenizer that raises ends its request, with the reason and the tokens so far; the others of the step go on."
    proc, queue = OutputProcessor(TOK), Queue()
    proc.add_request(request("before-0", output_kind=kind), None)
    bad = request("bad-0", output_kind=kind, n=n)
    parent = ParentRequest(bad) if n > 1 else None
    children = parent.children if parent else [bad]
    for i, child in enumerate(children): proc.add_request(child, None, parent, i, queue)
    proc.add_request(request("after-0", output_kind=kind), None)
    sick, rest = children[0].request_id, [c.request_id for c in children[1:]]
    everybody = ["before-0", sick, "after-0", *rest]
    proc.process_outputs([out(rid, [A]) for rid in everybody])
    def broken(*args): raise KeyError("no such token")
    proc.request_states[sick].detokenizer.update = broken
    done = proc.process_outputs([out(rid, [B], FinishReason.LENGTH if ended and rid == sick else None) for rid in everybody])
    assert done.reqs_to_abort == ([] if ended else [sick]) and sorted(proc.request_states) == sorted({*everybody} - {sick})
    done = proc.process_outputs([out(rid, [C], FinishReason.LENGTH) for rid in everybody if rid != sick])
    texts = {o.request_id: o.outputs[0].text for o in done.request_outputs}
    assert texts == dict.fromkeys(["before", "after"], "c" if kind is DELTA else "abc") and is_empty(proc)
    [failed] = {id(c): c for o in queue for c in o.outputs if c.finish_reason == "error"}.values()
    assert failed.index == 0 and (kind is DELTA or failed.token_ids == [A])
    assert queue[-1].finished and "could not be processed: KeyError: 'no such token'" in queue[-1].error


# ---------------------------------------------------------------- the engine, with a core that does as it is told

class Core:
    "Notes what it is asked for; takes `takes` requests, then fails."
    def __init__(self, takes=10**9): self.takes, self.running, self.aborted, self.outputs, self.timeouts = takes, [], [], [], []

    def add_request(self, r):
        if len(self.running) == self.takes: raise RuntimeError("the core is gone")
        self.running.append(r.request_id)

    def abort_requests(self, ids):
        self.aborted += ids
        self.running = [r for r in self.running if r not in ids]

    def get_output(self, timeout=None):
        self.timeouts.append(timeout)
        return self.outputs.pop(0) if self.outputs else EngineCoreOutputs()


@pytest.fixture(scope="module")
def scripted(tiny_llama):
    "engine(core): an LLMEngine in front of `core`."
    from litevllm.engine.input_processor import get_tokenizer
    from litevllm.messages import EngineCoreReadyResponse
    config = EngineArgs(tiny_llama, device="cpu", num_gpu_blocks_override=64).create_engine_config()
    tok = get_tokenizer(config.model_config)
    ready = EngineCoreReadyResponse(max_model_len=256, num_gpu_blocks=64, dtype="float32", async_scheduling=False)
    def make(core):
        core.ready = ready
        return LLMEngine(config, core, tok)
    return make


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_all_children_or_none(scripted, n):
    "The hand-over of any child fails: no state, no child in the core, no output for anybody; who was there stays."
    for takes in range(1, n + 1):
        core, queue = Core(takes), Queue()
        engine = scripted(core)
        there = engine.add_request("there", [5, 6], SamplingParams())
        with pytest.raises(RuntimeError, match="gone"): engine.add_request("x", [5, 6, 7], SamplingParams(n=n), queue=queue)
        assert core.running == [there] and list(engine.output_processor.request_states) == [there]
        assert queue == [] and engine.output_processor.parent_requests == {}
        core.takes = 100
        rid = engine.add_request("x", [5, 6, 7], SamplingParams(n=n), queue=queue)      # and the id is free
        assert core.running[1:] == ([rid] if n == 1 else [f"{i}_{rid}" for i in range(n)])
        assert rid.startswith("x-") and len(rid) == 10
        engine.abort_request(["x", "there"])
        assert core.running == [] and queue[-1].finished and is_empty(engine.output_processor)


@pytest.mark.parametrize("n", [1, 3])
def test_an_id_in_use_is_refused_and_hurts_nobody(scripted, n):
    core = Core()
    engine = scripted(core)
    request_ = engine.input_processor.process_inputs("x", [5, 6], SamplingParams(n=n))
    engine.add_request("x", request_, prompt_text="text")
    running = list(core.running)
    with pytest.raises(ValueError, match=request_.request_id): engine.add_request("x", request_)
    assert core.running == running == internal_ids(request_) and core.aborted == [] and engine.get_num_unfinished_requests() == n


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("forgotten", [False, True])
def test_the_core_is_told_of_every_internal_id(scripted, n, forgotten):
    "Also of those that an interrupted step has forgotten; one id in place of a list is one id."
    for by_parent in ([True] if n == 1 else [False, True]):
        core = Core()
        engine = scripted(core)
        request_ = engine.input_processor.process_inputs("x", [5, 6], SamplingParams(n=n))
        engine.add_request("x", request_)
        ids = internal_ids(request_)
        if forgotten: [engine.output_processor.forget(i) for i in ids]
        engine.abort_request(request_.request_id if by_parent else ids, internal=True)
        assert is_empty(engine.output_processor)
        if by_parent and forgotten and n > 1: assert core.aborted == [request_.request_id]   # who their children were nobody knows any more
        else: assert core.running == [] and set(ids) <= set(core.aborted)


def test_step_has_an_end(scripted):
    core, queue = Core(), Queue()
    engine = scripted(core)
    assert engine.step() == engine.step(0.5) == [] and core.timeouts == []      # nothing unfinished, nothing to wait for
    rid = engine.add_request("x", [5, 6], SamplingParams())
    other = engine.add_request("q", [5, 6], SamplingParams(stop=["b"]), queue=queue)
    assert engine.step(0.25) == [] and core.timeouts == [0.25]
    word = engine.tokenizer("b", add_special_tokens=False)["input_ids"]
    core.outputs = [EngineCoreOutputs([EngineCoreOutput(rid, [9], FinishReason.LENGTH), EngineCoreOutput(other, word)])]
    o, = engine.step(0.25)
    assert (o.request_id, o.finished) == ("x", True) and core.aborted == [other]     # the front found the stop string
    assert [(q.request_id, q.outputs[0].stop_reason) for q in queue] == [("q", "b")]


# ---------------------------------------------------------------- the whole engine

@pytest.fixture(scope="module")
def llm(tiny_llama):
    patch = pytest.MonkeyPatch()
    patch.setenv("LITEVLLM_ENABLE_MULTIPROCESSING", "0")
    with LLM(tiny_llama, device="cpu", num_gpu_blocks_override=200, max_logprobs=-1) as llm:
        patch.undo()
        yield llm
        pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1 and is_empty(llm.llm_engine.output_processor)


def test_s57_n_answers_are_those_of_their_seeds(llm):
    "n=3 with seed s is what s, s+1, s+2 give alone; without a seed the answers differ; the next call has nothing of this one."
    prompt = "Once upon a time"
    params = dict(max_tokens=12, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    alone = [llm.generate(prompt, SamplingParams(seed=5 + i, **params), use_tqdm=False)[0] for i in range(3)]
    both = llm.generate([prompt, "One, two"], [SamplingParams(seed=5, n=3, **params), SamplingParams(n=2, max_tokens=20, ignore_eos=True)], use_tqdm=False)
    assert [o.prompt for o in both] == [prompt, "One, two"] and all(o.finished for o in both)
    assert [c.index for c in both[0].outputs] == [0, 1, 2]
    for a, c in zip(alone, both[0].outputs):
        assert (a.outputs[0].text, a.outputs[0].token_ids) == (c.text, c.token_ids)
        assert a.outputs[0].cumulative_logprob == pytest.approx(c.cumulative_logprob, abs=1e-4)
    assert [p and list(p) for p in both[0].prompt_logprobs] == [p and list(p) for p in alone[0].prompt_logprobs]
    assert both[1].outputs[0].token_ids != both[1].outputs[1].token_ids


@pytest.mark.parametrize("k", [0, 1, 5, -1])
def test_m8_values(llm, tiny_llama, k):
    "Against transformers' log_softmax: the raw ones, whatever temperature and top_k say. Ranks, numbers of entries, texts."
    from transformers import AutoModelForCausalLM
    o = llm.generate("One, two, three", SamplingParams(logprobs=k, prompt_logprobs=k, temperature=1.7, top_k=9, seed=3, max_tokens=8, ignore_eos=True), use_tqdm=False)[0]
    c = o.outputs[0]
    ids = o.prompt_token_ids + c.token_ids
    want = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)(torch.tensor([ids])).logits[0].log_softmax(-1)
    vocab = want.shape[1]
    positions = [*o.prompt_logprobs, *c.logprobs]
    assert positions[0] is None and len(positions) == len(ids) and len(c.logprobs) == len(c.token_ids)
    for i, p in enumerate(positions[1:], 1):
        row = want[i - 1]
        assert next(iter(p)) == ids[i] and len(p) in {0: {1}, 1: {1, 2}, 5: {5, 6}, -1: {vocab}}[k]
        assert all(e.logprob == pytest.approx(row[t].item(), abs=2e-3) for t, e in p.items())
        assert abs(p[ids[i]].rank - int((row >= row[ids[i]]).sum())) <= 1            # a tie in float32 may fall either way
        if k == 5: assert sorted(e.rank for t, e in p.items())[:5] == [1, 2, 3, 4, 5]
        if k == -1: assert sum(math.exp(e.logprob) for e in p.values()) == pytest.approx(1, abs=1e-4)
    assert c.cumulative_logprob == pytest.approx(sum(p[t].logprob for p, t in zip(c.logprobs, c.token_ids)))
    if "\ufffd" not in c.text: assert "".join(decoded(c.logprobs)) == c.text


@pytest.mark.parametrize("flat", [False, True])
def test_m8_streams_hold_the_same(llm, flat):
    "The real core: deltas joined, cumulative, final, flat or nested are one and the same."
    engine, results = llm.llm_engine, {}
    for kind in KINDS:
        for n in (1, 3):
            params = SamplingParams(n=n, seed=1, logprobs=3, prompt_logprobs=2, flat_logprobs=flat, max_tokens=9, ignore_eos=True, output_kind=kind)
            engine.add_request(f"{kind.name}{n}", "The future of computing", params)
    while engine.has_unfinished_requests():
        for o in engine.step(10.0):
            if o.request_id in results: results[o.request_id].add(o, aggregate=o.request_id.startswith("DELTA"))
            else: results[o.request_id] = o
    nested = llm.generate("The future of computing", SamplingParams(n=3, seed=1, logprobs=3, prompt_logprobs=2, max_tokens=9, ignore_eos=True), use_tqdm=False)[0]
    for name, o in results.items():
        assert o.finished and len(o.outputs) == int(name[-1])
        same_prompt = [p and list(p) for p in nested.prompt_logprobs]
        assert [p and list(p) for p in o.prompt_logprobs] == same_prompt
        for mine, theirs in zip(o.outputs, nested.outputs):
            assert (mine.index, mine.text, mine.token_ids, mine.finish_reason) == (theirs.index, theirs.text, theirs.token_ids, theirs.finish_reason)
            assert type(mine.logprobs) is (FlatLogprobs if flat else list)
            for a, b in zip(mine.logprobs, theirs.logprobs, strict=True):
                assert {t: (e.rank, e.decoded_token) for t, e in a.items()} == {t: (e.rank, e.decoded_token) for t, e in b.items()}
            assert mine.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-4)


def test_i2_nothing_of_a_failed_call_shows_up_in_the_next(llm):
    "A list whose third prompt is too long, n>1 in it, then calls of all sizes: each gets exactly its own, in order."
    greedy = dict(max_tokens=4, ignore_eos=True)
    texts = {w: [c.token_ids for c in llm.generate(w, SamplingParams(seed=2, n=2, **greedy), use_tqdm=False)[0].outputs] for w in ("One", "Wo", "Hello")}
    for round_ in range(12):
        with pytest.raises(ValueError, match="2"):
            llm.generate(["One", "Wo", "word " * 400, "Hello"], SamplingParams(n=3, **greedy), use_tqdm=False)
        assert is_empty(llm.llm_engine.output_processor)
        llm.llm_engine.add_request("given up", "One", SamplingParams(n=2, max_tokens=200, ignore_eos=True))
        for _ in range(round_ % 3): llm.llm_engine.step(10.0)
        llm.llm_engine.abort_request(["given up"])
        words = random.Random(round_).choices(list(texts), k=1 + round_ % 4)
        outs = llm.generate(words, SamplingParams(seed=2, n=2, **greedy), use_tqdm=False)
        assert [(o.prompt, [c.token_ids for c in o.outputs]) for o in outs] == [(w, texts[w]) for w in words]
