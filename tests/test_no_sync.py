"""Launching a step asks the device for no value: tokens of a step feed the next one without the host, whatever the requests ask for."""
import random
import time

import numpy as np
import pytest
import torch

from graph_tools import graph_config, graph_worker, no_sync, tear_apart
from litevllm import LLM
from litevllm.core.output import SchedulerOutput
from litevllm.sampling_params import SamplingParams
from litevllm.tiny import write_tiny_model
from litevllm.worker import buffers
from litevllm.worker.input_batch import RequestRows, append_sampled, prepare_inputs
from worker_harness import GREEDY, Driver, make_worker

PROMPTS = {"A": list(range(5, 18)), "B": list(range(40, 47)), "C": [3]}
BAD_WORD = SamplingParams(temperature=0, ignore_eos=True)
BAD_WORD._bad_words_token_ids = [[7, 8], [9]]
WISHES = {"plain": GREEDY, "logprobs": SamplingParams(temperature=0, logprobs=2, prompt_logprobs=1, ignore_eos=True),
          "min_tokens": SamplingParams(temperature=0, min_tokens=3, stop_token_ids=[5], logit_bias={9: 1.0}),
          "penalties": SamplingParams(temperature=0, repetition_penalty=1.3, frequency_penalty=.5, presence_penalty=.5, ignore_eos=True),
          "bad_words": BAD_WORD, "allowed": SamplingParams(temperature=0, allowed_token_ids=[4, 5, 6], ignore_eos=True)}


@pytest.fixture(scope="module")
def path(tmp_path_factory): return write_tiny_model(tmp_path_factory.mktemp("no_sync") / "llama")


def ahead_of_time(driver, counts):
    "A plan made without knowing the tokens of the last one: the driver counts a token that is still to come."
    plan = driver.plan(counts, {})
    for req_id, count in counts.items():
        request = driver.requests[req_id]
        request.computed += count
        if request.computed == len(request.tokens): request.tokens.append(None)
    return plan


COUNTS = [{"A": 7, "B": 7}, {"A": 6, "B": 1, "C": 1}, {"A": 1, "B": 1, "C": 1}, {"A": 1, "C": 1}, {"A": 1, "B": 1, "C": 1}]


def reference(worker, params):
    driver = Driver(worker)
    for req_id, prompt in PROMPTS.items(): driver.add(req_id, prompt, params)
    return [driver.step(counts) for counts in COUNTS]


def launched(worker, params, kernels=()):
    "All steps launched before the first output is read, under watch; then the outputs."
    driver, runner = Driver(worker), tear_apart(worker.model_runner)
    for req_id, prompt in PROMPTS.items(): driver.add(req_id, prompt, params)
    plans = [ahead_of_time(driver, counts) for counts in COUNTS]
    for plan in plans: plan.scheduled_cached_reqs.all_token_ids.clear()     # B's row still stands
    with no_sync(kernels) as watch: steps = [runner.launch(plan) for plan in plans]
    assert len(watch.seen) > 100
    return [step.get_output() for step in steps]


@pytest.mark.parametrize("wish", WISHES)
def test_launching_waits_for_nothing(path, wish):
    want = reference(make_worker(path), WISHES[wish])
    outputs = launched(make_worker(path), WISHES[wish])
    assert [dict(zip(o.req_ids, o.sampled_token_ids)) for o in outputs] == want
    assert all(o.logprobs and len(o.logprobs["A"]) == 1 for o in outputs[1:]) == (wish == "logprobs")
    if wish == "logprobs": assert [list(o.prompt_logprobs_dict) for o in outputs[:2]] == [["B"], ["A", "C"]] and len(outputs[1].prompt_logprobs_dict["A"]) == 12


@pytest.mark.parametrize("mode, compile", [("FULL_AND_PIECEWISE", "eager"), ("FULL_DECODE_ONLY", None)])
def test_launching_graphs_waits_for_nothing(path, mode, compile):
    want = reference(make_worker(path), GREEDY)
    worker = graph_worker(graph_config(path, mode, compile=compile))
    outputs = launched(worker, GREEDY, kernels=[(worker.model_runner, "forward")] if compile else ())
    assert [dict(zip(o.req_ids, o.sampled_token_ids)) for o in outputs] == want


def test_zeroing_and_empty_plans_wait_for_nothing(path):
    worker = make_worker(path)
    step = SchedulerOutput.make_empty()
    step.new_block_ids_to_zero = [3, 5]
    for layer in worker.model_runner.layers.values(): layer.kv_cache.fill_(1.0)
    with no_sync(): launch = worker.model_runner.launch(step)
    assert launch.get_output().req_ids == []
    for layer in worker.model_runner.layers.values(): assert (layer.kv_cache[:, [3, 5]] == 0).all() and (layer.kv_cache[:, [2, 4]] == 1).all()


@pytest.mark.parametrize("name, work", [
    ("item", lambda t: t.sum().item()), ("tolist", lambda t: t.tolist()), ("bool", lambda t: bool((t > 0).any())), ("nonzero", lambda t: t.nonzero()),
    ("mask", lambda t: t[t > 0]), ("mask written", lambda t: t.__setitem__(t > 0, 0)), ("repeat", lambda t: t.repeat_interleave(t.long())),
    ("cpu", lambda t: t.cpu()), ("int", lambda t: range(t[0])), ("masked_select", lambda t: t.masked_select(t > 0)), ("unique", lambda t: t.unique())])
def test_the_watch_sees(name, work):
    t = torch.tensor([1, 2, 0, 3])
    with pytest.raises(AssertionError, match="waits for a value"), no_sync(): work(t)
    work(t)                                   # and it is over afterwards
    with no_sync(): t.clone().masked_fill_(t > 1, 0)[torch.tensor([0, 1])].cumsum(0)


def test_the_watch_would_notice_a_sync_in_launch(path, monkeypatch):
    worker = make_worker(path)
    compute = worker.model_runner.model.compute_logits
    monkeypatch.setattr(worker.model_runner.model, "compute_logits", lambda hidden: compute(hidden) * float(hidden.sum().item() > -1e9))
    with pytest.raises(AssertionError, match="waits for a value"): launched(worker, GREEDY)


def test_the_hosts_rows_lag_and_the_counts_do_not(path):
    worker = make_worker(path)
    outputs = launched(worker, GREEDY)
    rows = worker.model_runner.rows
    row = rows.row_of["A"]
    tokens = [o.sampled_token_ids[o.req_ids.index("A")] for o in outputs]
    got = [t for step in tokens for t in step]
    n = int(rows.num_tokens[row])
    assert n == len(PROMPTS["A"]) + len(got) == 17
    assert rows.device_token_ids[row, :n].tolist() == PROMPTS["A"] + got
    assert rows.token_ids[row, :13].tolist() == PROMPTS["A"] and rows.token_ids[row, 13:n].tolist() == [0] * 4


def test_a_row_that_changes_hands_is_complete_on_the_device(path):
    "Preempted and resumed with outputs, while another request took its row; the device's side must hold what the plan brings."
    want = reference(make_worker(path), GREEDY)
    truth = PROMPTS["A"] + [t for step in want for t in step.get("A", [])]
    worker = make_worker(path)
    tear_apart(worker.model_runner)
    driver = Driver(worker)
    for r in "AB": driver.add(r, PROMPTS[r])
    driver.run("A", 2)
    driver.preempt("A")
    driver.run("B", 3)
    assert driver.run("A", 4, chunk=5) == truth[13:17]
    rows = worker.model_runner.rows
    for r in "AB":
        n = int(rows.num_tokens[rows.row_of[r]])
        assert rows.device_token_ids[rows.row_of[r], :n].tolist() == driver.requests[r].tokens


def test_drafts_reach_the_device(path):
    truth = [t for step in reference(make_worker(path), GREEDY) for t in step.get("A", [])]
    worker = make_worker(path)
    tear_apart(worker.model_runner)
    driver = Driver(worker)
    driver.add("A", PROMPTS["A"])
    driver.step({"A": 13})
    assert driver.step({"A": 3}, {"A": [truth[1], (truth[2] + 1) % 512]})["A"] == truth[1:3]
    assert driver.run("A", 4) == truth[:4]


@pytest.mark.parametrize("seed", range(3))
def test_device_tables_follow_random_traffic(seed):
    "Rows filled, grown, freed and taken again; after each flush the device's side equals the host's wherever the host wrote last."
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    table, copy = buffers.StagedWriteTensor(5, 40), np.zeros((5, 40), np.int32)
    table.gpu, table.shared = table.gpu.clone(), False
    for _ in range(200):
        for _ in range(rng.integers(0, 6)):
            row, start = int(rng.integers(5)), int(rng.integers(40))
            count = int(rng.integers(0, 41 - start))
            table.np[row, start:start + count] = copy[row, start:start + count] = rng.integers(1, 1000, count)
            table.stage_write(row, start, count)
        if rng.random() < .6: table.apply_write()
    table.apply_write()
    assert (table.gpu.numpy() == copy).all() and not table.staged


def test_appended_tokens_land_where_the_next_step_reads_them():
    from litevllm.core.output import CachedRequestData, NewRequestData
    rows = RequestRows(3, 12, 4)
    rows.tokens.gpu, rows.tokens.shared = rows.tokens.gpu.clone(), False
    first = SchedulerOutput([NewRequestData("A", [1, 2, 3], GREEDY, [1], 0), NewRequestData("B", [7, 8], GREEDY, [2], 0)], CachedRequestData(), {"A": 3, "B": 2}, 5)
    rows.update(first)
    append_sampled(rows, prepare_inputs(rows, first), torch.tensor([101, 102]))
    second = SchedulerOutput([], CachedRequestData(["B", "A"], new_block_ids=[None, None], num_computed_tokens=[2, 3]), {"B": 1, "A": 1}, 2)
    rows.update(second)
    assert prepare_inputs(rows, second).input_ids.tolist() == [102, 101] and rows.token_ids[rows.row_of["A"], 3] == 0


def test_through_the_interpreter_with_every_filter(path, run_python, root):
    "The sampling and attention kernels of a GPU, interpreted: all filters on, and still nothing waits outside of a kernel."
    done = run_python([root/"tests/interp/no_sync_checks.py", path], TRITON_INTERPRET="1", PYTHONPATH=str(root/"tests"))
    assert "tokens agree" in done.stdout


# ---- the whole engine, a step ahead

class SlowEvent:
    "The end of a step's copies, some time later; notes the order in which it is waited for."
    def __init__(self, order, number, rng): self.order, self.number, self.seconds = order, number, rng.random() * 3e-3

    def synchronize(self):
        time.sleep(self.seconds)
        self.order.append(self.number)


@pytest.mark.parametrize("options", [dict(), dict(num_gpu_blocks_override=14), dict(max_num_batched_tokens=9, max_num_seqs=4)], ids=str)
def test_the_engine_runs_ahead(path, monkeypatch, options):
    "Steps that end late, outputs from another thread, tables torn apart: the tokens are those of the plain engine, aborts included."
    monkeypatch.setenv("LITEVLLM_ENABLE_MULTIPROCESSING", "0")
    rng = random.Random(5)
    print("seed 5")
    prompts = [[rng.randrange(3, 512) for _ in range(n)] for n in (1, 4, 9, 17, 6)]
    params = [SamplingParams(temperature=.8 * (i % 2), seed=i, max_tokens=9 + i, ignore_eos=True, logprobs=i % 3 or None) for i in range(5)]
    def run(llm):
        outputs = [o.outputs[0] for o in llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)]
        return [(list(o.token_ids), [{t: pytest.approx(e.logprob, abs=1e-3) for t, e in entry.items()} for entry in o.logprobs or ()]) for o in outputs]
    with LLM(str(path), block_size=4, attention_backend="TORCH_REF") as llm: want = run(llm)
    with LLM(str(path), block_size=4, attention_backend="TORCH_REF", **options) as llm:
        core = llm.llm_engine.engine_core.engine_core
        runner, order, overlapped = tear_apart(core.model_executor.worker.model_runner), [], []
        launch = runner.launch
        def launching(plan):
            step = launch(plan)
            launching.count += 1
            overlapped.append(launching.count - 1 - len(order))     # launched, and not yet waited for
            step.event = SlowEvent(order, launching.count, rng)
            return step
        launching.count, runner.launch, runner.is_async = 0, launching, True
        plain = [(tokens, [{t: a.expected for t, a in entry.items()} for entry in entries]) for tokens, entries in want]
        assert run(llm) == plain
        assert order == sorted(order) and max(overlapped) >= 1
        for i, p in enumerate(prompts): llm.llm_engine.add_request(f"x{i}", {"prompt_token_ids": p}, params[i])
        for _ in range(4): llm.llm_engine.step()
        llm.llm_engine.abort_request([f"x{i}" for i in range(5)])
        assert run(llm) == plain
        while core.has_work(): core.step_fn()
        assert not runner.rows.requests and core.scheduler.get_request_counts() == (0, 0)


def test_an_error_in_a_launched_step_reaches_the_caller(path, monkeypatch):
    monkeypatch.setenv("LITEVLLM_ENABLE_MULTIPROCESSING", "0")
    with LLM(str(path), block_size=4, attention_backend="TORCH_REF") as llm:
        runner = llm.llm_engine.engine_core.engine_core.model_executor.worker.model_runner
        class Broken:
            def synchronize(self): raise RuntimeError("CUDA error: an illegal memory access was encountered")
        launch = runner.launch
        def launching(plan):
            step = launch(plan)
            step.event = Broken()
            return step
        runner.launch, runner.is_async = launching, True
        with pytest.raises(RuntimeError, match="illegal memory access"): llm.generate([[5, 6]], SamplingParams(max_tokens=3), use_tqdm=False)
        runner.is_async = False


def test_a_request_that_fails_is_logged_once_though_a_step_is_in_flight(path, monkeypatch, capsys):
    monkeypatch.setenv("LITEVLLM_ENABLE_MULTIPROCESSING", "0")
    with LLM(str(path), block_size=4, attention_backend="TORCH_REF") as llm:
        runner = llm.llm_engine.engine_core.engine_core.model_executor.worker.model_runner
        with torch.no_grad(): runner.model.model.embed_tokens.weight[90] = torch.nan
        runner.is_async = True
        tear_apart(runner)
        well = llm.generate([[5, 6]], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)[0].outputs[0].token_ids
        capsys.readouterr()
        sick, fine = llm.generate([[90, 91], [5, 6]], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
        assert sick.outputs[0].finish_reason == "error" and "not finite" in sick.error and fine.outputs[0].token_ids == well
        assert sum("model_runner.py" in line for line in capsys.readouterr().err.splitlines()) == 1
        core = llm.llm_engine.engine_core.engine_core
        while core.has_work(): core.step_fn()
        assert not runner.failed
