"""Executors without a model, for tests of the process boundary: importable by name in the child too."""
import os, signal, sys, threading, time
from concurrent.futures import Future, ThreadPoolExecutor

from litevllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from litevllm.core.output import ModelRunnerOutput
from litevllm.messages import EngineCoreRequest
from litevllm.sampling_params import SamplingParams


def make_config(async_scheduling=True, max_model_len=1 << 20, served_model_name="fake", **cache):
    model = ModelConfig(model="/nowhere", served_model_name=served_model_name, tokenizer="/nowhere", dtype="float32", max_model_len=max_model_len,
                        seed=0, vocab_size=1 << 30, enforce_eager=True, architecture="Fake")
    return VllmConfig(model, CacheConfig(**cache), SchedulerConfig(max_num_batched_tokens=2048, max_num_seqs=64, max_model_len=max_model_len,
                                                                   async_scheduling=async_scheduling))


def make_request(request_id, prompt=(1, 2, 3), max_tokens=4, **kw):
    return EngineCoreRequest(request_id, list(prompt), SamplingParams(max_tokens=max_tokens, ignore_eos=True, **kw), time.time())


class FakeExecutor:
    "The next token of a request is its last known position + 1000 * its first prompt token: who got whose token shows at once."
    step_s = 0.002

    def __init__(self, vllm_config):
        overlap = vllm_config.scheduler_config.async_scheduling
        self.max_concurrent_batches = 2 if overlap else 1
        self.thread = ThreadPoolExecutor(1) if overlap else None
        self.first, self.prompt_len, self.steps = {}, {}, 0

    def initialize_kv_cache(self): return 4096

    def run(self, plan):
        self.steps += 1
        for r in plan.finished_req_ids: self.first.pop(r, None)
        for r in plan.scheduled_new_reqs: self.first[r.req_id], self.prompt_len[r.req_id] = r.prompt_token_ids[0], len(r.prompt_token_ids)
        computed = {r.req_id: r.num_computed_tokens for r in plan.scheduled_new_reqs}
        computed |= dict(zip(plan.scheduled_cached_reqs.req_ids, plan.scheduled_cached_reqs.num_computed_tokens))
        if plan.total_num_scheduled_tokens: time.sleep(self.step_s)
        ids, tokens = list(plan.num_scheduled_tokens), []
        for r in ids:
            end = computed[r] + plan.num_scheduled_tokens[r]
            tokens.append([1000 * self.first[r] + end] if end >= self.prompt_len[r] else [])
        return ModelRunnerOutput(ids, {r: i for i, r in enumerate(ids)}, tokens)

    def execute_model(self, plan, non_block=False):
        if self.thread is None: return self.run(plan)
        future = self.thread.submit(self.run, plan)
        return future if non_block else future.result()

    def take_draft_token_ids(self): return None
    def shutdown(self):
        if self.thread: self.thread.shutdown(cancel_futures=True)


class SlowExecutor(FakeExecutor):
    step_s = 0.3


class BrokenStep(FakeExecutor):
    "Runs five steps and fails in the sixth."
    def run(self, plan):
        if self.steps == 5: raise ArithmeticError("the sixth step went wrong")
        return super().run(plan)


class BrokenLoad(FakeExecutor):
    def __init__(self, vllm_config): raise ValueError("weight model.norm.weight has shape [7], expected [64]")


class NoMemory(FakeExecutor):
    def initialize_kv_cache(self): raise ValueError("one request of 256 tokens needs 16 KV blocks, the pool has 3")


class ExitsAtLoad(FakeExecutor):
    def __init__(self, vllm_config): sys.exit("someone called sys.exit")


class Crashes(FakeExecutor):
    "Dies without a Python exception while starting, having printed something."
    def __init__(self, vllm_config):
        print("last words before the crash")
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGSEGV)


class SleepsAtLoad(FakeExecutor):
    def __init__(self, vllm_config): time.sleep(600)


class Deaf(FakeExecutor):
    "Ignores SIGTERM, from within a step that does not end."
    def run(self, plan):
        if plan.total_num_scheduled_tokens: time.sleep(600)
        return super().run(plan)


class Chatty(FakeExecutor):
    "Prints more than a pipe holds, on both streams, with a line that never ends."
    def __init__(self, vllm_config):
        super().__init__(vllm_config)
        print("x" * 300_000, end="")
        for i in range(3000): print(f"noise {i} é", file=(sys.stdout, sys.stderr)[i % 2])


class SmallPool(FakeExecutor):
    def initialize_kv_cache(self): return 6
