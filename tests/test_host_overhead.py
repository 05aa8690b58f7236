"""What a step costs when the model costs nothing: it may grow with the running requests, and with nothing else. Instructions are counted, not seconds."""
import json
import os
import subprocess
import sys

import psutil
import pytest
from core_tools import make_scheduler
from core_tools import add as add_to
from core_tools import update as answer
from ipc_fakes import FakeExecutor, make_config
from ipc_fakes import make_request as wire_request

from litevllm import LLM, AsyncLLM, EngineArgs
from litevllm.bench import host
from litevllm.bench.host import OneProcess, Stopwatch, costless_config, costless_request, count_instructions, instructions_by_stage
from litevllm.core.request import RequestStatus
from litevllm.engine.core_client import EngineCoreClient, InprocClient, SyncMPClient
from litevllm.engine.llm_engine import LLMEngine
from litevllm.engine.output_processor import OutputProcessor
from litevllm.engine.parallel_sampling import ParentRequest
from litevllm.messages import EngineCoreOutput, FinishReason
from litevllm.sampling_params import RequestOutputKind
from litevllm.tiny import tiny_tokenizer, write_tiny_model


@pytest.fixture(scope="module")
def tokenizer(): return tiny_tokenizer()


@pytest.fixture(scope="module")
def model(tmp_path_factory): return write_tiny_model(tmp_path_factory.mktemp("models") / "llama")


def children(): return psutil.Process().children()


# ---- one step -------------------------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def at_64(tokenizer): return instructions_by_stage(64, tokenizer=tokenizer)


def test_counting_sees_a_loop_and_is_exact():
    def loop(n):
        for i in range(n): pass
    a, b, c = (count_instructions(loop, n) for n in (10, 20, 30))
    assert b - a == c - b > 0 and count_instructions(loop, 10) == a


def test_a_step_is_linear_in_the_running_requests(at_64, tokenizer):
    at_256 = instructions_by_stage(256, tokenizer=tokenizer)
    for stage, few in at_64.items(): assert few < at_256[stage] < 4.1 * few, (stage, few, at_256[stage])


@pytest.mark.parametrize("history", [dict(prompt_len=2048), dict(num_finished=1500)], ids=["long texts", "many finished"])
def test_a_step_does_not_grow_with_the_past(at_64, tokenizer, history):
    then = instructions_by_stage(64, tokenizer=tokenizer, **history)
    for stage, count in at_64.items(): assert abs(then[stage] - count) < 0.03 * count, (stage, count, then[stage])


def test_nothing_is_kept_of_finished_requests():
    one = OneProcess(costless_config(8, async_scheduling=False))
    try:
        for i in range(40): one.add(costless_request(f"r{i}", 20, max_tokens=3, first=i))
        for _ in range(100):
            if one.core.has_work(): one.step()
        scheduler, rows, front = one.core.scheduler, one.core.model_executor.worker.model_runner.rows, one.front
        kept = [scheduler.requests, scheduler.running, scheduler.waiting, scheduler.finished_req_ids, scheduler.kv_cache_manager.req_to_blocks,
                scheduler.kv_cache_manager.num_cached_block, rows.requests, rows.row_of, front.request_states, front.external_req_ids, front.parent_requests]
        assert [len(k) for k in kept] == [0] * len(kept)
    finally: one.close()


def test_a_steady_step_copies_no_token_list_to_the_worker():
    scheduler = make_scheduler(blocks=1000, seqs=64, budget=256)
    for i in range(64): add_to(scheduler, str(i), [1, 2, 3], max_tokens=50)
    for _ in range(8): answer(scheduler, scheduler.schedule())
    assert scheduler.schedule().scheduled_cached_reqs.all_token_ids == {}


# ---- many at once ---------------------------------------------------------------------------------------------------------------------

def prefilled(n, **options):
    scheduler = make_scheduler(blocks=20 * n, seqs=n, budget=4 * n, **options)
    for i in range(n): add_to(scheduler, str(i), [1, 2, 3], max_tokens=3, eos=None)
    return scheduler


def all_admitted(n):
    "Instructions of the step that admits n requests."
    return count_instructions(prefilled(n).schedule)


def all_ended(n):
    "Instructions of the update that ends n requests, and of the next, empty plan."
    scheduler = prefilled(n)
    for _ in range(2): answer(scheduler, scheduler.schedule())
    plan = scheduler.schedule()
    count = count_instructions(answer, scheduler, plan)
    assert not scheduler.requests
    return count + count_instructions(scheduler.schedule)


def all_preempted(n, policy):
    "Instructions of a step in which every second request has to give way to another one."
    scheduler = make_scheduler(blocks=n + 1, bs=4, seqs=n, budget=4 * n, policy=policy, reserve=False, caching=False)
    for i in range(n): add_to(scheduler, str(i), [1, 2, 3], max_tokens=9, eos=None, priority=i)
    for _ in range(2): answer(scheduler, scheduler.schedule())
    assert len(scheduler.running) == n        # with four tokens each, and no block is left
    made = []
    count = count_instructions(lambda: made.append(scheduler.schedule()))
    assert len(made[0].preempted_req_ids) == n // 2
    return count


@pytest.mark.parametrize("cost", [all_admitted, all_ended, lambda n: all_preempted(n, "fcfs"), lambda n: all_preempted(n, "priority")],
                         ids=["admitted", "ended", "preempted fcfs", "preempted priority"])
def test_many_at_once_cost_no_more_each_than_few(cost):
    few, many = cost(64), cost(512)
    assert many < 8.4 * few, (few, many, many / few)


def aborts(n, batches):
    "Instructions of taking in n aborts that came in so many messages while a step ran."
    one = OneProcess(costless_config(n, async_scheduling=False))
    try:
        for i in range(n): one.add(costless_request(str(i), 20, first=i))
        one.step()
        ids = [r.request_id for r in one.core.scheduler.running]
        for k in range(batches): one.core.aborts_queue.put(ids[k::batches])
        count = count_instructions(one.core.process_aborts_queue)
        assert one.core.scheduler.get_request_counts() == (0, 0)
        return count
    finally: one.close()


def test_aborts_one_by_one_cost_what_they_cost_together():
    together, singly, few = aborts(256, 1), aborts(256, 256), aborts(64, 64)
    assert singly < 1.3 * together and singly < 4.2 * few, (together, singly, few)


def children_end(n):
    "Instructions of the front process for the end of the n answers to one prompt."
    front, request = OutputProcessor(None), wire_request("p-01234567", max_tokens=4, n=n)
    request.sampling_params.output_kind = RequestOutputKind.FINAL_ONLY
    parent = ParentRequest(request)
    for i, child in enumerate(parent.children): front.add_request(child, None, parent, i)
    outputs = [EngineCoreOutput(c.request_id, [7], FinishReason.LENGTH) for c in parent.children]
    made = []
    count = count_instructions(lambda: made.append(front.process_outputs(outputs)))
    assert len(made[0].request_outputs) == 1 and len(made[0].request_outputs[0].outputs) == n and not front.request_states
    return count


def test_the_answers_to_one_prompt_end_in_linear_time():
    few, many = children_end(64), children_end(512)
    assert many < 8.4 * few, (few, many)


def test_priority_preemption_picks_the_worst_and_of_equals_the_first():
    scheduler = make_scheduler(blocks=7, bs=4, seqs=8, budget=64, policy="priority", reserve=False, caching=False)
    for name, priority in zip("abcdef", (0, 2, 1, 2, 0, 1)): add_to(scheduler, name, [1, 2, 3], max_tokens=9, eos=None, priority=priority, arrival=0.0)
    for _ in range(2): answer(scheduler, scheduler.schedule())
    plan = scheduler.schedule()
    order = [r.request_id for r in scheduler.running]
    worst_first = sorted("abcdef", key=lambda r: (-dict(zip("abcdef", (0, 2, 1, 2, 0, 1)))[r], r))
    assert plan.preempted_req_ids == set(worst_first[:3]) and set(order) == set(worst_first[3:])
    assert all(scheduler.requests[r].status is RequestStatus.PREEMPTED for r in plan.preempted_req_ids)


# ---- the measurements -----------------------------------------------------------------------------------------------------------------

def test_the_stopwatch_does_not_count_twice(monkeypatch):
    clock = iter([0.0, 1.0, 3.0, 10.0])
    monkeypatch.setattr(host.time, "perf_counter", lambda: next(clock))
    watch = Stopwatch()
    with watch.stage("outer"):
        with watch.stage("inner"): pass
    assert watch.take() == {"outer": 8.0, "inner": 2.0} and watch.take() == {}


def test_the_costless_engine_gives_every_request_real_text(tokenizer):
    one = OneProcess(costless_config(4, async_scheduling=False), tokenizer)
    try:
        for i in range(4): one.add(costless_request(str(i), first=i))
        assert all(set(step) == set(host.STAGES) for step in one.run(20))
        texts = [s.detokenizer.output_text for s in one.front.request_states.values()]
        assert len(set(texts)) == 4 and all(len(t) > 20 for t in texts)
    finally: one.close()


def test_the_script_writes_what_it_measures(model, tmp_path):
    file = tmp_path / "deep" / "host.json"
    done = subprocess.run([sys.executable, "-m", "litevllm.bench.host", "--model", model, "--sizes", "2", "8", "--skip-start", "--out", str(file)],
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert {"cpu", "cores", "versions", "date"} <= set(result["machine"]) and "starts_s" not in result
    for n in ("2", "8"):
        step = result["step_ms"][n]
        assert set(step) == {*host.STAGES, "total"} and all(v > 0 for v in step.values()) and result["two_processes_ms"][n] > 0
    assert set(result["tokens_per_s"]) == {"prefix hashing", "block allocation", "detokenizing"} and all(v > 1000 for v in result["tokens_per_s"].values())
    assert "8 running" in done.stdout and not children()


# ---- start-up -------------------------------------------------------------------------------------------------------------------------

def test_a_start_by_stage_and_what_the_child_imports(model):
    "A CPU child needs neither transformers nor a compiler, and is configured as soon as the configuration is made: its imports are done by then."
    start = host.measure_start(model, num_gpu_blocks_override=64, attention_backend="TORCH_REF")
    front, child = start["front"], start["child"]
    assert list(front.values()) == sorted(front.values()) and list(child.values()) == sorted(child.values())
    assert child["configured"] < child["model loaded"] < child["pool made, warmed up"] < front["child ready"]
    assert "torch" in start["child imports"] and not {"transformers", "sympy", "torch._inductor", "torch._dynamo"} & set(start["child imports"]), start["child imports"]
    assert len(start["text"]) > 3


def test_an_unconfigured_core_waits_and_can_be_sent_away(tmp_path):
    client = SyncMPClient()
    [child] = children()
    client.configure(make_config(), False, FakeExecutor)
    client.wait_until_ready()
    client.add_request(wire_request("a", max_tokens=1))
    assert client.get_output().outputs[0].request_id == "a"
    client.shutdown()
    for client in (SyncMPClient(), InprocClient()): client.shutdown()
    del client
    forgotten = SyncMPClient()
    directory = forgotten.resources.directory
    del forgotten
    assert not children() and not os.path.exists(directory) and not child.is_running()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["create_engine_config", "get_tokenizer"])
@pytest.mark.parametrize("make", [LLM.from_engine_args, AsyncLLM.from_engine_args])
def test_whatever_the_front_process_raises_the_early_child_goes(model, monkeypatch, make, where, error):
    def fail(*args): raise error("here")
    args = EngineArgs(model, num_gpu_blocks_override=64, attention_backend="TORCH_REF")
    if where == "get_tokenizer": monkeypatch.setattr("litevllm.engine.llm_engine.get_tokenizer", fail)
    else: monkeypatch.setattr(EngineArgs, where, fail)
    with pytest.raises(error, match="here"): make(args)
    assert not children()


def test_the_core_in_this_process_starts_the_same_way(model, monkeypatch):
    monkeypatch.setenv("LITEVLLM_ENABLE_MULTIPROCESSING", "0")
    engine = LLMEngine.from_engine_args(EngineArgs(model, num_gpu_blocks_override=64, attention_backend="TORCH_REF"))
    try: assert type(engine.engine_core) is InprocClient and engine.engine_core.ready.num_gpu_blocks == 64 and not children()
    finally: engine.close()
    broken = EngineCoreClient.make_client()
    broken.configure(make_config(), False, type("Broken", (FakeExecutor,), {"initialize_kv_cache": lambda self: 1 / 0}))
    with pytest.raises(ZeroDivisionError): broken.wait_until_ready()
    broken.shutdown()
