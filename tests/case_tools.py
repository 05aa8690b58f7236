"""What the case tests share (tests/test_cases_*.py): SOLO, DRAIN and LIVE of the case list, on a real engine in this process."""
import time
from functools import lru_cache

import torch
from transformers import AutoModelForCausalLM

from litevllm import LLM, SamplingParams
from parity import NEAR_TIE


def greedy(n, **kw): return SamplingParams(temperature=0, max_tokens=n, **{"ignore_eos": True, **kw})


def ids(out): return list(out.outputs[0].token_ids)


def core_of(llm): return llm.llm_engine.engine_core.engine_core


def generate(llm, prompts, params, **kw): return llm.generate(prompts, params, use_tqdm=False, **kw)


@lru_cache(maxsize=None)
def _solo(path, prompt, n, options):
    with LLM(path, enable_prefix_caching=False, enable_chunked_prefill=False, **dict(options)) as llm: return ids(generate(llm, list(prompt), greedy(n))[0])


def solo(path, prompt, n, **options):
    "SOLO: the greedy tokens of this request alone, on a fresh engine with a large pool, no prefix cache, no chunking."
    return _solo(path, tuple(prompt), n, tuple(options.items()))[:]


@lru_cache(maxsize=None)
def hf_model(path): return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@lru_cache(maxsize=2000)
def _hf_logits(path, tokens):
    with torch.inference_mode(): return hf_model(path)(torch.tensor([tokens])).logits[0].float()


def hf_logits(path, tokens):
    "float32 logits of transformers [len(tokens), vocab]; not to be changed, they are kept."
    return _hf_logits(path, tuple(tokens))


def check_like(path, prompt, got, want, where=""):
    "The same greedy tokens; they may part only where transformers' two best logits are a near tie, which ends the comparison."
    if got == want: return
    assert len(got) == len(want), (where, got, want)
    at = next(i for i, (a, b) in enumerate(zip(got, want)) if a != b)
    best = hf_logits(path, prompt + want[:at])[-1].topk(2).values
    assert best[0] - best[1] < NEAR_TIE, f"{where}: token {at} is {got[at]}, not {want[at]}\n{got}\n{want}"


def check_drained(llm):
    "DRAIN: nothing running or waiting, every block free, and no entry of a request left in the front, the scheduler or the worker."
    core, front = core_of(llm), llm.llm_engine.output_processor
    for _ in range(5):
        if core.has_work(): core.step_fn()      # the worker is told of an end in the step after it
    scheduler, rows = core.scheduler, core.model_executor.worker.model_runner.rows
    assert scheduler.get_request_counts() == (0, 0) and not scheduler.requests and not core.has_work()
    kv, pool = scheduler.kv_cache_manager, scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1 and not kv.req_to_blocks and not kv.num_cached_block
    assert all(b.ref_cnt == 0 for b in pool.blocks)
    assert not front.request_states and not front.external_req_ids and not front.has_unfinished_requests()
    assert len(rows) == 0 and not rows.requests


def check_live(llm, drained=True):
    "LIVE: a trivial request is answered within ten seconds; and then DRAIN."
    started = time.monotonic()
    assert len(ids(generate(llm, [5, 6, 7], greedy(3))[0])) == 3
    assert time.monotonic() - started < 10
    if drained: check_drained(llm)


def run_separately(engine, *requests, limit=500):
    """Requests (name, prompt, params[, options]) submitted one by one: {name: last RequestOutput or the exception of add_request}.

    An engine that is not done after `limit` steps has hung."""
    done = {}
    for name, prompt, params, *options in requests:
        try: engine.add_request(name, prompt, params, **(options[0] if options else {}))
        except Exception as e: done[name] = e
    for _ in range(limit):
        if not engine.has_unfinished_requests(): return done
        done |= {o.request_id: o for o in engine.step() if o.finished}
    raise AssertionError(f"not done after {limit} steps: {engine.output_processor.request_states.keys()}")


def watch_plans(llm):
    "A list that grows by (plan, {request id: its new tokens}) with every plan that runs something."
    scheduler, seen = core_of(llm).scheduler, []
    update = scheduler.update_from_output

    def watched(plan, result):
        outputs = update(plan, result)
        if plan.total_num_scheduled_tokens: seen.append((plan, {o.request_id: o.new_token_ids for o in outputs.outputs}))
        return outputs
    scheduler.update_from_output = watched
    return seen


def preempt_before(llm, *steps, which=-1):
    "Before these schedule() calls, counted from 0, one running request is pushed out in the scheduler's own way; a list of (id, computed, outputs)."
    scheduler, done, calls = core_of(llm).scheduler, [], [-1]
    run = scheduler._schedule_running

    def with_victim(step):
        calls[0] += 1
        if calls[0] in steps and scheduler.running:
            victim = scheduler.running.pop(min(which, len(scheduler.running) - 1))
            done.append((victim.request_id, victim.num_computed_tokens, victim.num_output_tokens))
            scheduler._preempt_request(step, victim)
        run(step)
    scheduler._schedule_running = with_victim
    return done
