"""Helpers for test_stream, test_async and test_life: engines without a model, and the look at what is left of them."""
import os, signal, subprocess, sys, tempfile, textwrap, threading, time
from dataclasses import replace
from pathlib import Path

import psutil

from ipc_fakes import FakeExecutor, make_config
from litevllm import LLM, SamplingParams
from litevllm.engine.async_llm import AsyncLLM
from litevllm.engine.core_client import AsyncMPClient, EngineCoreClient
from litevllm.engine.llm_engine import LLMEngine

HERE = Path(__file__).parent
MODEL = tempfile.TemporaryDirectory(prefix="fake-model")    # the front process looks for its end tokens
Path(MODEL.name, "config.json").write_text('{"eos_token_id": null}')


def fake_config(**kw):
    config = make_config(**kw)
    return replace(config, model_config=replace(config.model_config, model=MODEL.name))


class TermInAThread(FakeExecutor):
    "A while after its first step a SIGTERM comes to a thread that is not the main one, which does not interrupt what the main thread waits for."
    def run(self, plan):
        if self.steps == 0: threading.Timer(0.3, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGTERM)).start()
        return super().run(plan)


def fake_llm(executor=FakeExecutor, **config) -> LLM:
    "An LLM whose core runs `executor`, in a child or here as the environment says."
    llm, config = LLM.__new__(LLM), fake_config(**config)
    llm._start(LLMEngine(config, EngineCoreClient.make_client(config, executor_class=executor), None))
    return llm


def fake_async_llm(executor=FakeExecutor, **config) -> AsyncLLM:
    config = fake_config(**config)
    return AsyncLLM(LLMEngine(config, AsyncMPClient(config, False, executor), None))


def params(max_tokens=5, **kw): return SamplingParams(max_tokens=max_tokens, **{"ignore_eos": True, **kw})


def tokens_of(first, prompt_len, n):
    "What FakeExecutor answers to a prompt of `prompt_len` ids that begins with `first`."
    return [1000 * first + prompt_len + i for i in range(n)]


def wait_until(condition, seconds, what):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.005)


def engine_of(llm) -> LLMEngine: return llm._shared.engine


def pid_of(llm) -> int: return engine_of(llm).engine_core.resources.child.process.pid


def assert_drained(llm, seconds=10):
    "Nothing of any request is left: no entry in any table of the front process or of the core, and every block is free."
    engine = engine_of(llm)
    out, core = engine.output_processor, engine.engine_core
    with llm._shared: pass       # who is gone is tidied up after when the engine is let go
    tables = dict(states=out.request_states, external=out.external_req_ids, parents=out.parent_requests, watched=[requests for *_, requests in llm._shared._watched.values() if requests])
    wait_until(lambda: not any(tables.values()), seconds, f"tables of the front are empty: {tables}")
    wait_until(lambda: core.get_request_counts() == (0, 0), seconds, "nothing runs or waits in the core")
    assert core.make_stats().num_free_blocks == core.ready.num_gpu_blocks - 1
    if hasattr(core, "resources"): assert not core.resources.outbox and not core.resources.utilities
    else:
        inner = core.engine_core
        while inner.has_work(): core._call(inner.step_fn)   # the flush that tells the worker of the last ends
        s = inner.scheduler
        assert not s.requests and not s.running and not s.waiting
        first = getattr(inner.model_executor, "first", None)
        assert not first if first is not None else not inner.model_executor.worker.model_runner.rows.requests


def cores():
    "The engine core processes below this one."
    def is_core(p):
        try: return "litevllm.engine.core" in p.cmdline() and p.status() != psutil.STATUS_ZOMBIE
        except psutil.Error: return False
    return [p for p in psutil.Process().children(recursive=True) if is_core(p)]


def run_script(script, *, timeout=60, **env):
    "A script in a Python of its own, in a session of its own, with tests/ on its path; its output, the exit code being 0."
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])} | env
    p = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], cwd=HERE, capture_output=True, text=True, timeout=timeout, env=env, start_new_session=True)
    assert p.returncode == 0, f"exit code {p.returncode}\n{p.stdout[-3000:]}\n{p.stderr[-6000:]}"
    return p.stdout
