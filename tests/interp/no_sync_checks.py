"""Run with TRITON_INTERPRET=1: the launch path with the kernels that a GPU runs, under watch. Prints "tokens agree" at the end."""
import sys

import torch
from triton.runtime.interpreter import GridExecutor

from graph_tools import graph_config, graph_worker, no_sync, tear_apart
from litevllm.kernels import sampling
from litevllm.sampling_params import SamplingParams
from litevllm.worker.sampler import Sampler
from worker_harness import Driver, make_worker

path = sys.argv[1]
PROMPTS = {"A": list(range(5, 18)), "B": list(range(40, 47)), "C": [3]}
PARAMS = {"A": SamplingParams(temperature=.8, top_k=20, top_p=.9, min_p=.01, seed=1, logprobs=2, ignore_eos=True),
          "B": SamplingParams(temperature=1.2, top_p=.8, seed=2, repetition_penalty=1.2, presence_penalty=.3, frequency_penalty=.2, ignore_eos=True),
          "C": SamplingParams(temperature=0, logit_bias={9: 1.0}, min_tokens=4, stop_token_ids=[5], prompt_logprobs=1)}
COUNTS = [{"A": 7, "B": 7}, {"A": 6, "B": 1, "C": 1}, {"A": 1, "B": 1, "C": 1}]     # the last one runs as a graph for four
PARAMS["B"]._bad_words_token_ids = [[7, 8], [9]]


def drive(worker):
    driver = Driver(worker)
    for req_id, prompt in PROMPTS.items(): driver.add(req_id, prompt, PARAMS[req_id])
    return driver


reference = drive(make_worker(path, attention_backend="TORCH_REF"))
want = [reference.step(counts) for counts in COUNTS]
worker = graph_worker(graph_config(path, "FULL_DECODE_ONLY", [4], None, attention_backend="TRITON_ATTN"))
runner = tear_apart(worker.model_runner)
runner.sampler = Sampler(sampling)
driver, plans = drive(worker), []
for counts in COUNTS:
    plans.append(driver.plan(counts, {}))
    for req_id, count in counts.items():
        request = driver.requests[req_id]
        request.computed += count
        if request.computed == len(request.tokens): request.tokens.append(None)
    plans[-1].scheduled_cached_reqs.all_token_ids.clear()
with no_sync([(GridExecutor, "__call__")]) as watch: steps = [runner.launch(plan) for plan in plans]
outputs = [step.get_output() for step in steps]
got = [dict(zip(o.req_ids, o.sampled_token_ids)) for o in outputs]
assert got == want, (got, want)
print(runner.graphs.num_graphs(), "recordings,", len(watch.seen), "operations watched")
print("tokens agree")
