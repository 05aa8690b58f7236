"""Life and death of an engine (cases I1, I2, I4, I5, S6): whoever is killed, interrupted, broken or forgotten, callers are told and nothing is left."""
import asyncio, contextlib, gc, os, random, shutil, signal, subprocess, sys, threading, time

import psutil, pytest

import ipc_fakes as fakes
from life_tools import (HERE, TermInAThread, assert_drained, cores, engine_of, fake_async_llm, fake_llm, params, pid_of, run_script, tokens_of, wait_until)
from litevllm import LLM, EngineArgs, EngineDeadError
from litevllm.engine.async_llm import AsyncLLM
from litevllm.sampling_params import RequestOutputKind
from litevllm.tiny import write_tiny_model

pytestmark = pytest.mark.timeout(90)
DELTA = RequestOutputKind.DELTA


def ids_of(outputs): return [list(o.outputs[0].token_ids) for o in outputs]


def in_thread(f):
    "Runs it; a list to which its result or exception, and when that was, are appended."
    box = []
    def run():
        try: box.append((f(), time.monotonic()))
        except BaseException as e: box.append((e, time.monotonic()))
    threading.Thread(target=run, daemon=True).start()
    return box


async def read(llm, prompt, request_id, sp): return [t async for o in llm.generate(prompt, sp, request_id) for t in o.outputs[0].token_ids]


# ---- I1: the child is killed --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("executor", [fakes.FakeExecutor, fakes.Deaf])
def test_i1_sigkill_while_generating(executor):
    "generate() in three threads, a stream in a fourth and one here: all are told within seconds, whether the child was in a step or not."
    with fake_llm(executor, async_scheduling=False) as llm:
        boxes = [in_thread(lambda k=k: llm.generate([[k], [k]], params(100_000), use_tqdm=False)) for k in range(3)]
        boxes.append(in_thread(lambda: list(llm.stream([[4]], params(100_000)))))
        mine = llm.stream([[5]], params(100_000))
        time.sleep(0.3)
        assert not any(boxes)
        killed = time.monotonic()
        os.kill(pid_of(llm), signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="SIGKILL") as first:
            for _ in mine: pass
        wait_until(lambda: all(boxes), 5, "every caller has an answer")
        for error, when in (box[0] for box in boxes):
            assert isinstance(error, EngineDeadError) and str(error) == str(first.value) and when - killed < 5
        for call in (lambda: llm.generate([[1]]), lambda: llm.stream([[1]]), lambda: next(mine), llm.reset_prefix_cache):
            start = time.monotonic()
            with pytest.raises(EngineDeadError, match="SIGKILL"): call()
            assert time.monotonic() - start < 0.5
        assert not engine_of(llm).has_unfinished_requests()
    assert not psutil.pid_exists(pid_of(llm))


def test_i1_sigkill_while_idle():
    with fake_llm() as llm:
        assert ids_of(llm.generate([[1]], params(3), use_tqdm=False)) == [tokens_of(1, 1, 3)]
        os.kill(pid_of(llm), signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(EngineDeadError, match="SIGKILL"): llm.generate([[1]], params(3), use_tqdm=False)
        assert time.monotonic() - start < 5


@pytest.mark.parametrize("busy", [True, False])
def test_a_child_that_stands_still_counts_as_dead(monkeypatch, busy):
    "A stopped process neither dies nor answers. Long steps and idle hours are no reason to give up, and a stopped front process blames nobody."
    monkeypatch.setenv("LITEVLLM_ENGINE_TIMEOUT", "2")
    with fake_llm() as llm:
        if busy: stream = llm.stream([[5]], params(100_000))
        else: time.sleep(2.5)
        assert ids_of(llm.generate([[1]], params(3), use_tqdm=False)) == [tokens_of(1, 1, 3)]
        child, start = psutil.Process(pid_of(llm)), time.monotonic()
        os.kill(child.pid, signal.SIGSTOP)
        with pytest.raises(EngineDeadError, match=r"no word for 2\.\d seconds \(LITEVLLM_ENGINE_TIMEOUT\)"):
            if busy:
                for _ in stream: pass
            else: llm.reset_prefix_cache()
        assert 1.5 < time.monotonic() - start < 6
        wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, 5, "it was killed")


def test_i2_ctrl_c_does_not_wait_for_a_step_in_this_process():
    out = run_script("""
        import os, signal, threading, time
        from life_tools import *
        import ipc_fakes
        class Long(ipc_fakes.FakeExecutor): step_s = 3
        llm = fake_llm(Long)
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        start = time.monotonic()
        try: llm.generate([[7, 1]], params(2), use_tqdm=False)
        except KeyboardInterrupt: print("interrupted early", time.monotonic() - start < 2)
        Long.step_s = 0.002   # after the step that goes on
        assert llm.generate([[8, 1]], params(2), use_tqdm=False)[0].outputs[0].token_ids == tokens_of(8, 2, 2)
        assert_drained(llm)
    """, LITEVLLM_ENABLE_MULTIPROCESSING="0")
    assert "interrupted early True" in out


def test_a_front_process_that_was_stopped_goes_on():
    out = run_script("""
        import os, signal, subprocess, sys, time
        os.environ["LITEVLLM_ENGINE_TIMEOUT"] = "2"
        from life_tools import *
        llm = fake_llm()
        stream = llm.stream([[3]], params(2000))
        got = [t for _ in range(5) for t in next(stream).outputs[0].token_ids]
        subprocess.Popen(["/bin/sh", "-c", f"sleep 4; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        got += [t for o in stream for t in o.outputs[0].token_ids]
        print(got == tokens_of(3, 1, 2000))
        llm.close()
    """)
    assert "True" in out


@pytest.mark.parametrize("thread", ["EngineCoreLog", "EngineCoreClientIO"])
@pytest.mark.parametrize("after", [True, False])
def test_i1_ctrl_c_just_as_a_thread_of_the_client_starts(monkeypatch, thread, after):
    "The log's holds the child's stdin open, the other one the sockets: without somebody who ends it, the child would stay."
    before, start = cores(), threading.Thread.start
    def start_and_ctrl_c(self):
        if after: start(self)
        if self.name == thread: signal.raise_signal(signal.SIGINT)
        if not after: start(self)
    monkeypatch.setattr(threading.Thread, "start", start_and_ctrl_c)
    with pytest.raises(KeyboardInterrupt): fake_llm()
    gc.collect()
    wait_until(lambda: cores() == before, 8, "the child is gone")


@pytest.mark.parametrize("value", ["soon", "-1", "inf", "nan", ""])
def test_a_bad_engine_timeout_is_refused_before_a_child_starts(monkeypatch, value):
    before = cores()
    monkeypatch.setenv("LITEVLLM_ENGINE_TIMEOUT", value)
    with pytest.raises(ValueError, match="LITEVLLM_ENGINE_TIMEOUT must be a number of seconds"): fake_llm()
    assert cores() == before


def test_a_fork_is_told_even_if_the_engine_was_held_when_it_was_made():
    out = run_script("""
        import os, sys, threading
        from life_tools import *
        llm, held, go = fake_llm(), threading.Event(), threading.Event()
        def hold():
            with llm._shared:
                held.set()
                go.wait(20)
        threading.Thread(target=hold).start()
        held.wait(10)
        stream_pid = os.fork()
        if stream_pid == 0:
            for call in (lambda: llm.generate([[1]]), lambda: llm.stream([[1]])):
                try: call()
                except RuntimeError as e: print("told" if "fork" in str(e) else e, flush=True)
            sys.exit(0)      # its exit handlers must not take our engine along
        assert os.waitstatus_to_exitcode(os.waitpid(stream_pid, 0)[1]) == 0
        go.set()
        assert llm.generate([[1]], params(3), use_tqdm=False)[0].outputs[0].token_ids == tokens_of(1, 1, 3)
        print("unharmed")
        """)
    assert out.split()[-3:] == ["told", "told", "unharmed"], out


@pytest.mark.parametrize("make", [fake_llm, fake_async_llm])
def test_i1_sigkill_at_start_up(make):
    "For LLM and AsyncLLM alike; the child is killed while it loads."
    before = {p.pid for p in cores()}
    def kill():
        new = lambda: [p for p in cores() if p.pid not in before]
        wait_until(new, 20, "there is a child")
        time.sleep(0.4)
        new()[0].kill()
    killer = in_thread(kill)
    with pytest.raises(RuntimeError, match="failed to start: its process .* was killed by SIGKILL"): make(fakes.SleepsAtLoad)
    wait_until(lambda: killer, 5, "the killer is done")
    assert killer[0][0] is None and {p.pid for p in cores()} <= before


# ---- I2: what was interrupted stays away --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("mp", ["1", "0"])
def test_i2_ctrl_c_then_the_next_call_is_clean(mp):
    "At any moment, in generate() and chat-like lists, with n > 1, twice in a row; a hundred calls on one LLM."
    seed = time.time_ns() % 10_000
    out = run_script(f"""
        import os, random, signal, threading
        from life_tools import *
        print("seed", {seed})
        rng, llm, interrupted, armed = random.Random({seed}), fake_llm(), 0, threading.Semaphore(0)
        done = threading.Semaphore(0)
        def fire():
            for _ in range(100):
                armed.acquire()
                time.sleep(rng.uniform(0, 0.015))
                for _ in range(1 + (rng.random() < 0.3)): os.kill(os.getpid(), signal.SIGINT)
                done.release()
        threading.Thread(target=fire, daemon=True).start()
        for k in range(100):
            many = params(100_000, **(dict(n=2, seed=1, temperature=1.0) if k % 3 == 0 else {{}}))
            try:
                try:
                    armed.release()
                    llm.generate([[9]] * (k % 8 + 1), many, use_tqdm=False)
                finally:
                    interrupted += 1
                    done.acquire()      # the second of two may come here
                    time.sleep(0.001)
            except KeyboardInterrupt: pass
            outs = llm.generate([[k + 1], [k + 2, 1]], params(2), use_tqdm=False)
            assert [o.outputs[0].token_ids for o in outs] == [tokens_of(k + 1, 1, 2), tokens_of(k + 2, 2, 2)], outs
        assert_drained(llm)
        print("interrupted", interrupted)
        """, LITEVLLM_ENABLE_MULTIPROCESSING=mp)
    assert "interrupted 100" in out, out


def test_i2_a_list_with_a_bad_prompt_submits_nothing():
    with fake_llm(max_model_len=64) as llm:
        for _ in range(3):
            with pytest.raises(ValueError, match=r"prompts\[2\] \(of 4\): the prompt has 80 tokens.*64"): llm.generate([[1], [2], [3] * 80, [4]], params())
            assert_drained(llm)
            assert ids_of(llm.generate([[4], [5]], params(), use_tqdm=False)) == [tokens_of(4, 1, 5), tokens_of(5, 1, 5)]


# ---- I4: a child that can't start says why --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("how", ["no config", "bad json", "no tokenizer"])
def test_i4_the_reason_is_in_the_exception(tiny_llama, tmp_path, how):
    "What the front process finds out by itself; what only the child can (architecture, weights, memory) is in test_ipc_llm.py."
    path = shutil.copytree(tiny_llama, tmp_path / "broken")
    config = path / "config.json"
    if how == "no config": config.unlink()
    elif how == "bad json": config.write_text("{not json")
    else:
        for p in path.glob("tokenizer*"): p.unlink()
    word = "tokenizer" if how == "no tokenizer" else "config.json"
    for start in (lambda: LLM(str(path)), lambda: AsyncLLM.from_engine_args(EngineArgs(str(path)))):
        with pytest.raises((RuntimeError, ValueError, OSError), match=word): start()
    assert not cores()


@pytest.mark.parametrize("make", [fake_llm, fake_async_llm])
@pytest.mark.parametrize("executor,reason", [(fakes.NoMemory, "needs 16 KV blocks, the pool has 3"), (fakes.ExitsAtLoad, "someone called sys.exit"),
                                             (fakes.Crashes, "SIGSEGV(.|\n)*last words before the crash")])
def test_i4_in_every_kind_of_engine(make, executor, reason):
    with pytest.raises(RuntimeError, match=f"failed to start: (.|\n)*{reason}"): make(executor)


# ---- I5: nothing is left --------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", ["generate", "stream", "async"])
def test_i5_the_child_follows_a_killed_parent(kind):
    use = {"generate": "fake_llm().generate([[1]] * 4, params(10**6), use_tqdm=False)",
           "stream": "llm = fake_llm()\nfor _ in llm.stream([[1]] * 4, params(10**6)): pass",
           "async": "import asyncio\nllm = fake_async_llm()\nasync def main():\n    async for _ in llm.generate([1], params(10**6), 'x'): pass\nasyncio.run(main())"}[kind]
    parent = subprocess.Popen([sys.executable, "-c", "from life_tools import *\n" + use], env=os.environ | {"PYTHONPATH": str(HERE)},
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    me = psutil.Process(parent.pid)
    wait_until(lambda: [p for p in me.children() if "litevllm.engine.core" in p.cmdline()], 20, "there is a child")
    child = me.children()[0]
    time.sleep(0.4)
    assert child.is_running() and parent.poll() is None
    parent.kill()
    parent.wait()
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, 4, "the child is gone")


@pytest.mark.parametrize("how", ["close", "del", "with", "exception", "while generating", "exit"])
def test_i5_every_way_to_end_takes_the_child(how):
    if how == "exit":
        out = run_script("""
            from life_tools import *
            llm, other = fake_llm(), fake_async_llm()
            stream = llm.stream([[1]], params(10**6))
            next(stream)
            print(pid_of(llm), pid_of(other))""")
        assert not any(psutil.pid_exists(int(p)) for p in out.split())
        return
    llm = fake_llm()
    pid = pid_of(llm)
    stream = llm.stream([[1]], params(10**6))
    next(stream)
    if how == "close": llm.close()
    elif how == "with":
        with llm: pass
    elif how == "exception":
        with pytest.raises(LookupError), llm: raise LookupError
    elif how == "while generating":
        box = in_thread(lambda: llm.generate([[2]], params(10**6), use_tqdm=False))
        time.sleep(0.1)
        llm.close()
        wait_until(lambda: box, 5, "the caller is told")
        assert isinstance(box[0][0], EngineDeadError)
    del llm, stream
    gc.collect()
    wait_until(lambda: not psutil.pid_exists(pid), 5, "the child is gone")


def test_i5_an_idle_child_always_hears_a_sigterm():
    "A signal that came just before the wait for requests did not end it, once in seventy times: close() then took five seconds."
    with fake_llm(TermInAThread) as llm:
        llm.generate([[1]], params(2), use_tqdm=False)
        process = engine_of(llm).engine_core.resources.child.process
        wait_until(lambda: process.poll() is not None, 3, "the child has ended")
        assert process.returncode == 0


def test_i5_build_and_close_five_times_is_flat(tmp_path, monkeypatch):
    "Children, threads, open files, socket directories and memory."
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    def cycle(k):
        if k % 2:
            llm = fake_async_llm()
            asyncio.run(read(llm, [1], "x", params(30)))
            llm.shutdown()
        else:
            with fake_llm() as llm:
                stream = llm.stream([[1]] * 3, params(10**6))
                for _ in range(30): next(stream)
        gc.collect()
    me = psutil.Process()
    def state(): return len(cores()), threading.active_count(), me.num_fds(), len(os.listdir(tmp_path))
    for k in range(2): cycle(k)       # ZeroMQ and others keep a few things from first use
    before, memory = state(), me.memory_info().rss
    for k in range(5): cycle(k)
    assert state() == before
    assert me.memory_info().rss - memory < 20 << 20


def test_i5_two_llms_at_once_do_not_mix(tiny_llama, tmp_path, monkeypatch):
    "Different weights, in one process, calls and streams interleaved; each answers as when it is alone."
    monkeypatch.setenv("LITEVLLM_ENABLE_MULTIPROCESSING", "0")
    args = dict(num_gpu_blocks_override=64, attention_backend="TORCH_REF", max_num_seqs=8)
    paths = [tiny_llama, write_tiny_model(tmp_path / "other", "llama", seed=5)]
    prompts, sp = [[k + 1, k + 2, 3] for k in range(3)], params(10, temperature=0)
    alone = []
    for path in paths:
        with LLM(path, **args) as llm: alone.append(ids_of(llm.generate(prompts, sp, use_tqdm=False)))
    assert alone[0] != alone[1]
    with LLM(paths[0], **args) as one, LLM(paths[1], **args) as two:
        streams, got = [one.stream(prompts, sp), two.stream(prompts, sp)], [{}, {}]
        for step in range(31):
            for k, stream in enumerate(streams):
                if (out := next(stream, None)) is not None: got[k].setdefault(stream.request_ids.index(out.request_id), []).extend(out.outputs[0].token_ids)
            if step % 10 == 4: assert [ids_of(llm.generate(prompts, sp, use_tqdm=False)) for llm in (two, one)] == alone[::-1]
        assert [[g[i] for i in range(3)] for g in got] == alone
        one.close()
        assert ids_of(two.generate(prompts, sp, use_tqdm=False)) == alone[1]
        assert_drained(two)


# ---- S6, and everything at once ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("front", ["LLMEngine", "AsyncLLM"])
def test_s6_five_hundred_requests_aborted_at_random(front):
    seed = time.time_ns() % 10_000
    print("seed", seed)
    rng = random.Random(seed)
    plan = [(f"r{k}", rng.randint(1, 20), rng.randint(1, 30), rng.uniform(0, 0.005), 1 + (rng.random() < 0.2), rng.random() < 0.1) for k in range(500)]
    if front == "LLMEngine":
        with fake_llm(async_scheduling=rng.random() < 0.5) as llm:
            engine = engine_of(llm)
            for rid, n_prompt, n, wait, times, invented in plan:
                engine.add_request(rid, [7] * n_prompt, params(n))
                time.sleep(wait)
                for _ in range(times): engine.abort_request([rid, "never"] if invented else [rid])
                if invented: engine.engine_core.abort_requests(["invented", rid])
                engine.step(0)
            while engine.has_unfinished_requests(): engine.step(0.1)
            start = time.monotonic()
            assert ids_of(llm.generate([[5]], params(4), use_tqdm=False)) == [tokens_of(5, 1, 4)] and time.monotonic() - start < 10
            assert_drained(llm)
        return
    llm = fake_async_llm()
    async def one(rid, n_prompt, n, wait, times, invented):
        task = asyncio.create_task(read(llm, [7] * n_prompt, rid, params(n, output_kind=DELTA)))
        await asyncio.sleep(wait)
        for _ in range(times): await llm.abort([rid, "never"] if invented else rid)
        tokens = await task
        assert tokens == tokens_of(7, n_prompt, len(tokens))
    async def main():
        for k in range(0, 500, 25): await asyncio.gather(*(one(*p) for p in plan[k:k + 25]))
        return await read(llm, [5], "live", params(4, output_kind=DELTA))
    assert asyncio.run(main()) == tokens_of(5, 1, 4)
    assert_drained(llm)
    llm.shutdown()


def mixed_round(llm, rng, k):
    "One way, drawn at random, to leave requests unfinished."
    sp = params(rng.randint(1, 60), output_kind=DELTA, **(dict(n=rng.randint(2, 3), seed=k, temperature=1.0) if rng.random() < 0.3 else {}))
    prompts = [[rng.randint(1, 9)] * rng.randint(1, 40) for _ in range(rng.randint(1, 6))]
    how = rng.choice(["ctrl-c", "abort one", "abort all", "break", "close", "drop unread", "by id", "error in the loop", "to the end", "bad prompt"])
    if how == "ctrl-c":
        class Interrupting:
            format_dict = {"elapsed": 1.0}
            def __init__(self, **kw): pass
            def update(self, n): raise KeyboardInterrupt
            def close(self): pass
        with pytest.raises(KeyboardInterrupt): llm.generate(prompts, sp, use_tqdm=Interrupting)
        return how
    stream = llm.stream([*prompts, []] if how == "bad prompt" else prompts, sp)
    for i, out in enumerate(stream):
        if how in ("to the end", "bad prompt") or i < rng.randint(0, 4): continue
        if how == "abort one": stream.abort(rng.choice(stream.request_ids))
        if how == "abort all": stream.abort()
        if how == "by id":
            with llm._shared: engine_of(llm).abort_request([out.request_id, "never"])
        if how in ("break", "close", "by id"): break
        if how == "error in the loop":
            with contextlib.suppress(LookupError): exec("for _ in stream: raise LookupError", {}, {"stream": stream})   # unless that was the last output
            break
        if how == "drop unread": break
    if how == "close": stream.close()
    return how


def test_200_rounds_of_mixed_aborts(tiny_llama, monkeypatch):
    "In this process, where every table of the core can be looked at: 180 rounds without a model, 20 with one."
    monkeypatch.setenv("LITEVLLM_ENABLE_MULTIPROCESSING", "0")
    seed = time.time_ns() % 10_000
    print("seed", seed)
    rng, seen = random.Random(seed), set()
    class Quick(fakes.FakeExecutor): step_s = 0.0
    with fake_llm(Quick) as llm:
        for k in range(180):
            seen.add(mixed_round(llm, rng, k))
            if k % 20 == 19: assert_drained(llm)
        assert_drained(llm)
    assert len(seen) > 6
    with LLM(tiny_llama, num_gpu_blocks_override=40, block_size=4, attention_backend="TORCH_REF", max_num_seqs=8) as llm:
        want = ids_of(llm.generate([[9, 8, 7]], params(6, temperature=0), use_tqdm=False))
        for k in range(20): mixed_round(llm, rng, k)
        assert ids_of(llm.generate([[9, 8, 7]], params(6, temperature=0), use_tqdm=False)) == want
        assert_drained(llm)


def test_mixed_aborts_through_a_child():
    "The same with a child, and from four threads at once."
    seed = time.time_ns() % 10_000
    print("seed", seed)
    with fake_llm() as llm:
        def work(k):
            rng = random.Random(seed + k)
            for i in range(12): mixed_round(llm, rng, i)
        boxes = [in_thread(lambda k=k: work(k)) for k in range(4)]
        wait_until(lambda: all(boxes), 60, "all threads are done")
        assert [box[0][0] for box in boxes] == [None] * 4
        gc.collect()
        assert_drained(llm)
        assert ids_of(llm.generate([[5]], params(4), use_tqdm=False)) == [tokens_of(5, 1, 4)]
