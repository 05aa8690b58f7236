"""`AsyncLLM`: one generator per request, many at once, in any event loop; whoever goes away leaves nothing behind."""
import asyncio, gc, os, random, signal, threading, time, warnings
from collections import deque

import psutil, pytest

import ipc_fakes as fakes
from life_tools import assert_drained, engine_of, fake_async_llm, params, pid_of, run_script, tokens_of, wait_until
from litevllm import LLM, EngineDeadError, SamplingParams
from litevllm.config import EngineArgs
from litevllm.engine.async_llm import AsyncLLM, AsyncLLMEngine
from litevllm.messages import EngineCoreOutput, EngineCoreOutputs
from litevllm.sampling_params import RequestOutputKind

pytestmark = pytest.mark.timeout(60)
DELTA, CUMULATIVE, FINAL = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY


@pytest.fixture(scope="module")
def fake():
    llm = fake_async_llm()
    yield llm
    llm.shutdown()


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    yield
    if "fake" in request.fixturenames: assert_drained(request.getfixturevalue("fake"))


async def read(llm, prompt, request_id, sp, pause=0.0, outputs=None, **kw):
    "The outputs of one request, and what ended it if that was an exception."
    outputs = [] if outputs is None else outputs
    try:
        async for o in llm.generate(prompt, sp, request_id, **kw):
            outputs.append(o)
            if pause: await asyncio.sleep(pause)
    except Exception as e: return outputs, e
    return outputs, None


def joined(outputs, index=0): return [t for o in outputs for c in o.outputs if c.index == index for t in c.token_ids]


def delta(max_tokens=5, **kw): return params(max_tokens, output_kind=DELTA, **kw)


# ---- what it is for ---------------------------------------------------------------------------------------------------------------

def test_a_hundred_at_once_get_their_own(fake):
    async def main(): return await asyncio.gather(*(read(fake, [k + 1] * (k % 5 + 1), f"r{k}", delta(k % 9 + 1)) for k in range(100)))
    for k, (outputs, error) in enumerate(asyncio.run(main())):
        assert error is None and joined(outputs) == tokens_of(k + 1, k % 5 + 1, k % 9 + 1)
        assert {o.request_id for o in outputs} == {f"r{k}"} and [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]


def test_the_kinds_of_output_and_several_answers(fake):
    async def main():
        return await asyncio.gather(*(read(fake, [3], "same id", params(6, output_kind=kind, n=n, **kw))
                                      for kind in (DELTA, CUMULATIVE, FINAL) for n, kw in ((1, {}), (3, dict(temperature=1.0, seed=1)))))
    d, d3, c, c3, f, f3 = (outputs for outputs, error in asyncio.run(main()) if error is None)
    want = tokens_of(3, 1, 6)
    assert joined(d) == want and list(c[-1].outputs[0].token_ids) == want and len(f) == len(f3) == 1 and joined(f) == want
    assert all(joined(d3, i) == want for i in range(3)) and [list(o.token_ids) for o in f3[0].outputs] == [want] * 3
    assert all(want[:len(o.token_ids)] == list(o.token_ids) for out in c + c3 for o in out.outputs)
    assert all(o.finished == (o is outs[-1]) for outs in (d, d3, c, c3, f, f3) for o in outs)


def test_a_bad_request_fails_in_its_own_generator_only(fake):
    async def main():
        return await asyncio.gather(read(fake, [1], "a", delta(50)), read(fake, [], "b", delta()), read(fake, [-4], "c", delta()),
                                    read(fake, {1, 2}, "d", delta()), read(fake, [1], "e", None), read(fake, [1], 7, delta()),
                                    read(fake, [1], "f", delta(n=2, seed=1, temperature=1.0)), read(fake, "text", "g", delta()))
    good, *bad, two, text = asyncio.run(main())
    assert good[1] is None and joined(good[0]) == tokens_of(1, 1, 50) and two[1] is None
    assert [type(e) for _, e in bad] == [ValueError, ValueError, TypeError, TypeError, TypeError] and "tokenizer" in str(text[1])
    for name in ("lora_request", "trace_headers", "data_parallel_rank", "reasoning_ended", "reasoning_parser_kwargs"):
        with pytest.raises(ValueError, match=f"does not act on {name}=1"): asyncio.run(anext(fake.generate([1], delta(), "x", **{name: 1})))
        assert joined(asyncio.run(read(fake, [1], "y", delta(3), **{name: None}))[0]) == tokens_of(1, 1, 3)


def test_a_priority_without_its_policy_is_taken_and_warned_of_once(fake, caplog):
    caplog.set_level("WARNING", "litevllm")
    fake._shared.engine.input_processor.warns_of_priority = True    # other tests may share this engine
    for priority in (0, 3, -4): assert joined(asyncio.run(read(fake, [1], "a", delta(3), priority=priority))[0]) == tokens_of(1, 1, 3)
    assert caplog.text.count("priority=3 has no effect") == caplog.text.count("no effect") == 1


def test_tiny_model_streams_what_llm_generates(tiny_llama, monkeypatch):
    args = dict(num_gpu_blocks_override=64, attention_backend="TORCH_REF", max_num_seqs=8)
    prompts, sp = ["Once upon a time", "Où est la gare?", [5, 6, 7]], dict(max_tokens=12, temperature=1.0, seed=5)
    monkeypatch.setenv("LITEVLLM_ENABLE_MULTIPROCESSING", "0")     # LLM's core in this process, AsyncLLM's in a child as always
    with LLM(tiny_llama, **args) as llm:
        want = [[(o.text, list(o.token_ids)) for o in out.outputs] for out in llm.generate(prompts, SamplingParams(n=2, **sp), use_tqdm=False)]
    assert AsyncLLMEngine is AsyncLLM

    async def main():
        async with AsyncLLM.from_engine_args(EngineArgs(tiny_llama, **args)) as llm:
            got = await asyncio.gather(*(read(llm, p, str(i), SamplingParams(n=2, output_kind=DELTA, **sp)) for i, p in enumerate(prompts)))
            assert llm.get_tokenizer().bos_token_id == 1 and await llm.reset_prefix_cache() is True
            await llm.check_health()
            assert got[0][0][0].prompt == prompts[0]
            return [[("".join(c.text for o in outs for c in o.outputs if c.index == i), joined(outs, i)) for i in range(2)] for outs, _ in got], llm
    got, llm = asyncio.run(main())
    assert got == want and llm.errored and not psutil.pid_exists(pid_of(llm))


# ---- going away ---------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("how", ["break", "aclose", "cancel", "exception", "timeout", "forgotten", "before the first"])
def test_however_it_is_left_it_is_aborted(fake, how, n):
    sp = delta(100_000, **(dict(n=n, seed=1, temperature=1.0) if n > 1 else {}))
    async def use(generator):
        count = 0
        async for _ in generator:
            count += 1
            if count == 3: return generator
    async def main():
        generator = fake.generate([7], sp, "x")
        if how == "break":
            async for _ in generator: break
        elif how == "aclose":
            await use(generator)
            await generator.aclose()
        elif how == "exception":
            with pytest.raises(LookupError):
                async for _ in generator: raise LookupError
        elif how == "before the first":
            task = asyncio.create_task(anext(generator))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        elif how == "cancel":
            async def all_of_it():
                async for _ in generator: pass
            task = asyncio.create_task(all_of_it())
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError): await task
        elif how == "timeout":
            async def all_of_it():
                async for _ in generator: pass
            with pytest.raises(TimeoutError): await asyncio.wait_for(all_of_it(), 0.05)
        else: await use(generator)
        del generator
        gc.collect()
        for _ in range(20): await asyncio.sleep(0.005)
        assert not engine_of(fake).has_unfinished_requests()
    asyncio.run(main())
    assert_drained(fake)


def test_a_generator_that_outlives_its_loop(fake):
    "asyncio can't close it any more when it is collected; its mailbox's finalizer does."
    loop = asyncio.new_event_loop()
    generator = fake.generate([7], delta(100_000), "x")
    async def first(): await anext(generator)      # within the loop, so that it is asyncio's to close
    loop.run_until_complete(first())
    for task in asyncio.all_tasks(loop): task.cancel()
    loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()                     # without shutdown_asyncgens()
    assert engine_of(fake).has_unfinished_requests()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")      # Python complains of the coroutine that was never awaited, rightly
        del generator
        gc.collect()
    assert_drained(fake)


@pytest.mark.parametrize("n", [1, 2])
def test_abort_by_id_ends_the_generators_with_a_last_output(fake, n):
    more = dict(n=n, seed=1, temperature=1.0) if n > 1 else {}
    async def main():
        boxes = [[] for _ in range(4)]
        tasks = [asyncio.create_task(read(fake, [k + 1], r, delta(100_000, **more), outputs=boxes[k])) for k, r in enumerate(["a", "b", "c", "c"])]
        while min(len(joined(box, i)) for box in boxes for i in range(n)) < 4: await asyncio.sleep(0.005)
        for ids in ("a", "a", ["b", "never"], "nobody", []): await fake.abort(ids)
        a, b = await asyncio.gather(*tasks[:2])
        assert not tasks[2].done() and not tasks[3].done()
        await fake.abort(iter(["c"]))            # one id, two requests: both
        c, d = await asyncio.gather(*tasks[2:])
        await fake.abort("c")
        return a, b, c, d
    for k, (outputs, error) in enumerate(asyncio.run(main())):
        assert error is None and outputs[-1].finished and {o.finish_reason for o in outputs[-1].outputs} == {"abort"}
        for i in range(n): assert len(joined(outputs, i)) > 3 and joined(outputs, i) == tokens_of(k + 1, 1, len(joined(outputs, i)))


def test_a_storm_of_cancellations(fake):
    seed = time.time_ns() % 10_000
    print("seed", seed)
    rng = random.Random(seed)
    async def main():
        tasks = []
        for k in range(300):
            n = rng.choice([1, 1, 2])
            tasks.append(asyncio.create_task(read(fake, [k + 1], f"r{k % 50}", delta(rng.randint(1, 60), **(dict(n=n, seed=1, temperature=1.0) if n > 1 else {})))))
            if rng.random() < 0.7: asyncio.get_running_loop().call_later(rng.uniform(0, 0.1), tasks[-1].cancel)
            if rng.random() < 0.3: await asyncio.sleep(rng.uniform(0, 0.01))
        return await asyncio.gather(*tasks, return_exceptions=True)
    results = asyncio.run(main())
    done = [(k, r[0]) for k, r in enumerate(results) if isinstance(r, tuple)]
    assert all(r[1] is None for r in results if isinstance(r, tuple)) and len(done) < 300
    for k, outputs in done: assert outputs[-1].finished and joined(outputs) == tokens_of(k + 1, 1, len(joined(outputs)))
    assert_drained(fake)
    assert joined(asyncio.run(read(fake, [5], "live", delta()))[0]) == tokens_of(5, 1, 5)


def test_an_output_that_comes_while_the_waiter_signs_up(fake):
    "Between its look into the mail and its name on the list: it must look again, or it waits for ever."
    client = engine_of(fake).engine_core
    class Late(deque):
        def append(self, waiter):
            client.resources.outputs.put(EngineCoreOutputs([EngineCoreOutput("nobody", [1])]))
            super().append(waiter)
    old, client.resources.waiters = client.resources.waiters, Late()
    try:
        asyncio.run(asyncio.wait_for(client.wait_for_output(), 5))
        assert client.get_output(0).outputs[0].request_id == "nobody"
    finally: client.resources.waiters = old


@pytest.mark.parametrize("how", ["cancelled", "interrupted"])
def test_readers_outlive_their_output_handler(fake, how):
    "A program that cancels every task it did not make, or a Ctrl-C that is raised in just this one, takes the handler away from those who wait."
    engine, seen = engine_of(fake), []
    step = engine.step
    def interrupted(*args):
        engine.step = step
        raise KeyboardInterrupt
    async def read():
        async for o in fake.generate([7], delta(60), "x"):
            seen.append(o)
            if len(seen) != 3: continue
            if how == "interrupted": engine.step = interrupted
            else: [t.cancel() for t in asyncio.all_tasks() if t.get_name() == "AsyncLLM output handler"]
    loop = asyncio.new_event_loop()
    try:
        reading = loop.create_task(read())
        if how == "interrupted":
            with pytest.raises(KeyboardInterrupt): loop.run_until_complete(reading)
        loop.run_until_complete(asyncio.wait([reading], timeout=5))
        assert reading.done() and joined(seen) == tokens_of(7, 1, 60)
    finally:
        for task in asyncio.all_tasks(loop): task.cancel()
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()


# ---- loops and slow readers -----------------------------------------------------------------------------------------------------------

def test_asyncio_run_twice_and_leftovers_of_the_first(fake):
    async def leave():
        generator = fake.generate([7], delta(100_000), "x")
        await anext(generator)
        return generator                      # asyncio.run closes it
    for k in range(3):
        asyncio.run(leave())
        assert joined(asyncio.run(read(fake, [k + 1], "x", delta(20)))[0]) == tokens_of(k + 1, 1, 20)


def test_two_loops_at_once(fake):
    got, barrier = {}, threading.Barrier(2)
    async def main(name):
        barrier.wait()
        return await asyncio.gather(*(read(fake, [name * 100 + k], f"{name}-{k}", delta(40)) for k in range(20)))
    threads = [threading.Thread(target=lambda n=n: got.__setitem__(n, asyncio.run(main(n)))) for n in (1, 2)]
    for t in threads: t.start()
    for t in threads: t.join(30)
    for n in (1, 2):
        for k, (outputs, error) in enumerate(got[n]): assert error is None and joined(outputs) == tokens_of(n * 100 + k, 1, 40)


def test_a_loop_that_is_busy_does_not_hold_up_another(fake):
    "The first loop's coroutine blocks its thread; the second loop's handler does the first one's work as well."
    got, started, released = {}, threading.Event(), threading.Event()
    async def blocked():
        generator = fake.generate([1], delta(200), "slow")
        first = await anext(generator)
        started.set()
        released.wait(30)       # not an await: nothing else runs in this loop
        return [first] + [o async for o in generator]
    t = threading.Thread(target=lambda: got.__setitem__("slow", asyncio.run(blocked())))
    t.start()
    started.wait(10)
    outputs, _ = asyncio.run(read(fake, [2], "quick", delta(50)))
    assert joined(outputs) == tokens_of(2, 1, 50)
    released.set()
    t.join(20)
    assert joined(got["slow"]) == tokens_of(1, 1, 200) and len(got["slow"]) < 180      # what came meanwhile, in one piece


@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE])
@pytest.mark.parametrize("n", [1, 2])
def test_slow_readers_get_fewer_and_longer_pieces(fake, kind, n):
    sp = params(60, output_kind=kind, **(dict(n=n, seed=1, temperature=1.0) if n > 1 else {}))
    async def main(): return await asyncio.gather(read(fake, [4], "slow", sp, pause=0.03), read(fake, [5], "quick", sp))
    (slow, e1), (quick, e2) = asyncio.run(main())
    assert e1 is e2 is None and len(slow) < len(quick)
    for outputs, first in ((slow, 4), (quick, 5)):
        for i in range(n):
            got = joined(outputs, i) if kind is DELTA else [list(c.token_ids) for o in outputs for c in o.outputs if c.index == i][-1]
            assert got == tokens_of(first, 1, 60)
        assert outputs[-1].finished and sum(o.finished for o in outputs) == 1


def test_ctrl_c_in_asyncio_run(fake):
    out = run_script("""
        import asyncio, os, signal
        from life_tools import *
        from litevllm.sampling_params import RequestOutputKind
        llm = fake_async_llm()
        async def read(n, delay=None):
            if delay: asyncio.get_running_loop().call_later(delay, os.kill, os.getpid(), signal.SIGINT)
            return [t async for o in llm.generate([7], params(n, output_kind=RequestOutputKind.DELTA), "x") for t in o.outputs[0].token_ids]
        for k in range(8):
            try: asyncio.run(read(100_000, 0.01 + 0.01 * k))
            except KeyboardInterrupt: print("interrupted")
            assert asyncio.run(read(5)) == tokens_of(7, 1, 5)
            assert_drained(llm)
        """)
    assert out.count("interrupted") == 8


# ---- the end ----------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("end", ["SIGKILL", "shutdown", "error in a step", "SIGKILL while idle"])
def test_i1_everyone_who_waits_is_told(end):
    llm = fake_async_llm(fakes.BrokenStep if end == "error in a step" else fakes.FakeExecutor)
    pid = pid_of(llm)
    async def main():
        waiting = [asyncio.create_task(read(llm, [k + 1], str(k), delta(100_000))) for k in range(5 * (end != "SIGKILL while idle"))]
        await asyncio.sleep(0.02)
        start = time.monotonic()
        if "SIGKILL" in end: os.kill(pid, signal.SIGKILL)
        if end == "shutdown": await asyncio.to_thread(llm.shutdown)
        results = await asyncio.gather(*waiting)
        if end == "SIGKILL while idle": await asyncio.sleep(0.5)
        assert time.monotonic() - start < 5
        later = await read(llm, [1], "later", delta())
        with pytest.raises(EngineDeadError): await llm.check_health()
        return [*results, later]
    *results, later = asyncio.run(main())
    word = {"shutdown": "was shut down", "error in a step": "the sixth step went wrong"}.get(end, "SIGKILL")
    for outputs, error in [*results, later]: assert isinstance(error, EngineDeadError) and word in str(error), error
    for k, (outputs, _) in enumerate(results): assert joined(outputs) == tokens_of(k + 1, 1, len(joined(outputs)))   # what came before is not lost
    assert llm.errored and not llm.is_running and word in str(llm.dead_error) and not engine_of(llm).has_unfinished_requests()
    assert isinstance(asyncio.run(read(llm, [1], "another loop", delta()))[1], EngineDeadError)
    llm.shutdown()
    llm.shutdown()
    assert not psutil.pid_exists(pid)


def test_a_forgotten_one_is_collected_with_its_child():
    llm = fake_async_llm()
    assert joined(asyncio.run(read(llm, [1], "x", delta()))[0]) == tokens_of(1, 1, 5)
    process = engine_of(llm).engine_core.resources.child.process
    del llm
    gc.collect()
    wait_until(lambda: process.poll() is not None, 5, "its child has ended")


def test_an_error_in_processing_fails_those_who_run_and_nobody_later(fake, monkeypatch):
    "Not even a fault of our own in the output loop may end the loop."
    out = engine_of(fake).output_processor
    async def main():
        running = asyncio.create_task(read(fake, [1], "x", delta(100_000)))
        await asyncio.sleep(0.03)
        with monkeypatch.context() as m:
            m.setattr(out, "process_outputs", lambda outputs: 1 / 0)
            result = await running
        return result, await read(fake, [2], "y", delta(30))
    (_, error), (outputs, none) = asyncio.run(main())
    assert isinstance(error, ZeroDivisionError) and none is None and joined(outputs) == tokens_of(2, 1, 30)
