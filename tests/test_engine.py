"""The whole path: stops, errors, interrupts, poisoned memory, speculation, the interpreted Triton kernels through the child."""
import random
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace

import pytest

from life_tools import run_script
from litevllm import LLM, SamplingParams
from litevllm.config import EngineArgs, SchedulerConfig
from litevllm.engine.llm_engine import LLMEngine
from litevllm.messages import EngineCoreRequest
from litevllm.tiny import write_tiny_model

SEED = 7


@pytest.fixture(scope="module")
def tiny(tmp_path_factory): return write_tiny_model(str(tmp_path_factory.mktemp("engine") / "llama"), "llama")


@pytest.fixture
def llm(tiny, monkeypatch):
    monkeypatch.setenv("LITEVLLM_ENABLE_MULTIPROCESSING", "0")
    with LLM(tiny) as llm:
        yield llm
        assert_drained(llm)


def scheduler(llm): return llm.llm_engine.engine_core.engine_core.scheduler


def assert_drained(llm):
    "After all requests end: nothing running, nothing waiting, every block free, no row, no per-request entry in front or core."
    s = scheduler(llm)
    assert s.get_request_counts() == (0, 0) and not s.requests
    pool = s.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    assert not llm.llm_engine.output_processor.has_unfinished_requests()


def greedy(n=8, **kw): return SamplingParams(temperature=0, max_tokens=n, **{"ignore_eos": True, **kw})


def one(llm, prompt, params): return llm.generate([prompt], params, use_tqdm=False)[0]


def tokens(out): return list(out.outputs[0].token_ids)


PROMPT = [5, 6, 7, 8, 9, 10, 11]


def test_request_output_has_vllms_fields(llm):
    out = one(llm, "hello world", greedy(4))
    assert out.prompt == "hello world" and out.finished and out.prompt_token_ids == llm.get_tokenizer()("hello world").input_ids
    c = out.outputs[0]
    assert (c.index, c.finish_reason, c.stop_reason, len(c.token_ids)) == (0, "length", None, 4)
    assert c.text == llm.get_tokenizer().decode(list(out.prompt_token_ids) + list(c.token_ids))[len("hello world"):]


def test_s40_stop_token_id(llm):
    free = tokens(one(llm, PROMPT, greedy(8)))
    stop = free[3]
    at = free.index(stop)
    out = one(llm, PROMPT, greedy(8, stop_token_ids=[stop]))
    assert tokens(out) == free[:at + 1] and (out.outputs[0].finish_reason, out.outputs[0].stop_reason) == ("stop", stop)


def test_s41_min_tokens_masks_the_stop_id(llm):
    free = tokens(one(llm, PROMPT, greedy(1)))
    out = one(llm, PROMPT, greedy(6, stop_token_ids=free, min_tokens=3))
    assert free[0] not in tokens(out)[:3] and len(tokens(out)) >= 3


def test_s44_stop_string_ends_the_request_in_the_core_too(llm):
    free = one(llm, "abc", greedy(24))
    text = free.outputs[0].text
    assert len(text) > 6, text
    stop = text[3:6]
    at = text.index(stop)
    out = one(llm, "abc", greedy(24, stop=[stop]))
    assert out.outputs[0].text == text[:at] and (out.outputs[0].finish_reason, out.outputs[0].stop_reason) == ("stop", stop)
    kept = one(llm, "abc", greedy(24, stop=[stop], include_stop_str_in_output=True))
    assert kept.outputs[0].text == text[:at] + stop


def test_s42_length_is_bounded_by_the_model(tiny, monkeypatch):
    monkeypatch.setenv("LITEVLLM_ENABLE_MULTIPROCESSING", "0")
    with LLM(tiny, max_model_len=20) as llm:
        out = one(llm, PROMPT, greedy(None))
        assert len(tokens(out)) == 20 - len(PROMPT) and out.outputs[0].finish_reason == "length"
        with pytest.raises(ValueError, match="20"): one(llm, list(range(3, 23)), greedy(1))
        assert_drained(llm)


def test_s58_second_time_hits_the_prefix_cache(llm):
    prompt = list(range(3, 20))
    first, second = one(llm, prompt, greedy(5)), one(llm, prompt, greedy(5))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 16) and tokens(first) == tokens(second)


def test_cache_salt_keeps_prompts_apart(llm):
    "Requests share blocks with those of the same salt only, from the first block on; the tokens are the same in any case."
    ids, text = list(range(3, 20)), "Once upon a time there was an engine that told stories"
    def ask(salt, what): return one(llm, {**what, **({} if salt is None else {"cache_salt": salt})}, greedy(5))
    for what, cached in (({"prompt_token_ids": ids}, 16), ({"prompt": text}, (len(llm.get_tokenizer()(text).input_ids) - 1) // 16 * 16)):
        assert cached > 0
        outs = [ask(salt, what) for salt in (None, "a", "a", "b", None, "a", "b", "c")]
        assert [o.num_cached_tokens for o in outs] == [0, 0, cached, 0, cached, cached, cached, 0] and len({tuple(tokens(o)) for o in outs}) == 1
        with pytest.raises(ValueError, match="cache_salt is an empty string"): ask("", what)
    assert llm.llm_engine.reset_prefix_cache()
    assert ask("a", {"prompt_token_ids": ids}).num_cached_tokens == 0


@pytest.mark.parametrize("bad, word", [([], "empty|at least"), ([1, 2, 600], "600"), (list(range(3, 400)), "256"), ("", "empty|at least")])
def test_a_bad_prompt_names_its_index_and_hurts_nobody(llm, bad, word):
    want = tokens(one(llm, PROMPT, greedy()))
    with pytest.raises(ValueError, match=word) as e: llm.generate([PROMPT, PROMPT, bad, PROMPT], greedy(), use_tqdm=False)
    assert "2" in str(e.value)
    assert_drained(llm)
    assert tokens(one(llm, PROMPT, greedy())) == want


def test_s02_s09_prompts_that_can_never_run_are_refused(tiny, monkeypatch):
    monkeypatch.setenv("LITEVLLM_ENABLE_MULTIPROCESSING", "0")
    with LLM(tiny, num_gpu_blocks_override=4, block_size=4) as llm:   # 3 usable blocks: 12 tokens
        with pytest.raises(ValueError, match=r"(?s)4.*3|3.*4"): one(llm, list(range(3, 16)), greedy(1))
        assert len(tokens(one(llm, PROMPT, greedy(4)))) == 4
        out = one(llm, PROMPT, greedy(30))                             # outgrows the pool: an error output, not a hang
        assert out.outputs[0].finish_reason == "error" and len(tokens(out)) >= 1 and "3" in out.error, out
        assert_drained(llm)
    with LLM(tiny, enable_chunked_prefill=False, max_num_batched_tokens=8, max_num_seqs=4) as llm:
        with pytest.raises(ValueError, match=r"(?s)9.*8|8.*9"): one(llm, list(range(3, 12)), greedy(1))
        assert len(tokens(one(llm, PROMPT, greedy(4)))) == 4
        assert_drained(llm)


@pytest.mark.parametrize("field", [dict(structured_outputs={"regex": "a"}), dict(thinking_token_budget=4), dict(repetition_detection={"min_count": 2}),
                                   dict(extra_args={"a": 1}), dict(routed_experts_prompt_start=1)])
def test_fields_that_do_not_act_yet_are_refused_by_name(llm, field):
    with pytest.raises(ValueError, match=next(iter(field))): one(llm, PROMPT, SamplingParams(max_tokens=2, **field))


def test_unknown_arguments_are_refused(tiny):
    with pytest.raises(TypeError, match="blok_size"): LLM(tiny, blok_size=16)
    with pytest.raises(TypeError, match="temprature"): SamplingParams(temprature=0)


def test_m1_a_seed_gives_the_same_tokens_in_any_company(llm):
    seeded = SamplingParams(temperature=1.0, seed=11, max_tokens=12, ignore_eos=True)
    alone = tokens(one(llm, PROMPT, seeded))
    other = SamplingParams(temperature=1.3, max_tokens=9, ignore_eos=True)
    for place in range(3):
        prompts, params = [[20 + i, 21, 22] for i in range(4)], [other] * 4
        prompts.insert(place, PROMPT), params.insert(place, seeded)
        assert tokens(llm.generate(prompts, params, use_tqdm=False)[place]) == alone
    assert tokens(one(llm, PROMPT, SamplingParams(temperature=1.0, seed=12, max_tokens=12, ignore_eos=True))) != alone


def test_n2_nan_in_every_block_nobody_owns(tiny, llm):
    want = [tokens(one(llm, list(range(3, 3 + n)), greedy(20))) for n in (1, 15, 16, 17)]
    llm.reset_prefix_cache()
    runner = llm.llm_engine.engine_core.engine_core.model_executor.worker.model_runner
    for layer in runner.vllm_config.compilation_config.static_forward_context.values(): layer.kv_cache.fill_(float("nan"))
    assert [tokens(one(llm, list(range(3, 3 + n)), greedy(20))) for n in (1, 15, 16, 17)] == want


class Scripted:
    "A proposer that knows the answer, and lies when told to: `kind` right, wrong, mixed; 0 to 3 drafts at random."
    def __init__(self, answers, prompts, kind, rng):
        self.answers, self.prompts, self.kind, self.rng, self.proposed = answers, prompts, kind, rng, 0

    def propose(self, req_ids, token_ids):
        return [self._one(list(map(int, ids))) for ids in token_ids]

    def _one(self, ids):
        which = max((k for k, p in enumerate(self.prompts) if ids[:len(p)] == p), key=lambda k: len(self.prompts[k]))
        done = len(ids) - len(self.prompts[which])
        drafts = self.answers[which][done:done + self.rng.randint(0, 3)]
        if self.kind == "wrong": drafts = [(t + 1) % 512 for t in drafts]
        if self.kind == "mixed" and drafts: drafts = drafts[:-1] + [(drafts[-1] + 1) % 512]
        self.proposed += len(drafts)
        return drafts


def run_engine(engine, prompts, params):
    "Token ids of all prompts, in order."
    done = {}
    for i, p in enumerate(prompts): engine.add_request(str(i), p, params)
    while engine.has_unfinished_requests(): done |= {o.request_id: tokens(o) for o in engine.step() if o.finished}
    return [done[str(i)] for i in range(len(prompts))]


@pytest.mark.parametrize("kind", ["right", "wrong", "mixed"])
def test_drafts_change_no_token(tiny, kind, monkeypatch):
    monkeypatch.setenv("LITEVLLM_ENABLE_MULTIPROCESSING", "0")
    print("seed", SEED)
    rng = random.Random(SEED)
    prompts = [[rng.randrange(3, 512) for _ in range(n)] for n in (1, 4, 9, 17)]
    config = EngineArgs(tiny, async_scheduling=False, block_size=4, enable_prefix_caching=False).create_engine_config()
    with LLM(tiny, async_scheduling=False) as llm: want = [tokens(o) for o in llm.generate(prompts, greedy(25), use_tqdm=False)]
    engine = LLMEngine.from_vllm_config(replace(config, scheduler_config=replace(config.scheduler_config, num_speculative_tokens=3)))
    try:
        core = engine.engine_core.engine_core
        proposer = core.model_executor.worker.model_runner.proposer = Scripted(want, prompts, kind, rng)
        sizes, update = [], core.scheduler.update_from_output

        def watched(plan, output):
            result = update(plan, output)
            if plan.total_num_scheduled_tokens: sizes.append(plan.total_num_scheduled_tokens)
            for r in core.scheduler.running:   # semantics 23: rejected drafts are taken back, their block may stay for the next ones
                held, computed = len(core.scheduler.kv_cache_manager.get_block_ids(r.request_id)), r.num_computed_tokens
                assert computed == r.num_tokens - 1 and -(-computed // 4) <= held <= -(-(computed + 3) // 4), (held, computed)
            return result
        core.scheduler.update_from_output = watched
        assert run_engine(engine, prompts, greedy(25)) == want and proposer.proposed > 20
        # right drafts save steps; wrong ones cost tokens and nothing else
        assert len(sizes) < 25 if kind == "right" else sum(sizes) > 25 * len(prompts) + sum(map(len, prompts)), sizes
        if kind == "wrong": assert len(sizes) == 25
        assert core.scheduler.get_request_counts() == (0, 0)
    finally:
        engine.close()


def test_drafts_with_async_scheduling_are_refused_by_name(tiny):
    with pytest.raises(ValueError, match="async_scheduling"): SchedulerConfig(64, 8, 64, async_scheduling=True, num_speculative_tokens=3)
    with pytest.raises((ValueError, TypeError), match="speculative_config"): LLM(tiny, speculative_config={"method": "ngram"})


def test_triton_kernels_interpreted_through_the_child(tiny):
    body = f"""
        from litevllm import LLM, SamplingParams
        with LLM({tiny!r}, attention_backend=BACKEND, max_model_len=64, num_gpu_blocks_override=12) as llm:
            outs = llm.generate([[5, 6, 7, 8, 9], list(range(3, 25))], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), use_tqdm=False)
            print([list(o.outputs[0].token_ids) for o in outs])
        """
    got, want = run_script(body.replace("BACKEND", "'TRITON_ATTN'"), TRITON_INTERPRET="1", timeout=150), run_script(body.replace("BACKEND", "'CPU_ATTN'"))
    assert got.splitlines()[-1] == want.splitlines()[-1] and got.count(",") >= 5


def test_i2_ctrl_c_in_the_middle_leaves_a_usable_engine(tiny, tmp_path):
    script = tmp_path / "script.py"   # no main guard
    script.write_text(textwrap.dedent(f"""
        import sys
        from litevllm import LLM, SamplingParams
        greedy = lambda n: SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)
        llm = LLM({tiny!r})
        want = llm.generate([[5, 6, 7]], greedy(6), use_tqdm=False)[0].outputs[0].token_ids
        print("ready", flush=True)
        try:
            while True: llm.generate([[5 + i, 6, 7] for i in range(64)], greedy(200), use_tqdm=False)
        except KeyboardInterrupt: print("interrupted", flush=True)
        outs = llm.generate([[5, 6, 7]], greedy(6), use_tqdm=False)
        assert len(outs) == 1 and outs[0].outputs[0].token_ids == want, outs
        assert llm.llm_engine.get_num_unfinished_requests() == 0
        counts = llm.llm_engine.engine_core.call_utility("get_request_counts")
        print("after", list(counts), flush=True)
        """))
    p = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert p.stdout.readline().strip() == "ready", p.stderr.read()
        time.sleep(0.5)
        p.send_signal(signal.SIGINT)
        out, err = p.communicate(timeout=60)
    finally:
        p.kill()
    assert p.returncode == 0, err
    assert out.split("\n")[:2] == ["interrupted", "after [0, 0]"], out + err


def test_s6_random_aborts_leave_nothing(tiny, monkeypatch):
    monkeypatch.setenv("LITEVLLM_ENABLE_MULTIPROCESSING", "0")
    print("seed", SEED)
    rng = random.Random(SEED)
    with LLM(tiny, num_gpu_blocks_override=40, block_size=4, max_num_seqs=8) as llm:
        engine = llm.llm_engine
        for round in range(40):
            ids = [f"{round}-{k}" for k in range(rng.randint(1, 12))]
            for i in ids: engine.add_request(i, {"prompt_token_ids": [rng.randrange(3, 512) for _ in range(rng.randint(1, 30))]}, greedy(rng.randint(1, 12)))
            while engine.has_unfinished_requests():
                engine.step()
                if rng.random() < .4:
                    victim = rng.choice(ids)
                    for _ in range(1 + (rng.random() < .2)): engine.abort_request([victim, "never-was"])
        # an abort's own flush is one more step of the core
        for _ in range(3): engine.engine_core.engine_core.step_fn()
        assert_drained(llm)
        assert len(tokens(one(llm, PROMPT, greedy(4)))) == 4


@pytest.mark.parametrize("mp", ["1", "0"])
def test_k2_a_preempted_request_that_outgrew_the_pool_ends(tiny, mp):
    "It fills the pool, shares its first blocks, is preempted, and the token in flight makes it one too large: it waited for ever once."
    got = run_script(f"""
        from litevllm import LLM, SamplingParams
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (6, 4)]
        with LLM({tiny!r}, num_gpu_blocks_override=9, block_size=4, max_model_len=128) as llm:
            for out in llm.generate([[71] * 8, [71] * 32], params, use_tqdm=False): print(out.outputs[0].finish_reason, out.error)
        """, LITEVLLM_ENABLE_MULTIPROCESSING=mp)
    first, second = got.splitlines()
    assert first == "length None" and second.startswith("error") and "needs 9 KV blocks of 4, the pool has 8" in second, got


@pytest.mark.parametrize("bad", [dict(ignore_eos=1), dict(max_tokens=True), dict(temperature=True), dict(stop_token_ids=[True]), dict(detokenize=0)])
def test_a_value_that_the_core_could_not_read_is_refused(llm, bad):
    with pytest.raises(TypeError, match=next(iter(bad))): one(llm, PROMPT, SamplingParams(**{"max_tokens": 2, **bad}))
    assert len(tokens(one(llm, PROMPT, greedy(4)))) == 4


@pytest.mark.parametrize("mp", ["1", "0"])
def test_a_raw_client_cannot_break_the_engine(tiny, mp, monkeypatch):
    monkeypatch.setenv("LITEVLLM_ENABLE_MULTIPROCESSING", mp)
    with LLM(tiny, max_model_len=64) as llm:
        core = llm.llm_engine.engine_core
        bad = {"long": [5] * 64, "minus": [-1], "over": [512], "huge": [2 ** 40], "float": [1.5], "none": []}
        for name, ids in bad.items(): core.add_request(EngineCoreRequest(name, ids, greedy(4), 0.0))
        core.add_request(EngineCoreRequest("stop", [5], greedy(4, stop_token_ids=[99999], min_tokens=2), 0.0))
        errors = {}
        while len(errors) < len(bad) + 1: errors |= {o.request_id: o.error for o in core.get_output().outputs}
        assert set(errors) == {*bad, "stop"} and all(errors.values()), errors
        assert len(tokens(one(llm, PROMPT, greedy(4)))) == 4
