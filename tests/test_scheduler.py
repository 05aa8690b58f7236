"""Statements of vLLM 0.22's scheduler, one test each; the number in a name is the statement's in the design's semantics page.

A star marks a place where litevllm departs from vLLM on purpose."""
import copy, re, subprocess, sys
from dataclasses import replace

import pytest
from core_tools import EOS, Engine, abort, add, check_books, free_ids, make_request, make_scheduler, solo, step, update

from litevllm.core.async_scheduler import AsyncScheduler
from litevllm.core.output import DraftTokenIds, ModelRunnerOutput
from litevllm.core.request import Request, RequestRefused, RequestStatus
from litevllm.messages import EngineCoreRequest, FinishReason
from litevllm.sampling_params import SamplingParams


def plans(s, n, token=7): return [dict(step(s, token).num_scheduled_tokens) for _ in range(n)]


def waiting(s): return [r.request_id for r in s.waiting]


def running(s): return [r.request_id for r in s.running]


# ---- budget, chunks, order

def test_s01_chunked_prefill_on():
    "1: budget 8, prompts 5 and 5, chunked prefill on: {A5,B3}, then {A1,B2}."
    s = make_scheduler(budget=8)
    add(s, "A", 5), add(s, "B", 5)
    assert plans(s, 2) == [{"A": 5, "B": 3}, {"A": 1, "B": 2}]


def test_s01_chunked_prefill_off():
    "1: off: {A5}, then {A1,B5}; B waits whole."
    s = make_scheduler(budget=8, chunked=False)
    add(s, "A", 5), add(s, "B", 5)
    assert plans(s, 1) == [{"A": 5}] and waiting(s) == ["B"] and s.requests["B"].num_computed_tokens == 0
    assert plans(s, 1) == [{"A": 1, "B": 5}]


def test_s02_prompt_over_budget_is_refused_with_the_numbers():
    "2 (star): chunking off, A=9 > budget 8 is refused when added; B runs."
    s = make_scheduler(budget=8, chunked=False)
    with pytest.raises(RequestRefused, match=r"prompt has 9 tokens, max_num_batched_tokens is 8"): add(s, "A", 9)
    assert "A" not in s.requests and not s.has_requests()
    add(s, "B", 2)
    assert plans(s, 1) == [{"B": 2}]


def test_s02_a_threshold_makes_the_long_prompt_possible():
    "2 (star): with a threshold of 3 the same prompt comes in pieces that fit, so it is not refused."
    s = make_scheduler(budget=8, chunked=False, threshold=3)
    add(s, "A", 9)
    assert plans(s, 3) == [{"A": 3}] * 3


def test_s03_long_prefill_token_threshold():
    "3: threshold 3, budget 8, three 5-token prompts: {3,3,2}."
    s = make_scheduler(budget=8, threshold=3)
    for i in "ABC": add(s, i, 5)
    assert plans(s, 1) == [{"A": 3, "B": 3, "C": 2}]


def test_s04_running_first_then_first_come():
    "4: budget 6, A decoding, B=20, C=2: {A1,B5} four times, then {A1,B1,C2}."
    s = make_scheduler(budget=6)
    add(s, "A", 3)
    step(s)
    add(s, "B", 20), add(s, "C", 2)
    assert plans(s, 5) == [{"A": 1, "B": 5}] * 4 + [{"A": 1, "B": 1, "C": 2}]


def three_in_five_blocks(**options):
    "A, B and C of 4 tokens in a pool of 5 usable blocks of 4, each prefilled."
    s = make_scheduler(blocks=6, caching=False, **options)
    requests = [add(s, i, 4) for i in "ABC"]
    assert plans(s, 1) == [{"A": 4, "B": 4, "C": 4}]
    return s, requests


def test_s05_preemption_of_the_tail():
    "5: step 2 gives {A1,B1}; C is preempted, computed 0, counted once, and waits."
    s, (_, _, c) = three_in_five_blocks()
    plan = step(s)
    assert (plan.num_scheduled_tokens, plan.preempted_req_ids) == ({"A": 1, "B": 1}, {"C"})
    assert (c.num_computed_tokens, c.num_preemptions, c.status, waiting(s)) == (0, 1, RequestStatus.PREEMPTED, ["C"])


def test_s06_resume_replaces_the_block_table():
    "6: after A's abort: {B1,C5}, C resumed with [3,4], recomputing prompt and outputs."
    s, (_, _, c) = three_in_five_blocks()
    step(s)
    abort(s, "A")
    plan = s.schedule()
    cached = plan.scheduled_cached_reqs
    assert plan.num_scheduled_tokens == {"B": 1, "C": 5} and cached.resumed_req_ids == {"C"}
    assert cached.new_block_ids == [None, [3, 4]] and cached.num_computed_tokens == [5, 0]
    assert cached.all_token_ids == {"C": c.all_token_ids} and plan.scheduled_new_reqs == []


def test_s07_a_preempting_step_admits_nobody():
    "7: D would fit in the blocks that C's preemption frees, but waits behind C."
    s, _ = three_in_five_blocks()
    add(s, "D", 1)
    plan = step(s)
    assert plan.preempted_req_ids == {"C"} and not plan.scheduled_new_reqs and waiting(s) == ["C", "D"]


def test_s08_k2_the_only_request_outgrows_the_pool():
    "8 (star), K2: it ends with an error that gives the numbers, all tokens so far delivered; the next one runs."
    for is_async in (False, True):
        s = make_scheduler(blocks=4, is_async=is_async)
        a = add(s, "A", 5, max_tokens=100, ignore_eos=True)
        engine = Engine(s).drain(100)
        assert engine.reasons == {"A": "error"}
        assert engine.errors["A"] == "the request has 13 tokens and needs 4 KV blocks of 4, the pool has 3"
        assert engine.outputs["A"] == solo(a, 13)[0] and a.num_preemptions == 0
        check_books(s)
        b = add(s, "B", 5, max_tokens=3)
        assert engine.drain(100).outputs["B"] == solo(b, 256)[0]


def test_s08_the_error_comes_with_the_next_update_though_the_plan_is_empty():
    "8 (star): schedule() plans nothing, says so to the worker, and the error is in the next update's outputs."
    s = make_scheduler(blocks=3)
    add(s, "A", 8)
    step(s)
    plan = s.schedule()
    assert plan.num_scheduled_tokens == {} and plan.finished_req_ids == {"A"} and s.has_requests()
    out, = update(s, plan)
    assert (out.request_id, out.new_token_ids, out.finish_reason) == ("A", [], FinishReason.ERROR) and not s.has_requests()


def test_s08_others_that_hold_blocks_make_it_a_normal_preemption():
    "8: a request that preempts itself while others hold blocks resumes later and loses nothing."
    s = make_scheduler(blocks=6, caching=False)
    requests = [add(s, i, 8, max_tokens=8, ignore_eos=True) for i in "AB"]
    engine = Engine(s).drain()
    assert requests[1].num_preemptions >= 1
    for r in requests: assert engine.outputs[r.request_id] == solo(r, 256)[0] and engine.reasons[r.request_id] == "length"


def test_s08_asynchronous_waits_for_the_token_in_flight():
    "8 (star): the last token in flight may be an EOS; the request is not ended before it has come."
    s = make_scheduler(blocks=3, is_async=True)
    add(s, "A", 8)
    first = s.schedule()
    assert s.schedule().num_scheduled_tokens == {} and running(s) == ["A"]
    out, = update(s, first, EOS)
    assert out.finish_reason is FinishReason.STOP and not s.requests


def test_s08_drafts_are_dropped_before_the_request_is():
    "8 (star): drafts that do not fit in the whole pool are dropped; the token itself still fits."
    s = make_scheduler(blocks=3)
    add(s, "A", 6)
    step(s)
    s.update_draft_token_ids(DraftTokenIds(["A"], [[1, 2, 3]]))
    plan = s.schedule()
    assert plan.num_scheduled_tokens == {"A": 1} and plan.scheduled_spec_decode_tokens == {}


def test_s09_k1_a_prompt_larger_than_the_pool_is_refused():
    "9 (star), K1: pool of 8 blocks of 4, a prompt of 60 is refused with the numbers, one of 4 completes; both orders."
    for order in ("big first", "small first"):
        s = make_scheduler(blocks=8, mml=128)
        if order == "small first": small = add(s, "small", 4, max_tokens=5)
        with pytest.raises(RequestRefused, match=r"60 tokens needs 15 KV blocks of 4, the pool has 7"): add(s, "big", 60)
        if order == "big first": small = add(s, "small", 4, max_tokens=5)
        assert Engine(s).drain(50).outputs["small"] == solo(small, 128)[0]


def test_s09_a_prompt_that_fills_the_whole_pool_runs():
    "9: exactly the usable pool is not too much."
    s = make_scheduler(blocks=8)
    add(s, "A", 28, max_tokens=1)
    assert plans(s, 1) == [{"A": 28}] and not s.requests


def test_s09_resumed_with_chunking_off_and_over_budget():
    """2, 9 (star): a victim that outputs have made longer than the budget can never resume unchunked; it is ended with the
    numbers."""
    s = make_scheduler(blocks=8, budget=8, chunked=False, caching=False, seqs=2)
    for i in "AB": add(s, i, 7, max_tokens=30, ignore_eos=True)
    engine = Engine(s).drain(200)
    assert engine.reasons["B"] == "error" and re.fullmatch(
        r"the request cannot resume: (\d+) of its \1 tokens have to be recomputed in one step, max_num_batched_tokens is 8 and chunked prefill is off",
        engine.errors["B"])
    check_books(s)


def test_s10_seats():
    "10: len(running) never exceeds max_num_seqs."
    s = make_scheduler(seqs=2)
    for i in "ABCD": add(s, i, 2, max_tokens=2)
    assert plans(s, 3) == [{"A": 2, "B": 2}, {"A": 1, "B": 1}, {"C": 2, "D": 2}]


# ---- priority

def test_s11_priority_order():
    "11: lower value first; ties by arrival_time, then by id."
    s = make_scheduler(policy="priority", budget=8, seqs=1)
    for name, priority, arrival in [("d", 1, 0.), ("c", 0, 5.), ("b", 0, 1.), ("a", 0, 5.)]: add(s, name, 1, 1,
                                                                                                 priority=priority,
                                                                                                 arrival=arrival)
    assert [list(p) for p in plans(s, 4)] == [["b"], ["a"], ["c"], ["d"]]


def test_s12_s1_a_victim_that_was_planned_leaves_the_plan():
    """12, S1: V (worst) is planned before H needs a block: V leaves the plan, its token is given out again, and nobody else is
    passed over."""
    s = make_scheduler(blocks=4, policy="priority", caching=False)
    for name, n, priority in [("V", 3, 9), ("H", 4, 0), ("W", 3, 1)]: add(s, name, n, priority=priority)
    step(s)
    s.scheduler_config = replace(s.scheduler_config, max_num_batched_tokens=2, max_num_seqs=2)
    s.running = [s.requests[i] for i in "VHW"]      # V is visited first
    plan = step(s)
    assert (plan.num_scheduled_tokens, plan.preempted_req_ids) == ({"H": 1, "W": 1}, {"V"})
    assert plan.scheduled_cached_reqs.req_ids == ["H", "W"] and plan.total_num_scheduled_tokens == 2
    check_books(s)


def test_s12_among_equal_priorities_the_latest_arrival_goes():
    "12: priorities are equal, so arrival_time decides: C came last and goes, from the middle of the list."
    s, _ = three_in_five_blocks(policy="priority")
    assert [r.arrival_time for r in s.running] == [0., 1., 2.] and len({r.priority for r in s.running}) == 1
    s.running = [s.requests[i] for i in "BCA"]
    plan = step(s)      # B and C take the two free blocks, A needs one
    assert (plan.num_scheduled_tokens, plan.preempted_req_ids) == ({"B": 1, "A": 1}, {"C"})
    check_books(s)


def test_s12_own_victim_ends_the_pass():
    "12: the visited request is its own victim: the pass ends, those behind it are visited first-come in the next step."
    s = make_scheduler(blocks=5, policy="priority", caching=False)
    for name, priority in [("A", 1), ("B", 2), ("C", 3)]: add(s, name, 4 if name == "B" else 3, priority=priority, arrival=0.)
    add(s, "D", 3, priority=0, arrival=1.)
    assert plans(s, 1) == [{"D": 3, "A": 3, "B": 4, "C": 3}]
    s.running = [s.requests[i] for i in "BACD"]
    for r in s.running: r.priority = 5 if r.request_id == "B" else 1
    plan = s.schedule()
    assert (plan.num_scheduled_tokens, plan.preempted_req_ids) == ({}, {"B"})      # A, C and D are passed over
    update(s, plan)
    assert list(s.schedule().num_scheduled_tokens) == ["A", "C", "D"]


def test_s12_the_index_steps_back_only_for_a_planned_victim():
    """12: a victim in front of the visited one that had nothing to run shifts the list, and a neighbour is passed over until
    the next step."""
    s = make_scheduler(blocks=6, policy="priority", is_async=True, caching=False, seqs=4)
    for name in "PQRT": add(s, name, 4 if name != "P" else 3, max_tokens=1 if name == "P" else 9,
                            priority=9 if name == "P" else 1, arrival=0., ignore_eos=True)
    first = s.schedule()
    assert set(first.num_scheduled_tokens) == set("PQRT")
    s.running = [s.requests[i] for i in "PQRT"]
    # P's only token is in flight: skipped. Q takes the last free block; R needs one: P (worst, unplanned, in front) goes; T is
    # passed over.
    second = s.schedule()
    assert (list(second.num_scheduled_tokens), second.preempted_req_ids) == (["Q", "R"], {"P"})
    update(s, first), update(s, second)
    assert "T" in s.schedule().num_scheduled_tokens


def test_s12_a_victims_uncomputed_block_is_not_found_by_others():
    "12 (star): content noted for a step that the victim lost is forgotten; vLLM 0.22 lets others hit the uncomputed block."
    s = make_scheduler(blocks=7, policy="priority")
    prompt = list(range(100, 107))
    add(s, "V", prompt, priority=9, ignore_eos=True), add(s, "H", 8, priority=0, ignore_eos=True), add(s, "G", 4, priority=1,
                                                                                                       ignore_eos=True)
    step(s)                                        # H 2 blocks, G 1, V 2: one free
    s.running = [s.requests[i] for i in "VHG"]     # V is visited first
    # V fills its second block; H takes the last block; G needs one: V leaves the plan
    plan = step(s)
    assert plan.preempted_req_ids == {"V"} and "V" not in plan.num_scheduled_tokens
    twin = make_request(s, "T", s.requests["V"].all_token_ids[:8] + [1])
    assert s.kv_cache_manager.get_computed_blocks(twin)[1] == 4, "only the block that was computed is found"


def test_s13_priority_never_preempts_for_a_seat():
    "13: seats are full, an urgent request comes: it waits, nobody is preempted."
    s = make_scheduler(policy="priority", seqs=1)
    add(s, "A", 2, priority=5)
    step(s)
    add(s, "B", 2, priority=0)
    plan = step(s)
    assert plan.num_scheduled_tokens == {"A": 1} and not plan.preempted_req_ids


# ---- asynchronous

def test_s14_placeholders():
    "14: async, max_tokens=2, prompt 3: computed and placeholders over three schedules."
    s = make_scheduler(is_async=True)
    a = add(s, "A", 3, max_tokens=2)
    first = s.schedule()
    assert (first.num_scheduled_tokens, a.num_computed_tokens, a.num_output_placeholders) == ({"A": 3}, 3, 1)
    second = s.schedule()
    assert (second.num_scheduled_tokens, a.num_computed_tokens, a.num_output_placeholders) == ({"A": 1}, 4, 2)
    update(s, first)
    assert a.num_output_placeholders == 1
    assert s.schedule().num_scheduled_tokens == {}
    assert update(s, second)[0].finish_reason is FinishReason.LENGTH


def test_s15_eos_wastes_one_step():
    "15: an EOS found while the next step is in flight: that step's token is ignored."
    s = make_scheduler(is_async=True)
    add(s, "A", 3)
    first, second = s.schedule(), s.schedule()
    assert update(s, first, EOS)[0].finish_reason is FinishReason.STOP
    ids = list(second.num_scheduled_tokens)
    assert ids == ["A"] and s.update_from_output(second, ModelRunnerOutput(ids, {"A": 0}, [[9]])).outputs == []
    assert s.schedule().finished_req_ids == {"A"}


def test_s16_computed_advances_when_scheduled():
    "16: num_computed_tokens moves in schedule(), not in update_from_output()."
    s = make_scheduler(budget=2)
    a = add(s, "A", 4)
    plan = s.schedule()
    assert a.num_computed_tokens == 2
    update(s, plan)
    assert a.num_computed_tokens == 2


def test_s17_a_partial_chunk_yields_nothing():
    "17: no token, no output, until the prompt is done."
    s = make_scheduler(budget=2)
    add(s, "A", 5)
    assert [update(s, s.schedule()) for _ in range(2)] == [[], []]
    assert [o.new_token_ids for o in update(s, s.schedule())] == [[7]]


def test_s18_preempted_while_in_flight_still_gets_its_token():
    "18: C is preempted in the step planned while its own is in flight; the token is appended and C resumes with it."
    s = make_scheduler(blocks=6, caching=False, is_async=True)
    requests = [add(s, i, 4) for i in "ABC"]
    first, second = s.schedule(), s.schedule()
    assert second.preempted_req_ids == {"C"}
    assert [o.new_token_ids for o in update(s, first)] == [[7]] * 3
    c = requests[2]
    assert (c.output_token_ids, c.num_output_placeholders, c.num_computed_tokens) == ([7], 0, 0)


def test_s18_a_stop_while_preempted():
    "18: the late token of a preempted request is its last: it leaves the waiting queue."
    s = make_scheduler(blocks=6, caching=False, is_async=True)
    for i in "ABC": add(s, i, 4)
    first, _ = s.schedule(), s.schedule()
    outputs = update(s, first, {"C": EOS})
    assert outputs[2].finish_reason is FinishReason.STOP and waiting(s) == [] and "C" not in s.requests
    check_books(s)


# ---- coming and going

def test_s19_s6_output_for_an_aborted_request_is_dropped():
    "19, S6: abort between plan and update, twice, in the step in which it would have ended."
    s = make_scheduler()
    add(s, "A", 3, max_tokens=1), add(s, "B", 3)
    plan = s.schedule()
    abort(s, "A"), abort(s, "A")
    ids = ["A", "B"]
    outputs = s.update_from_output(plan, ModelRunnerOutput(ids, {"A": 0, "B": 1}, [[EOS], [7]])).outputs
    assert [o.request_id for o in outputs] == ["B"]
    check_books(s)


def test_s19_s6_an_abort_that_empties_the_plan():
    "S6: everything planned is aborted; the update gives nothing, the next plan is the flush, then there is no work."
    s = make_scheduler()
    add(s, "A", 3)
    plan = s.schedule()
    abort(s, ["A"])
    assert s.update_from_output(plan, ModelRunnerOutput(["A"], {"A": 0}, [[7]])).outputs == []
    assert s.schedule().finished_req_ids == {"A"} and not s.has_requests()


def test_s20_unknown_ids_are_ignored():
    "20: finish_requests(['B','zzz']) ends B and ignores the rest, in any kind of iterable."
    s = make_scheduler()
    add(s, "A", 3), add(s, "B", 3)
    abort(s, ["B", "zzz", "B"])
    assert list(s.requests) == ["A"] and s.finished_req_ids == {"B"}
    abort(s, (i for i in ["A"]))
    abort(s, "A"), abort(s, [])
    assert s.get_request_counts() == (0, 0)


def test_s21_the_flush():
    "21: after the last finish, one schedule returns {} with finished_req_ids={A}."
    s = make_scheduler()
    add(s, "A", 3, max_tokens=1)
    step(s)
    assert not s.has_unfinished_requests() and s.has_finished_requests() and s.has_requests()
    plan = s.schedule()
    assert (plan.num_scheduled_tokens, plan.finished_req_ids) == ({}, {"A"})
    assert not s.has_requests() and s.schedule().finished_req_ids == set()


def test_s22_duplicate_id_and_reset():
    "22: a duplicate live id is refused; reset_prefix_cache() is False while blocks are in use."
    s = make_scheduler()
    add(s, "A", 4, max_tokens=2)
    with pytest.raises(RequestRefused, match="the id 'A' is in use"): add(s, "A", 4)
    step(s)
    assert s.reset_prefix_cache() is False
    step(s)
    assert s.reset_prefix_cache() is True
    add(s, "A", 4)      # the id is free again
    assert len(s.kv_cache_manager.block_pool.cached_block_hash_to_block) == 0


def test_an_empty_prompt_is_refused():
    "There is nothing to compute logits from."
    with pytest.raises(RequestRefused, match="no tokens"): add(make_scheduler(), "A", [])


def test_a_prompt_longer_than_the_model_is_refused():
    "The front process says so first; a raw client must not be able to break the step either."
    with pytest.raises(RequestRefused, match="prompt has 9 tokens, max_model_len is 8"): add(make_scheduler(mml=8), "A", 9)


# ---- drafts

def test_s23_rejected_drafts():
    "23: 3 drafted, 1 accepted: num_computed_tokens -= 2."
    s = make_scheduler()
    a = add(s, "A", 5)
    step(s)
    s.update_draft_token_ids(DraftTokenIds(["A"], [[7, 8, 9]]))
    plan = s.schedule()
    assert (plan.num_scheduled_tokens, plan.scheduled_spec_decode_tokens, a.num_computed_tokens) == ({"A": 4}, {"A": [7, 8, 9]},
                                                                                                     9)
    out, = update(s, plan, {"A": [7, 1]})
    assert (out.new_token_ids, a.num_computed_tokens, a.num_tokens, a.spec_token_ids) == ([7, 1], 7, 8, [])
    assert s.schedule().num_scheduled_tokens == {"A": 1}


def test_s23_drafts_are_cut_to_budget_length_and_stop():
    "23, 24: drafts beyond the budget or max_model_len are not scheduled; tokens after a stop are dropped."
    s = make_scheduler(budget=3)
    add(s, "A", 3)
    step(s)
    s.update_draft_token_ids(DraftTokenIds(["A"], [[1, 2, 3]]))
    plan = s.schedule()
    assert (plan.num_scheduled_tokens, plan.scheduled_spec_decode_tokens) == ({"A": 3}, {"A": [1, 2]})
    assert update(s, plan, {"A": [1, EOS, 8]})[0].new_token_ids == [1, EOS] and not s.requests
    s = make_scheduler(mml=7)
    a = add(s, "A", 4)
    step(s)
    s.update_draft_token_ids(DraftTokenIds(["A"], [[1, 2, 3]]))
    assert s.schedule().num_scheduled_tokens == {"A": 2} and a.num_computed_tokens == 6


def test_s23_drafts_for_unfinished_prefill_ended_and_unknown_requests_are_dropped():
    "23: update_draft_token_ids() keeps drafts only where the next step is a decode."
    s = make_scheduler(budget=4)
    a = add(s, "A", 6)
    step(s)
    s.update_draft_token_ids(DraftTokenIds(["A", "gone"], [[1], [2]]))
    assert a.spec_token_ids == [] and a.num_tokens_with_spec == 6


def test_s23_a_draft_fills_no_cached_block():
    "23: only known tokens are content: a block completed by a draft is not noted until its token is known."
    s = make_scheduler()
    a = add(s, "A", 6)
    step(s)
    s.update_draft_token_ids(DraftTokenIds(["A"], [[1, 2, 3]]))
    plan = s.schedule()
    cached = lambda: sum(b.block_hash is not None for b in s.kv_cache_manager.req_to_blocks["A"])
    assert cached() == 1
    update(s, plan, {"A": [9]})
    step(s), step(s)
    assert a.num_tokens == 10 and cached() == 2


def test_drafts_with_async_scheduling_are_refused_by_name():
    "Both at start-up and when they come."
    s = make_scheduler(is_async=True)
    with pytest.raises(ValueError, match="async_scheduling cannot take speculative tokens yet"):
        s.update_draft_token_ids(DraftTokenIds(["A"], [[1]]))
    config = replace(s.scheduler_config, num_speculative_tokens=2, async_scheduling=False)
    with pytest.raises(ValueError, match="set async_scheduling=False"): AsyncScheduler(config, s.cache_config)


def test_s24_running_pass_numbers():
    "24: capped by max_model_len - 1 - computed; 0 goes on to the next request; the waiting pass has no such cap."
    s = make_scheduler(mml=8, is_async=True)
    a, b = add(s, "A", 6, max_tokens=50), add(s, "B", 2, max_tokens=50)
    first, second = s.schedule(), s.schedule()
    assert first.num_scheduled_tokens == {"A": 6, "B": 2} and second.num_scheduled_tokens == {"A": 1, "B": 1}
    update(s, first)
    third = s.schedule()      # A: computed 7 = max_model_len - 1, nothing to run; B behind it runs
    assert third.num_scheduled_tokens == {"B": 1} and a.num_output_placeholders == 1
    s = make_scheduler(mml=8)
    assert add(s, "C", 8) and step(s).num_scheduled_tokens == {"C": 8}


def test_s24_threshold_in_the_running_pass():
    "24: the threshold caps chunks of a running prefill too."
    s = make_scheduler(threshold=3)
    add(s, "A", 7)
    assert plans(s, 4) == [{"A": 3}, {"A": 3}, {"A": 1}, {"A": 1}]


def test_s24_preempted_goes_back_into_the_heap():
    "24: under the priority policy a preempted request queues by its priority, not in front."
    s = make_scheduler(blocks=6, policy="priority", caching=False)
    for name, p in [("A", 0), ("B", 1), ("C", 5)]: add(s, name, 4, priority=p)
    step(s)
    add(s, "D", 4, priority=3)
    assert step(s).preempted_req_ids == {"C"} and waiting(s) == ["D", "C"]


# ---- admission

def test_admission_gate_reserves_the_whole_prompt():
    "scheduler_reserve_full_isl: a prompt whose blocks would not all fit now waits; without the gate its first chunk is let in."
    for reserve, expected in ((True, {"A": 1}), (False, {"A": 1, "B": 7})):
        s = make_scheduler(blocks=8, budget=8, reserve=reserve, caching=False)
        add(s, "A", 8)
        step(s)
        add(s, "B", 20)
        assert dict(s.schedule().num_scheduled_tokens) == expected


def test_admission_gate_counts_the_outputs_of_a_preempted_request():
    """scheduler_reserve_full_isl: B's prompt fits in the free blocks, and so does its first chunk, but not prompt plus outputs:
    it waits. Without the gate its first chunk is let in."""
    for reserve, expected in ((True, {"A": 1}), (False, {"A": 1, "B": 4})):
        s = make_scheduler(blocks=7, threshold=4, reserve=reserve, caching=False)
        for i in "AB": add(s, i, 4, max_tokens=30, ignore_eos=True)
        assert plans(s, 10) == [{"A": 4, "B": 4}] + [{"A": 1, "B": 1}] * 8 + [{"A": 1}]
        b, kv = s.requests["B"], s.kv_cache_manager
        assert (b.status, b.num_prompt_tokens, b.num_output_tokens) == (RequestStatus.PREEMPTED, 4, 9)
        num_free = kv.block_pool.get_num_free_blocks()
        assert kv.num_blocks_for(b.num_prompt_tokens) <= num_free < kv.num_blocks_for(b.num_tokens)
        assert plans(s, 1) == [expected]
        abort(s, "A")
        assert plans(s, 1) == [{"B": 4}]      # nothing is lost: with the room it goes on, by chunks


def test_s4_case_a_long_prefill_does_not_stop_decodes():
    """S4: A gets a token in every step while a 200-token prompt comes in 15 at a time; C, behind it, has its first token when
    B's prompt is done."""
    s = make_scheduler(budget=16)
    a = add(s, "A", 3, max_tokens=100, ignore_eos=True)
    step(s)
    b = add(s, "B", 200, max_tokens=100)
    c = add(s, "C", 2)
    num_steps = 0
    while not c.num_output_tokens:
        before = a.num_output_tokens
        step(s)
        num_steps += 1
        assert a.num_output_tokens == before + 1
    # ceil(200 / 15); first come, first served: the long prompt is not overtaken
    assert num_steps == 14 and b.num_output_tokens == 1
    s = make_scheduler(budget=16, threshold=8)              # the threshold is vLLM's remedy
    add(s, "B", 200), add(s, "C", 2)
    step(s)
    assert s.requests["C"].num_output_tokens == 1 and s.requests["B"].num_output_tokens == 0


def test_s2_case_every_preemption_point():
    """S2: two requests, a pool one block short, block size 4; tokens equal SOLO and blocks are ceil(tokens/4) wherever
    preemption falls."""
    preempted_at = set()
    for n in range(1, 10):
        for max_tokens in range(1, 18):
            need = -(-(n + max_tokens) // 4)
            s = make_scheduler(blocks=max(2 * need - 1, need) + 1, budget=64)
            requests = [add(s, i, n, max_tokens=max_tokens, eos=None) for i in "AB"]
            engine, seen = Engine(s), 0
            while s.has_requests():
                plan = engine.schedule()
                engine.update()
                for i in plan.num_scheduled_tokens:
                    if i in s.requests:
                        assert len(s.kv_cache_manager.get_block_ids(i)) == -(-s.requests[i].num_computed_tokens // 4)
                if plan.preempted_req_ids: preempted_at.add(requests[1].num_tokens % 4)
                seen += 1
                assert seen < 200
            for r in requests: assert engine.outputs[r.request_id] == solo(r, 256)[0], (n, max_tokens)
    assert len(preempted_at) >= 1, "nothing was preempted"


def test_s2_case_one_request_preempted_many_times():
    "S2: a request that is pushed out again and again loses and doubles nothing."
    s = make_scheduler(blocks=8, caching=False)
    requests = [add(s, i, 3, max_tokens=20, eos=None) for i in "ABC"]
    engine = Engine(s).drain()
    assert max(r.num_preemptions for r in requests) >= 2
    for r in requests: assert engine.outputs[r.request_id] == solo(r, 256)[0]


# ---- stop and length

def outputs_of(tokens, n=3, mml=256, **params):
    "Feed one request token by token: [(new tokens, finish reason, stop reason)] of its last output, and all its tokens."
    s = make_scheduler(mml=mml)
    a = add(s, "A", n, **params)
    for token in tokens:
        out, = update(s, s.schedule(), token)
        if out.finish_reason is not None: break
    return a.output_token_ids, None if out.finish_reason is None else str(out.finish_reason), out.stop_reason


def test_s39_order_of_the_checks():
    "39: EOS on the last allowed token is 'stop', and so is a stop id; EOS comes before the stop ids."
    assert outputs_of([7, EOS], max_tokens=2) == ([7, EOS], "stop", None)
    assert outputs_of([7, 9], max_tokens=2, stop_token_ids=[9]) == ([7, 9], "stop", 9)
    assert outputs_of([EOS], stop_token_ids=[EOS]) == ([EOS], "stop", None)
    assert outputs_of([7, 8], max_tokens=2) == ([7, 8], "length", None)


def test_s40_stop_reasons():
    "40: EOS has stop_reason None, a stop id itself; the token stays in token_ids."
    assert outputs_of([7, EOS]) == ([7, EOS], "stop", None)
    assert outputs_of([7, 33], stop_token_ids=[33]) == ([7, 33], "stop", 33)


def test_s41_ignore_eos_and_min_tokens():
    "41: ignore_eos never stops on EOS; min_tokens=2: EOS as the first token goes on, as the second stops."
    assert outputs_of([EOS] * 4, max_tokens=4, ignore_eos=True) == ([EOS] * 4, "length", None)
    assert outputs_of([EOS, EOS, 7], min_tokens=2) == ([EOS, EOS], "stop", None)
    assert outputs_of([9, 9, 7], min_tokens=2, stop_token_ids=[9]) == ([9, 9], "stop", 9)


def test_s42_max_model_len():
    "42: max_model_len 5, prompt 3: 2 outputs, 'length'; max_tokens=None leaves the limit to max_model_len."
    assert outputs_of([7] * 5, mml=5) == ([7, 7], "length", None)
    assert outputs_of([7] * 5, mml=5, max_tokens=None) == ([7, 7], "length", None)


def test_s42_max_model_len_ends_a_request_below_min_tokens():
    "42 (star): vLLM 0.22 never ends a request that reaches max_model_len before min_tokens; here it ends with 'length'."
    assert outputs_of([7] * 5, mml=5, min_tokens=8, max_tokens=9) == ([7, 7], "length", None)


# ---- what is said to the worker and to the client

def test_all_token_ids_come_with_those_absent_from_the_previous_step():
    "CachedRequestData: prompt and outputs for a request that was passed over, nothing for one that was not."
    s = make_scheduler(budget=3)
    add(s, "A", 2), add(s, "B", 2)
    assert [dict(p.num_scheduled_tokens) for p in (step(s), step(s))] == [{"A": 2, "B": 1}, {"A": 1, "B": 1}]
    add(s, "C", 1), add(s, "D", 1)
    step(s)
    plan = step(s)        # budget 3: A, B and C; D is not seated until there is budget
    assert plan.scheduled_cached_reqs.all_token_ids == {} and plan.scheduled_cached_reqs.num_output_tokens == [3, 2, 1]


def test_a_plan_is_not_changed_by_what_follows():
    "The worker may still be reading it: later schedules, updates and aborts leave it alone."
    s = make_scheduler(blocks=12, is_async=True)
    for i in "ABC": add(s, i, 4)
    kept = [(p, copy.deepcopy(p)) for p in (s.schedule(), s.schedule())]
    for p, _ in kept: update(s, p)
    for _ in range(3): step(s)
    abort(s, "ABC")
    assert all(p == c for p, c in kept)


def test_the_runners_lists_are_not_changed():
    "Tokens beyond a stop are cut in the output, not in the runner's own list."
    s = make_scheduler()
    add(s, "A", 3, max_tokens=1)
    result = ModelRunnerOutput(["A"], {"A": 0}, [[5, 6]])
    out, = s.update_from_output(s.schedule(), result).outputs
    assert out.new_token_ids == [5] and result.sampled_token_ids == [[5, 6]]


def test_num_cached_tokens_comes_once_with_the_first_output():
    "The prefix hit of the first prefill; a later resume does not report again."
    s = make_scheduler()
    prompt = list(range(100, 109))
    add(s, "A", prompt, max_tokens=2)
    assert [update(s, s.schedule())[0].num_cached_tokens for _ in range(2)] == [0, None]
    add(s, "B", prompt, max_tokens=2)
    assert [update(s, s.schedule())[0].num_cached_tokens for _ in range(2)] == [8, None]


def test_stats():
    "Counts of the moment, and counters since the last make_stats()."
    s = make_scheduler(blocks=6, seqs=3, log_stats=True)
    prompt = list(range(100, 104))
    for i in "ABCD": add(s, i, prompt + [ord(i)])
    plan = s.schedule()
    stats = s.update_from_output(plan, ModelRunnerOutput(list("ABC"), {i: k
                                                                       for k, i in enumerate("ABC")}, [[7]] * 3)).scheduler_stats
    assert (stats.num_running_reqs, stats.num_waiting_reqs, stats.num_free_blocks, round(stats.kv_cache_usage, 2)) == (3, 1, 1,
                                                                                                                       .8)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits, stats.num_preemptions) == (15, 8, 0)
    assert s.make_stats().prefix_cache_queries == 0


def test_from_engine_core_request():
    "The wire's request becomes the core's."
    s = make_scheduler()
    wire = EngineCoreRequest("A-0123", [1, 2, 3, 4, 5], SamplingParams(), 12.5, cache_salt="x", priority=3)
    r = Request.from_engine_core_request(wire, s.block_hasher)
    assert (r.request_id, r.num_tokens, r.arrival_time, r.cache_salt, r.priority, len(r.block_hashes)) == ("A-0123", 5, 12.5,
                                                                                                           "x", 3, 1)


def test_core_imports_no_tensor_library():
    "core/ decides and knows no tensor."
    code = "import sys, litevllm.core.async_scheduler; print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
                          check=True).stdout.strip() == "[]"
