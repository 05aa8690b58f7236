"""A worker without an engine: plans made by hand (Driver) or by the real scheduler (run_scheduler)."""
from dataclasses import dataclass, field, replace

from litevllm.config import DeviceFacts, EngineArgs
from litevllm.core.output import CachedRequestData, NewRequestData, SchedulerOutput
from litevllm.core.request import Request
from litevllm.core.scheduler import Scheduler
from litevllm.sampling_params import SamplingParams
from litevllm.worker.worker import Worker, get_num_blocks

GREEDY = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)


def make_config(path, compile=None, **args):
    "A CPU configuration; `compile` is a torch.compile backend or None for eager."
    args = dict(attention_backend="TORCH_REF", max_num_seqs=8, max_num_batched_tokens=256, block_size=4) | args
    config = EngineArgs(model=str(path), enforce_eager=compile is None, **args).create_engine_config(DeviceFacts("cpu"))
    return replace(config, compilation_config=replace(config.compilation_config, backend=compile)) if compile else config


def make_worker(path, num_gpu_blocks_override=128, **args):
    worker = Worker(make_config(path, num_gpu_blocks_override=num_gpu_blocks_override, **args))
    worker.init_device()
    worker.load_model()
    num_blocks = get_num_blocks(worker.vllm_config, worker.determine_available_memory(), worker.page_size_bytes())
    worker.initialize_from_config(num_blocks)
    worker.compile_or_warm_up_model()
    return worker


@dataclass
class Known:
    prompt: list
    params: SamplingParams
    tokens: list
    computed: int = 0
    blocks: list = field(default_factory=list)
    sent: bool = False
    preempted: bool = False

    @property
    def outputs(self): return self.tokens[len(self.prompt):]


class Driver:
    "Plans by hand: `step({'A': 3, 'B': 1})` runs so many tokens of each, and keeps the books as the scheduler would."

    def __init__(self, worker, first_block=1):
        self.worker, self.block_size = worker, worker.vllm_config.cache_config.block_size
        self.requests, self.next_block, self.previous, self.preempted, self.finished = {}, first_block, set(), set(), set()

    def add(self, req_id, prompt, params=GREEDY): self.requests[req_id] = Known(prompt, params, list(prompt))

    def preempt(self, req_id):
        request = self.requests[req_id]
        request.computed, request.blocks, request.preempted = 0, [], True
        self.preempted.add(req_id)

    def finish(self, req_id):
        self.finished.add(req_id)
        return self.requests.pop(req_id)

    def plan(self, counts, drafts):
        new, cached = [], CachedRequestData()
        for req_id, count in counts.items():
            request = self.requests[req_id]
            needed = -(-(request.computed + count) // self.block_size) - len(request.blocks)
            fresh = list(range(self.next_block, self.next_block + needed))
            self.next_block += needed
            request.blocks += fresh
            if not request.sent:
                new.append(NewRequestData(req_id, request.prompt, request.params, fresh, request.computed))
                request.sent = True
                continue
            cached.req_ids.append(req_id)
            cached.new_block_ids.append(fresh or None)
            cached.num_computed_tokens.append(request.computed)
            cached.num_output_tokens.append(len(request.outputs))
            if req_id not in self.previous: cached.all_token_ids[req_id] = list(request.tokens)
            if request.preempted: cached.resumed_req_ids.add(req_id)
            request.preempted = False
        plan = SchedulerOutput(new, cached, dict(counts), sum(counts.values()), dict(drafts), self.preempted, self.finished)
        self.preempted, self.finished, self.previous = set(), set(), set(counts)
        return plan

    def step(self, counts, drafts=()):
        drafts = dict(drafts)
        output = self.worker.execute_model(self.plan(counts, drafts))
        for req_id, sampled in zip(output.req_ids, output.sampled_token_ids):
            request = self.requests[req_id]
            request.tokens += sampled
            request.computed += counts[req_id]
            if sampled: request.computed -= len(drafts.get(req_id, ())) - (len(sampled) - 1)
        return dict(zip(output.req_ids, output.sampled_token_ids))

    def run(self, req_id, num_outputs, chunk=10**9):
        "Prefill in chunks, then decode alone until there are `num_outputs` outputs."
        request = self.requests[req_id]
        while len(request.outputs) < num_outputs: self.step({req_id: min(chunk, len(request.tokens) - request.computed)})
        return request.outputs


def run_scheduler(worker, prompts, params, num_blocks, **scheduler_args):
    "Schedule, execute, update until all have ended, synchronously; token ids per prompt, the scheduler, and the number of preemptions."
    config = worker.vllm_config
    scheduler = Scheduler(replace(config.scheduler_config, async_scheduling=False, **scheduler_args),
                          replace(config.cache_config, num_gpu_blocks=num_blocks))
    for i, (prompt, p) in enumerate(zip(prompts, params)):
        scheduler.add_request(Request(str(i), prompt, p.clone(), block_hasher=scheduler.block_hasher))
    outputs, preemptions = {str(i): [] for i in range(len(prompts))}, 0
    while scheduler.has_requests():
        plan = scheduler.schedule()
        preemptions += len(plan.preempted_req_ids)
        result = scheduler.update_from_output(plan, worker.execute_model(plan))
        if (drafts := worker.take_draft_token_ids()) is not None: scheduler.update_draft_token_ids(drafts)
        for out in result.outputs: outputs[out.request_id] += out.new_token_ids
    return list(outputs.values()), scheduler, preemptions
