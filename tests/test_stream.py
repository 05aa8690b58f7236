"""`LLM.stream`, calls that interleave, and chat: everyone gets their own outputs, whole and in order, whatever happens around them."""
import gc, os, signal, threading, time

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from life_tools import assert_drained, fake_llm, params, run_script, tokens_of
from litevllm import LLM, EngineArgs, EngineDeadError, RequestOutput, SamplingParams
from litevllm.engine.shared_engine import hold_interrupts
from litevllm.sampling_params import RequestOutputKind
from litevllm.tiny import write_tiny_model

pytestmark = pytest.mark.timeout(90)
ARGS = dict(num_gpu_blocks_override=128, attention_backend="TORCH_REF", max_num_seqs=16)
PROMPTS = ["Once upon a time", [5, 6, 7], {"prompt": "Hello, my name is"}, {"prompt_token_ids": [9, 8, 7, 6], "prompt": "four ids"}]
GREEDY = dict(temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_llama):
    "In this process, where every table of the core can be looked at afterwards."
    with pytest.MonkeyPatch.context() as m:
        m.setenv("LITEVLLM_ENABLE_MULTIPROCESSING", "0")
        llm = LLM(tiny_llama, **ARGS)
    with llm: yield llm


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    yield
    if "llm" in request.fixturenames: assert_drained(request.getfixturevalue("llm"))


@pytest.fixture
def fake(monkeypatch):
    with fake_llm() as llm:
        yield llm
        assert_drained(llm)


def ids_of(outputs): return [list(o.outputs[0].token_ids) for o in outputs]


def join(stream):
    "Per request, in the order of the prompts: text, token ids and last output of each index."
    seen = {r: {} for r in stream.request_ids}
    for out in stream:
        assert isinstance(out, RequestOutput) and not any(last.finished for _, _, last in seen[out.request_id].values())
        for c in out.outputs:
            text, ids, _ = seen[out.request_id].get(c.index, ("", [], None))
            seen[out.request_id][c.index] = text + c.text, ids + list(c.token_ids), out
    return [[seen[r][i] for i in sorted(seen[r])] for r in stream.request_ids]


# ---- what comes out -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kw", [dict(max_tokens=12, **GREEDY), dict(max_tokens=12, temperature=1.0, seed=3), dict(max_tokens=40, stop=["e", "an"], **GREEDY),
                                dict(max_tokens=9, temperature=1.0, seed=4, n=3, ignore_eos=True), dict(max_tokens=1, **GREEDY)], ids=str)
def test_joined_deltas_are_what_generate_returns(llm, kw):
    want = llm.generate(PROMPTS, SamplingParams(**kw), use_tqdm=False)
    got = join(llm.stream(PROMPTS, SamplingParams(**kw)))
    assert [[(c.text, list(c.token_ids)) for c in o.outputs] for o in want] == [[(text, ids) for text, ids, _ in answers] for answers in got]
    for o, answers in zip(want, got):
        last = answers[-1][2]
        assert (o.prompt, o.prompt_token_ids, len(o.outputs)) == (last.prompt, last.prompt_token_ids, kw.get("n", 1)) == (o.prompt, o.prompt_token_ids, len(answers))


def test_the_kind_of_output(llm):
    kinds = lambda kind: [o for o in llm.stream(PROMPTS[0], SamplingParams(max_tokens=6, output_kind=kind, **GREEDY))]
    deltas, final = kinds(RequestOutputKind.DELTA), kinds(RequestOutputKind.FINAL_ONLY)
    assert len(deltas) > 1 and len(final) == 1 and "".join(o.outputs[0].text for o in deltas) == final[0].outputs[0].text
    assert [o.finished for o in deltas] == [False] * (len(deltas) - 1) + [True]
    mine = SamplingParams(max_tokens=6, **GREEDY)
    assert [o.outputs[0].text for o in llm.stream(PROMPTS[0], mine)] == [o.outputs[0].text for o in deltas]
    assert mine.output_kind is RequestOutputKind.CUMULATIVE     # the caller's object is not touched
    assert len(list(llm.stream(PROMPTS[0]))) > 0                # the model's own defaults
    assert list(llm.stream([])) == []


def test_a_bad_prompt_fails_alone(llm):
    prompts = [[5, 6, 7], [1] * 400, [9], [], [5, 999], {"prompt": 3}, 4.5, "good"]
    want = ids_of(llm.generate([prompts[0], prompts[2], prompts[7]], params(4, temperature=0), use_tqdm=False))
    stream = llm.stream(prompts, params(4, temperature=0))
    got = [answers[0] for answers in join(stream)]
    for i, words in {1: ["400", "256"], 3: ["empty"], 4: ["999", "512"], 5: ["prompt"], 6: ["float"]}.items():
        out = got[i][2]
        assert out.finished and out.outputs[0].finish_reason == "error" and all(w in out.error for w in [f"prompts[{i}] (of 8)", *words]), out.error
    assert [got[i][1] for i in (0, 2, 7)] == want and got[0][2].error is None
    [only] = llm.stream([1] * 300)
    assert only.outputs[0].finish_reason == "error" and "300" in only.error and "prompts[" not in only.error


@pytest.mark.parametrize("call", ["generate", "stream"])
def test_a_call_that_is_wrong_as_a_whole_raises_at_once(llm, call):
    f, p = getattr(llm, call), SamplingParams(max_tokens=1)
    for args, error, word in [((["a", "b"], [p] * 3), ValueError, "2 prompts, but 3"), (("a", 5), TypeError, "int"), (("a", "b"), TypeError, "str"),
                              ((["a"], [None]), TypeError, "NoneType"), ((5,), TypeError, "int"), ((None,), TypeError, "None"), (({"a", "b"},), TypeError, "set"),
                              ((b"abc",), TypeError, "bytes"), ((["a"], {0: p}), TypeError, "dict")]:
        with pytest.raises(error, match=word): f(*args)
    with pytest.raises(ValueError, match="2 prompts, but 1 priorities"): f(["a", "b"], p, priority=[1])
    with pytest.raises(TypeError, match="temprature"): f("a", p, temprature=3)
    assert llm.llm_engine.get_num_unfinished_requests() == 0


def test_constructor_arguments(tiny_llama, monkeypatch):
    monkeypatch.setenv("LITEVLLM_ENABLE_MULTIPROCESSING", "0")
    with pytest.raises(TypeError, match="model"): LLM(None)
    with pytest.raises(TypeError, match="EngineArgs"): LLM.from_engine_args({"model": tiny_llama})
    with LLM.from_engine_args(EngineArgs(tiny_llama, **ARGS)) as llm:
        with pytest.raises(ValueError, match="lora_request"): llm.generate("a", lora_request=object())
        assert len(llm.generate(("a", "b"), None, False)) == 2       # use_tqdm by position, as scripts for older vLLM do


# ---- ends before its time ---------------------------------------------------------------------------------------------------------

def test_abort_one_twice_all_and_unknown(fake):
    stream = fake.stream([[7], [8], [9]], params(5000))
    one, two, three = stream.request_ids
    seen, ends = {r: [] for r in stream.request_ids}, {}
    def read(until):
        for out in stream:
            seen[out.request_id] += out.outputs[0].token_ids
            if out.finished: ends[out.request_id] = out.outputs[0].finish_reason
            if until(): return
    read(lambda: all(len(t) > 3 for t in seen.values()))
    for ids in (one, one, "nobody", "12345"): stream.abort(ids)
    read(lambda: one in ends)
    n = len(seen[two])
    read(lambda: len(seen[two]) > n + 3)            # the others go on
    assert ends == {one: "abort"}
    stream.abort()
    stream.abort()
    read(lambda: False)                             # ends by itself
    assert ends == dict.fromkeys(stream.request_ids, "abort")
    for r, first in zip(stream.request_ids, (7, 8, 9)): assert seen[r] == tokens_of(first, 1, len(seen[r])) and len(seen[r]) < 5000
    assert list(stream) == []
    stream.abort(three)
    stream.close()


@pytest.mark.parametrize("how", ["close", "with", "del", "break", "exception", "never read", "cycle"])
def test_a_stream_that_is_left_is_aborted(fake, how):
    stream = fake.stream([[7], [8], []], params(100_000))
    if how == "close":
        next(stream)
        stream.close()
        assert list(stream) == [] and next(stream, None) is None
    elif how == "with":
        with pytest.raises(LookupError), stream:
            next(stream)
            raise LookupError
        assert list(stream) == []
    elif how == "exception":
        with pytest.raises(LookupError):
            for _ in stream: raise LookupError
    elif how == "break":
        for _ in stream: break
    elif how == "cycle": stream.itself = stream
    del stream
    gc.collect()
    assert_drained(fake)
    assert ids_of(fake.generate([[5]], params(3), use_tqdm=False)) == [tokens_of(5, 1, 3)]


def test_the_stream_keeps_its_llm_and_outlives_other_references():
    stream = fake_llm().stream([[7]], params(50))
    gc.collect()
    assert [t for o in stream for t in o.outputs[0].token_ids] == tokens_of(7, 1, 50)


def test_a_finalizer_never_waits_for_the_lock(fake):
    "The collector may run in the very thread that holds the engine."
    stream = fake.stream([[7], [8]], params(100_000))
    next(stream)
    with fake._shared:
        before = time.monotonic()
        del stream
        assert time.monotonic() - before < 1 and fake.llm_engine.has_unfinished_requests()
    assert not fake.llm_engine.has_unfinished_requests()    # seen to when the engine was let go


def test_the_core_stops_for_a_forgotten_stream_before_the_engine_is_used_again(fake):
    stream, core = fake.stream([[7], [8]], params(100_000)), fake.llm_engine.engine_core
    next(stream)
    assert core.get_request_counts() == (2, 0)
    del stream
    end = time.monotonic() + 5
    while core.get_request_counts() != (0, 0): assert time.monotonic() < end


def test_streams_that_are_made_and_forgotten_while_another_thread_works(fake):
    "The engine is let go many times between the making of a stream and its first request, and between its end and the collector."
    enough = threading.Event()
    def generate():
        while not enough.is_set(): fake.generate([[9]], params(3), use_tqdm=False)
    worker = threading.Thread(target=generate)
    worker.start()
    process = fake.llm_engine.input_processor.process_inputs
    def slowly(*args, **kw):
        time.sleep(0.01)                   # a long text
        return process(*args, **kw)
    fake.llm_engine.input_processor.process_inputs = slowly
    try:
        for k in range(20):
            stream = fake.stream([[k + 1]], params(100_000))
            next(stream)
            del stream
    finally:
        fake.llm_engine.input_processor.process_inputs = process
        enough.set()
        worker.join(10)
    assert_drained(fake)


def test_signals_that_are_held(monkeypatch):
    "All of them act, in order, though one raises; a handler that a handler set stays; a nested block delivers nothing; a fork is not held."
    got, was = [], signal.getsignal(signal.SIGINT)
    def first(*_):
        got.append("first")
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        monkeypatch.setattr(hold_interrupts, "_current", None)
        signal.signal(signal.SIGUSR1, lambda *_: got.append("usr1"))
        with pytest.raises(KeyboardInterrupt), hold_interrupts() as outer:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGUSR1)
            with hold_interrupts() as inner: inner.deliver()
            got.append("inside")
            if (pid := os.fork()) == 0:
                try: signal.raise_signal(signal.SIGINT)
                except KeyboardInterrupt: os._exit(7)
                os._exit(1)
            got.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            outer.deliver()
        assert got == ["inside", 7, "usr1"]
        signal.signal(signal.SIGINT, first)
        with hold_interrupts(): signal.raise_signal(signal.SIGINT)
        assert got[-1] == "first" and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        signal.signal(signal.SIGINT, was)


SIGNALS = """
    import gc, os, random, signal, sys, time
    from life_tools import *
    seed = int(time.time()) % 10**6
    print("seed", seed)
    random.seed(seed)
    sys.unraisablehook = lambda _: None          # what a callback of the collector raises is printed, not raised
    class Late(Exception): pass
    def late(*_): raise Late
    llm, caught = fake_llm(), 0
    def rounds(n, longest, use):
        global caught
        for _ in range(n):
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, longest))
                use()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except (KeyboardInterrupt, Late): caught += 1
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        assert llm.generate([[5, 5]], params(2), use_tqdm=False)[0].outputs[0].token_ids == tokens_of(5, 2, 2)
        assert caught > n / 10, caught
        gc.collect()                             # an exception may keep a frame, and that a stream
        assert_drained(llm)
        llm.close()
        print("fine")
"""


@pytest.mark.parametrize("mode", ["0", "1"])
def test_ctrl_c_while_a_forgotten_stream_is_collected(mode):
    out = run_script(SIGNALS + """
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    def use():
        s = llm.stream([[7, 1]], params(3))
        next(s)
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 60e-6))
        del s
        for _ in range(3000): pass
    rounds(300, 1, use)
""", LITEVLLM_ENABLE_MULTIPROCESSING=mode)
    assert "fine" in out


@pytest.mark.parametrize("mode", ["0", "1"])
def test_a_time_limit_by_alarm_may_strike_anywhere(mode):
    "Any signal's handler may raise, and generate() cleans up all the same."
    out = run_script(SIGNALS + """
    signal.signal(signal.SIGALRM, late)
    rounds(300, 12e-3, lambda: llm.generate([[7, 1], [8, 2]], params(4), use_tqdm=False))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
""", LITEVLLM_ENABLE_MULTIPROCESSING=mode)
    assert "fine" in out


@pytest.mark.parametrize("two", [False, True])
def test_a_stream_in_a_cycle_is_collected_at_any_moment(two):
    "In-process: inside of a pool's submit(), which holds a lock of the whole process, and in the thread of another engine."
    out = run_script(f"""
        from concurrent.futures import ThreadPoolExecutor
        from life_tools import *
        one, pool = fake_llm(), ThreadPoolExecutor(1)
        other = fake_llm() if {two} else None
        for _ in range(40):
            stream = one.stream([[7, 1]], params(2000))
            next(stream)
            cycle = [stream]
            cycle.append(cycle)
            del stream, cycle
            if other: other.generate([[7, 1]] * 8, params(10), use_tqdm=False)
            for f in [pool.submit(int) for _ in range(300)]: f.result()
        import gc
        gc.collect()
        assert_drained(one)
        print("fine")
    """, LITEVLLM_ENABLE_MULTIPROCESSING="0")
    assert "fine" in out


def test_closing_while_others_wait(fake):
    "generate() in a thread, a stream here: both are told."
    box, stream = [], fake.stream([[8]], params(500_000))
    def run():
        try: fake.generate([[7]], params(500_000), use_tqdm=False)
        except BaseException as e: box.append(e)
    t = threading.Thread(target=run)
    t.start()
    next(stream)
    time.sleep(0.1)
    closer = fake_llm()     # the fixture looks at the other one when all is over
    closer_box = []
    def run2():
        try: closer.generate([[7]], params(500_000), use_tqdm=False)
        except BaseException as e: closer_box.append(e)
    other, t2 = closer.stream([[8]], params(500_000)), threading.Thread(target=run2)
    t2.start()
    next(other)
    time.sleep(0.1)
    closer.close()
    t2.join(10)
    assert isinstance(closer_box[0], EngineDeadError) and "was shut down" in str(closer_box[0])
    with pytest.raises(EngineDeadError, match="was shut down"):
        for _ in other: pass
    with pytest.raises(RuntimeError, match="closed"): closer.generate([[7]])
    with pytest.raises(RuntimeError, match="closed"): closer.stream([[7]])
    stream.close()
    assert not box and t.is_alive()     # the first LLM is another
    fake.llm_engine.abort_request(list(fake.llm_engine.output_processor.request_states), internal=True)
    t.join(10)
    assert not box


def test_in_process_closing_tells_who_waits(monkeypatch):
    monkeypatch.setenv("LITEVLLM_ENABLE_MULTIPROCESSING", "0")
    llm, box = fake_llm(), []
    def run():
        try: llm.generate([[7]], params(500_000), use_tqdm=False)
        except BaseException as e: box.append(e)
    t = threading.Thread(target=run)
    t.start()
    time.sleep(0.2)
    llm.close()
    t.join(10)
    assert isinstance(box[0], EngineDeadError) and "was shut down" in str(box[0])


# ---- calls that interleave ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("mp", ["1", "0"])
def test_calls_inside_a_loop_over_a_stream(mp, monkeypatch):
    monkeypatch.setenv("LITEVLLM_ENABLE_MULTIPROCESSING", mp)
    with fake_llm() as llm:
        outer, other, seen = llm.stream([[7], [8]], params(60)), llm.stream([9, 9], params(100)), {"0": [], "1": []}
        for k, out in enumerate(outer):
            seen[out.request_id] += out.outputs[0].token_ids
            if k % 10 == 3: assert ids_of(llm.generate([[20 + k], [k] * 5], params(4), use_tqdm=False)) == [tokens_of(20 + k, 1, 4), tokens_of(k, 5, 4)]
            if k % 10 == 5:
                for inner in llm.stream([[3], [4]], params(1000)): break
        assert list(seen.values()) == [tokens_of(7, 1, 60), tokens_of(8, 1, 60)]
        assert [t for o in other for t in o.outputs[0].token_ids] == tokens_of(9, 2, 100)
        del inner
        assert_drained(llm)


def test_four_threads_and_a_stream_are_as_one_after_the_other(llm):
    jobs = [[[k + 1, j + 2, 3 * j + k] for j in range(3)] for k in range(5)]
    sp = params(24, temperature=1.0, seed=7)
    want = [ids_of(llm.generate(job, sp, use_tqdm=False)) for job in jobs]
    got, errors = [[] for _ in jobs], []
    def work(k):
        try:
            for _ in range(3): got[k].append(ids_of(llm.generate(jobs[k], sp, use_tqdm=False)))
        except BaseException as e: errors.append(e)
    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads: t.start()
    while any(t.is_alive() for t in threads) or not got[4]:
        got[4].append([answers[0][1] for answers in join(llm.stream(jobs[4], sp))])
    for t in threads: t.join()
    assert not errors and all(g == want[k] for k in range(5) for g in got[k]) and all(len(g) == 3 for g in got[:4])


def test_nobody_starves_at_the_door(fake):
    "A thread that streams takes the lock again as soon as it lets go; ten short calls must get their turns all the same."
    stop = threading.Event()
    def run():
        for _ in fake.stream([[7]], params(100_000)):
            if stop.is_set(): return
    t = threading.Thread(target=run)
    t.start()
    time.sleep(0.1)
    start = time.monotonic()
    for k in range(10): assert ids_of(fake.generate([[k + 1]], params(2), use_tqdm=False)) == [tokens_of(k + 1, 1, 2)]
    took = time.monotonic() - start
    stop.set()
    t.join(10)
    assert took < 10 * 0.4, took


@pytest.mark.parametrize("mp", ["1", "0"])
def test_i2_interrupts_lose_nothing_of_an_open_stream(mp):
    "Ctrl-C at random moments, twice in a row at times, also while generate() runs in the middle: the stream's tokens are all there."
    seed = time.time_ns() % 10_000
    out = run_script(f"""
        import os, random, signal, threading
        from life_tools import *
        print("seed", {seed})
        rng, llm, armed = random.Random({seed}), fake_llm(), threading.Semaphore(0)
        def fire():
            for _ in range(40):
                armed.acquire()
                time.sleep(rng.uniform(0, 0.02))
                for _ in range(1 + (rng.random() < 0.3)): os.kill(os.getpid(), signal.SIGINT)
        firing = threading.Thread(target=fire)
        firing.start()
        stream, tokens, interrupted, k = llm.stream([[7]], params(800)), [], 0, 0
        def attempt():
            global tokens
            armed.release()
            if k % 3 == 0:
                outs = llm.generate([[5, 5]], params(3), use_tqdm=False)
                assert [o.outputs[0].token_ids for o in outs] == [tokens_of(5, 2, 3)]
                llm.generate([[5, 5], [6]], params(300), use_tqdm=False)
            for out in stream: tokens += out.outputs[0].token_ids
            while firing.is_alive(): time.sleep(0.01); armed.release()
        while True:
            k += 1
            try:
                try: attempt()
                except KeyboardInterrupt: interrupted += 1
                else: break
            except KeyboardInterrupt: interrupted += 1      # the second of two
        assert tokens == tokens_of(7, 1, 800), (len(tokens), tokens[:5])
        assert_drained(llm)
        print("interrupted", interrupted)
        """, LITEVLLM_ENABLE_MULTIPROCESSING=mp)
    assert int(out.split()[-1]) > 20, out


def test_a_handler_of_the_callers_own_is_respected(fake):
    hits = []
    old = signal.signal(signal.SIGINT, lambda *args: hits.append(args))
    try:
        threading.Timer(0.05, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)).start()
        assert ids_of(fake.generate([[7]], params(100), use_tqdm=False)) == [tokens_of(7, 1, 100)]
        assert len(hits) == 1 and signal.getsignal(signal.SIGINT) is not old
    finally: signal.signal(signal.SIGINT, old)


# ---- chat (case L4) -----------------------------------------------------------------------------------------------------------------

BOS_TEMPLATE = ("{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}</s>{% endfor %}"
                "{% if add_generation_prompt %}[assistant]{% endif %}")


def sentence_tokenizer(kind):
    "Llama-like: `<s>` goes before every text, and the template writes it too. kind: 'bytes' or 'metaspace'."
    tok = Tokenizer(models.BPE(unk_token=None if kind == "bytes" else "<unk>"))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False) if kind == "bytes" else pre_tokenizers.Metaspace()
    tok.decoder = decoders.ByteLevel() if kind == "bytes" else decoders.Metaspace()
    alphabet = pre_tokenizers.ByteLevel.alphabet() if kind == "bytes" else []
    tok.train_from_iterator(["[user] hello there [assistant] what is a block of cache?"] * 3,
                            trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=alphabet, show_progress=False))
    tok.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tok, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=BOS_TEMPLATE)


@pytest.fixture(scope="module", params=["tiny", "bytes", "metaspace", "none"])
def chat_llm(request, tmp_path_factory):
    "In this process: an LLM with one of three tokenizers, or with one that has no template."
    path = write_tiny_model(tmp_path_factory.mktemp("chat") / request.param, chat_template=None) if request.param == "none" else \
        write_tiny_model(tmp_path_factory.mktemp("chat") / request.param)
    if request.param in ("bytes", "metaspace"): sentence_tokenizer(request.param).save_pretrained(path)
    with pytest.MonkeyPatch.context() as m:
        m.setenv("LITEVLLM_ENABLE_MULTIPROCESSING", "0")
        with LLM(path, **ARGS) as llm:
            llm.kind = request.param
            yield llm


USER = [{"role": "user", "content": "hello there"}]
TURNS = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "what is"}]


def test_l4_chat_ids_are_the_templates_and_generate_keeps_its_rule(chat_llm):
    llm, tok, sp = chat_llm, chat_llm.get_tokenizer(), params(2, temperature=0)
    if llm.kind == "none":
        for call in (llm.chat, llm.stream_chat):
            with pytest.raises(ValueError, match="chat template"): call(USER, sp)
        [out] = llm.chat(USER, sp, False, chat_template=BOS_TEMPLATE)
        assert out.prompt.startswith(tok.bos_token + "[user] hello there")
    for kw, conversation in ((dict(add_generation_prompt=True), USER), (dict(add_generation_prompt=False), TURNS),
                             (dict(add_generation_prompt=False, continue_final_message=True), TURNS)):
        if llm.kind == "none": kw["chat_template"] = BOS_TEMPLATE
        want = tok.apply_chat_template(conversation, tokenize=True, return_dict=False, **kw)
        [out] = llm.chat(conversation, sp, use_tqdm=False, **kw)
        assert out.prompt_token_ids == want and out.prompt == tok.apply_chat_template(conversation, tokenize=False, **kw)
        assert out.prompt_token_ids[:2].count(tok.bos_token_id) == 1      # one BOS, not two
        *_, last = llm.stream_chat(conversation, sp, **kw)
        assert last.prompt_token_ids == want
    # the rule for generate(): special tokens are added, always; also to a text that begins with one
    for text in ("hello there", tok.bos_token + "hello"):
        [out] = llm.generate(text, sp, use_tqdm=False)
        assert out.prompt_token_ids == tok(text).input_ids
        assert out.prompt_token_ids.count(tok.bos_token_id) == (llm.kind in ("bytes", "metaspace")) + text.startswith(tok.bos_token)
        [bare] = llm.generate(text, sp, use_tqdm=False, tokenization_kwargs={"add_special_tokens": False})
        assert bare.prompt_token_ids == tok(text, add_special_tokens=False).input_ids


def test_chat_contents_and_arguments(llm):
    sp = params(1, temperature=0)
    plain = llm.chat([{"role": "user", "content": "one\ntwo"}], sp, False)[0].prompt_token_ids
    parts = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    assert llm.chat(parts, sp, use_tqdm=False)[0].prompt_token_ids == plain
    assert "'type': 'text'" in llm.chat(parts, sp, use_tqdm=False, chat_template_content_format="openai")[0].prompt
    template = "{{ greeting }} {{ tools[0]['name'] if tools else '-' }} {% for m in messages %}{{ m.content }}{% endfor %}"
    [out] = llm.chat(USER, sp, False, None, template, "auto", True, False, [{"name": "clock"}], {"greeting": "Ahoy"})   # vLLM's order
    assert out.prompt == "Ahoy clock hello there"
    [cut] = llm.chat(USER, sp, use_tqdm=False, tokenization_kwargs={"truncate_prompt_tokens": 3})
    assert len(cut.prompt_token_ids) == 3
    both = llm.chat([USER, parts], sp, use_tqdm=False)
    assert [o.prompt_token_ids for o in both] == [llm.chat(USER, sp, use_tqdm=False)[0].prompt_token_ids, plain]
    assert llm.chat([], sp, use_tqdm=False) == []
    tool = [*USER, {"role": "assistant", "content": None, "tool_calls": []}]
    for bad, word in [([USER, []], r"messages\[1\] \(of 2 conversations\): a conversation has no messages"), ([{"content": "x"}], "role"), (tool, "content"),
                      ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "image_url"), ([{"role": "user", "content": 3}], "content")]:
        for call in (llm.chat, llm.stream_chat):
            with pytest.raises(ValueError, match=word): call(bad, sp)
    with pytest.raises(TypeError, match="messages"): llm.chat("hello")
    with pytest.raises(ValueError, match="contradict"): llm.chat(USER, continue_final_message=True)
    with pytest.raises(ValueError, match="refuses"): llm.chat(USER, chat_template="{{ raise_exception('no') }}")
    with pytest.raises(ValueError, match="content_format"): llm.chat(USER, chat_template_content_format="html")
