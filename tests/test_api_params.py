"""What the user may say, and what is refused: SamplingParams, EngineArgs, LLM (semantics.md 48-49; bug reports I2, I5, K4, L3, L4)."""
import inspect
import json
import logging
import math
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import fields, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from litevllm import LLM, CompletionOutput, EngineArgs, EngineDeadError, LLMEngine, RequestOutput, SamplingParams
from litevllm.compilation_config import CompilationConfig, resolve_compilation
from litevllm.config import AsyncEngineArgs, SchedulerConfig, VllmConfig
from litevllm.facts import DeviceFacts, GiB
from litevllm.engine.async_llm import AsyncLLM
from litevllm.other_args import OtherArgs
from litevllm.sampling_params import RequestOutputKind, SamplingType, StructuredOutputsParams

GREEDY = SamplingParams(temperature=0, max_tokens=6)
VLLM = json.loads((Path(__file__).parent/"data"/"vllm022-arguments.json").read_text())   # vLLM's arguments and their defaults


# ---- SamplingParams

@pytest.mark.parametrize("kw, words", [
    (dict(top_p=0.0), "top_p must be in (0, 1], got 0.0"), (dict(top_p=1.01), "1.01"), (dict(top_p=-0.1), "-0.1"),
    (dict(top_k=-2), "got -2"), (dict(max_tokens=0), "max_tokens must be at least 1, got 0"), (dict(max_tokens=-1), "got -1"),
    (dict(min_tokens=-1), "got -1"), (dict(min_tokens=17), "min_tokens=17 is more than max_tokens=16"),
    (dict(presence_penalty=2.01), "2.01"), (dict(presence_penalty=-2.01), "-2.01"), (dict(frequency_penalty=2.01), "2.01"),
    (dict(frequency_penalty=-2.01), "-2.01"), (dict(repetition_penalty=0.0), "repetition_penalty"), (dict(repetition_penalty=-1.0), "-1.0"),
    (dict(temperature=-0.1), "-0.1"), (dict(min_p=-0.1), "-0.1"), (dict(min_p=1.1), "1.1"), (dict(n=0), "n must be from 1 to 16384, got 0"), (dict(n=16385), "got 16385"),
    (dict(n=3, temperature=0), "n=3"), (dict(logprobs=-2), "got -2"), (dict(prompt_logprobs=-2), "got -2"),
    (dict(stop=""), "stop"), (dict(stop=["a", ""]), "stop"), (dict(stop="a", detokenize=False), "detokenize"), (dict(bad_words=[""]), "bad_words"),
    (dict(stop="\ud800"), "stop holds half a surrogate pair at position 0"), (dict(bad_words=["a", "b\udfff"]), "bad_words[1]"),
    (dict(seed=2**63), str(2**63)), (dict(seed=-2**63 - 1), "seed"), (dict(seed=2**63 - 2, n=3), f"{2**63}, does not fit in 64 bits"),
    (dict(seed=-2, n=2), "no seed"), (dict(seed=-3, n=3), "no seed"), (dict(allowed_token_ids=[]), "allowed_token_ids is empty"),
    (dict(logit_bias={1: math.nan}), "logit_bias[1]"), (dict(logit_bias={2: -math.inf}), "logit_bias[2]"),
    (dict(logit_bias={3: 1e37}), "from -1e+30 to 1e+30, got 1e+37"), (dict(logit_bias={4: -1.1e30}), "got -1.1e+30"), (dict(temperature=1.1e30), "at most 1e+30"),
    (dict(repetition_penalty=9e-7), "from 1e-06 to 1e+06, got 9e-07"), (dict(repetition_penalty=1.1e6), "got 1100000.0"),
    (dict(temperature=10**400), "temperature is too large"), (dict(logprob_token_ids=list(range(129))), "129 entries, and at most 128"),
    (dict(logprobs=1, logprob_token_ids=[1, 2]), "logprobs=1 with 2"), (dict(logprobs=-1, logprob_token_ids=[1, 2]), "logprobs=-1 with 2"),
])
def test_out_of_range_is_a_value_error_with_the_number(kw, words):
    with pytest.raises(ValueError) as e: SamplingParams(**kw)
    assert words in str(e.value)


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none(name, value):
    with pytest.raises(ValueError, match=name): SamplingParams(**{name: value})


@pytest.mark.parametrize("kw", [dict(temprature=1.0), dict(max_new_tokens=3), dict(best_of=2), dict(top_k=1.0), dict(max_tokens="8"),
                                dict(temperature="hot"), dict(seed=1.5), dict(min_tokens=None), dict(temperature=None)])
def test_unknown_arguments_and_wrong_types_are_type_errors_with_the_name(kw):
    with pytest.raises(TypeError, match=next(iter(kw))): SamplingParams(**kw)


INTS = ["n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"]
FLOATS = ["presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "min_p"]
BOOLS = ["ignore_eos", "flat_logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output", "skip_clone",
         "skip_reading_prefix_cache"]
ID_LISTS = ["stop_token_ids", "logprob_token_ids", "allowed_token_ids"]
WRONG = ([(name, v) for name in INTS for v in ("3", 3.0, [3], {3}, b"3", np.array([3, 4]), np.float32(3))]
         + [(name, True) for name in INTS if "logprobs" not in name]
         + [(name, v) for name in FLOATS for v in ("0.5", True, [0.5], 0.5j, np.array([0.5, 0.5]), None)]
         + [(name, v) for name in BOOLS for v in (1, 0, "no", "", [], np.int64(1), 1.0)]
         + [(name, v) for name in ID_LISTS for v in (3, "34", {3, 4}, {3: 4}, [3.0], ["3"], [True], [[3]], np.array([3.5]), np.array(3), b"ab", [None])]
         + [(name, v) for name in ("stop", "bad_words") for v in (5, 5.0, b"a", {"a"}, {"a": 1}, ["a", 5], [b"a"], [["a"]], [None], True)]
         + [("bad_words", "ab")]
         + [("logit_bias", v) for v in ([1], "ab", {"1": 1.0}, {1.0: 1.0}, {True: 1.0}, {1: "1"}, {1: None}, {1: True}, {1: [1.0]}, [(1, 1.0)])]
         + [("output_kind", v) for v in (0, "DELTA", None)])


@pytest.mark.parametrize("name, value", WRONG, ids=lambda v: repr(v)[:30])
def test_a_wrong_type_is_a_type_error_with_the_name(name, value):
    with pytest.raises(TypeError, match=name): SamplingParams(**{name: value})


def test_numpy_and_tuples_become_plain_python_that_the_wire_carries():
    import torch
    np1 = np.int64(1)
    p = SamplingParams(n=np.int32(2), presence_penalty=np.float32(0.5), temperature=np.float64(0.75), top_p=np1, top_k=np.uint8(7), seed=np1, max_tokens=np1,
                       min_tokens=np1, logprobs=np.int64(2), prompt_logprobs=torch.tensor(3), ignore_eos=np.True_, detokenize=np.bool_(True),
                       stop=("a", np.str_("bc")), bad_words=("x",), stop_token_ids=np.array([3, 4]), allowed_token_ids=torch.tensor([5, 6]),
                       logprob_token_ids=(np1, 2), logit_bias={np.int64(4): np.float32(-0.5), 5: 1})
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(p), type=SamplingParams)
    assert back == p == SamplingParams(n=2, presence_penalty=0.5, temperature=0.75, top_p=1.0, top_k=7, seed=1, max_tokens=1, min_tokens=1, logprobs=2,
        prompt_logprobs=3, ignore_eos=True, stop=["a", "bc"], bad_words=["x"], stop_token_ids=[3, 4], allowed_token_ids=[5, 6], logprob_token_ids=[1, 2],
        logit_bias={4: -0.5, 5: 1.0})
    plain = {int, float, str, bool, type(None), SamplingType, RequestOutputKind}
    for name in SamplingParams.__struct_fields__:
        value = getattr(p, name)
        for v in (value if isinstance(value, (list, set)) else [*value, *value.values()] if isinstance(value, dict) else [value]): assert type(v) in plain, name
    assert SamplingParams(allowed_token_ids=range(3)).allowed_token_ids == [0, 1, 2]


def test_what_the_user_does_to_a_list_afterwards_is_no_longer_ours():
    stop, ids, bias = ["a"], [1], {1: 1.0}
    p = SamplingParams(stop=stop, stop_token_ids=ids, allowed_token_ids=ids, logit_bias=bias)
    stop.append(""), ids.append("x"), bias.clear()
    assert (p.stop, p.stop_token_ids, p.allowed_token_ids, p.logit_bias) == (["a"], [1], [1], {1: 1.0})


def test_what_says_nothing_is_none():
    p = SamplingParams(logit_bias={}, logprob_token_ids=[], logprobs=False, prompt_logprobs=False, stop=None, stop_token_ids=None, bad_words=None)
    assert p == SamplingParams() and p.num_logprobs is None


@pytest.mark.parametrize("kw, n", [({}, None), (dict(logprobs=0), 0), (dict(logprobs=-1), -1), (dict(logprobs=5), 5), (dict(logprob_token_ids=[4, 5, 6]), 3),
                                   (dict(logprobs=2, logprob_token_ids=[4, 5]), 2), (dict(logprob_token_ids=list(range(128))), 128)])
def test_num_logprobs(kw, n): assert SamplingParams(**kw).num_logprobs == n


def test_edges_that_are_allowed():
    SamplingParams(top_p=1.0), SamplingParams(top_p=1e-9), SamplingParams(top_k=-1), SamplingParams(top_k=0), SamplingParams(top_k=10**6)
    SamplingParams(presence_penalty=2), SamplingParams(frequency_penalty=-2), SamplingParams(min_tokens=16), SamplingParams(max_tokens=None, min_tokens=99)
    assert SamplingParams(seed=-1).seed is None and SamplingParams(seed=0).seed == 0 and SamplingParams(seed=-2**63).seed == -2**63
    SamplingParams(n=16384), SamplingParams(seed=2**63 - 2, n=2), SamplingParams(seed=-4, n=3), SamplingParams(seed=-1, n=3), SamplingParams(seed=0, n=3)
    SamplingParams(top_k=2**100), SamplingParams(max_tokens=10**30), SamplingParams(logit_bias={1: -100, 2: 100.0}), SamplingParams(repetition_penalty=1e-3)
    SamplingParams(logit_bias={1: -1e30, 2: 1e30}, repetition_penalty=1e-6), SamplingParams(repetition_penalty=1e6, temperature=1e30)
    assert SamplingParams(logprobs=True).logprobs == 1 and SamplingParams(prompt_logprobs=True).prompt_logprobs == 1
    assert SamplingParams().max_tokens == 16 and SamplingParams(stop="ab").stop == ["ab"]


def test_temperature_classes():
    g = SamplingParams(temperature=0, top_p=0.5, top_k=7, min_p=0.3)
    assert (g.sampling_type, g.top_p, g.top_k, g.min_p) == (SamplingType.GREEDY, 1.0, 0, 0.0)
    c = SamplingParams(temperature=0.001, top_k=7)
    assert (c.sampling_type, c.temperature, c.top_k) == (SamplingType.RANDOM, 0.01, 7)
    assert SamplingParams(temperature=0.01).temperature == 0.01
    assert SamplingParams(seed=3).sampling_type is SamplingType.RANDOM_SEED


def test_positional_order_is_vllms():
    p = SamplingParams(1, 0.1, 0.2, 1.1, 0.7, 0.9, 40, 0.05, 5, ["x"], [3], True, 9, 2)
    assert (p.n, p.presence_penalty, p.frequency_penalty, p.repetition_penalty, p.temperature, p.top_p, p.top_k, p.min_p, p.seed, p.stop,
            p.stop_token_ids, p.ignore_eos, p.max_tokens, p.min_tokens) == (1, 0.1, 0.2, 1.1, 0.7, 0.9, 40, 0.05, 5, ["x"], [3], True, 9, 2)


@pytest.mark.parametrize("stop, include, held", [(None, False, 0), ("a", False, 0), (["abc", "de"], False, 2), ("abc", True, 0)])
def test_text_held_back_for_stop_strings(stop, include, held):
    assert SamplingParams(stop=stop, include_stop_str_in_output=include).output_text_buffer_length == held


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.fixed_dictionaries(dict(
    temperature=st.sampled_from([0.0, 0.005, 0.5, 1.5]), top_p=st.floats(0.01, 1), top_k=st.integers(-1, 100), min_p=st.floats(0, 1),
    seed=st.one_of(st.none(), st.integers(-1, 2**40)), stop=st.lists(st.text(min_size=1, max_size=4), max_size=3),
    stop_token_ids=st.lists(st.integers(0, 99), max_size=3), ignore_eos=st.booleans(), max_tokens=st.integers(5, 50), min_tokens=st.integers(0, 5),
    output_kind=st.sampled_from(list(RequestOutputKind)), include_stop_str_in_output=st.booleans())),
    st.one_of(st.integers(0, 99), st.lists(st.integers(0, 99)), st.none()), st.one_of(st.none(), st.integers(0, 99)))
def test_the_wire_and_a_clone_change_nothing(kw, listed, eos):
    p = SamplingParams(**kw)
    p.update_from_generation_config({"eos_token_id": listed}, eos)
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(p), type=SamplingParams)
    clone = p.clone()
    for q in (back, clone):
        assert q == p and q.sampling_type is p.sampling_type and (q.eos_token_id, q.all_stop_token_ids) == (p.eos_token_id, p.all_stop_token_ids)
    clone.stop_token_ids.append(1), clone.all_stop_token_ids.add(-1)
    assert back == p and -1 not in p.all_stop_token_ids


@pytest.mark.parametrize("listed, eos, kw, expected", [
    (2, 2, {}, (2, [], {2})), ([2], 2, {}, (2, [], {2})), ([2, 7, 9], 2, {}, (2, [7, 9], {2, 7, 9})), (None, 2, {}, (2, [], {2})),
    (7, 2, {}, (2, [7], {2, 7})), ([2, 7], None, {}, (None, [2, 7], {2, 7})), (None, None, dict(stop_token_ids=[5]), (None, [5], {5})),
    ([2, 7], 2, dict(stop_token_ids=[5]), (2, [5, 7], {2, 5, 7})), ([2, 7], 2, dict(ignore_eos=True), (None, [], {2, 7})),
    ([2, 7], 2, dict(ignore_eos=True, stop_token_ids=[5]), (None, [5], {2, 5, 7})),
])
def test_end_tokens(listed, eos, kw, expected):
    p = SamplingParams(**kw)
    p.update_from_generation_config({} if listed is None else {"eos_token_id": listed}, eos)
    assert (p.eos_token_id, p.stop_token_ids, p.all_stop_token_ids) == expected


def test_from_optional_takes_none_for_whatever_was_not_said():
    names = VLLM["SamplingParams.from_optional"]
    nothing = SamplingParams.from_optional(**dict.fromkeys(names))
    assert nothing == SamplingParams(max_tokens=None) and SamplingParams.from_optional() == SamplingParams()
    given = dict(n=2, temperature=0.5, top_p=None, stop=["a"], max_tokens=9, seed=3, bad_words=["b"], logprobs=None, output_kind=RequestOutputKind.DELTA)
    assert SamplingParams.from_optional(**given) == SamplingParams(n=2, temperature=0.5, stop=["a"], max_tokens=9, seed=3, bad_words=["b"],
                                                                    output_kind=RequestOutputKind.DELTA)
    assert SamplingParams.from_optional(logit_bias={"5": 500, 6: -1e300, "7": -1}).logit_bias == {5: 100.0, 6: -100.0, 7: -1.0}
    for bad, error in (({"x": 1.0}, TypeError), ({"5": math.nan}, ValueError), ({"5": "1"}, TypeError), ({"-1.5": 1.0}, TypeError)):
        with pytest.raises(error, match="logit_bias"): SamplingParams.from_optional(logit_bias=bad)
    with pytest.raises(TypeError, match="best_of"): SamplingParams.from_optional(best_of=2)


INERT = dict(structured_outputs={"regex": "a"}, extra_args={"a": 1}, routed_experts_prompt_start=1, thinking_token_budget=1,
             repetition_detection={"min_count": 2})
ACTING = dict(n=2, presence_penalty=0.1, frequency_penalty=0.1, repetition_penalty=1.1, logprobs=1, prompt_logprobs=0, logprob_token_ids=[1],
              flat_logprobs=True, spaces_between_special_tokens=False, logit_bias={1: 1.0}, allowed_token_ids=[1], bad_words=["x"],
              skip_reading_prefix_cache=True, temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, seed=1, max_tokens=9, min_tokens=1, ignore_eos=True,
              stop=["a"], stop_token_ids=[1], include_stop_str_in_output=True, skip_special_tokens=False, output_kind=RequestOutputKind.DELTA)
INTERNAL = {"detokenize", "skip_clone", "output_text_buffer_length", "_eos_token_id", "_all_stop_token_ids", "_bad_words_token_ids"}


@pytest.mark.parametrize("name", INERT)
def test_what_does_not_act_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"{name}="): SamplingParams(**{name: INERT[name]}).refuse_unsupported()


def test_structured_outputs_params_is_a_name_for_what_is_refused():
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))
    with pytest.raises(ValueError, match=r"structured_outputs=StructuredOutputsParams\(json=None, regex='a\+'"): params.refuse_unsupported()


def test_every_field_acts_or_is_refused():
    SamplingParams(**ACTING).refuse_unsupported()
    assert set(SamplingParams.__struct_fields__) == set(INERT) | set(ACTING) | INTERNAL


# ---- EngineArgs and VllmConfig

H100, A100, H20, L4, CPU = (DeviceFacts("cuda", "NVIDIA H100 80GB HBM3", 79*GiB), DeviceFacts("cuda", "NVIDIA A100-SXM4-80GB", 79*GiB),
                            DeviceFacts("cuda", "NVIDIA H20", 70*GiB), DeviceFacts("cuda", "NVIDIA L4", 22*GiB), DeviceFacts("cpu"))


@pytest.fixture(scope="module")
def config_of(tiny_llama):
    return lambda device=CPU, **kw: EngineArgs(tiny_llama, **kw).create_engine_config(device)


@pytest.mark.parametrize("device, budget, seats", [(H100, 16384, 1024), (H20, 16384, 1024), (A100, 8192, 256), (L4, 8192, 256), (CPU, 4096, 256)])
def test_defaults_by_device(config_of, device, budget, seats):
    c = config_of(device)
    s = c.scheduler_config
    assert (s.max_num_batched_tokens, s.max_num_seqs, c.device_config.device) == (budget, seats, device.kind)
    assert s.async_scheduling and s.enable_chunked_prefill and s.scheduler_reserve_full_isl and s.policy == "fcfs"
    assert s.long_prefill_token_threshold == 0 and s.max_model_len == c.model_config.max_model_len == 256
    assert (c.cache_config.block_size, c.cache_config.gpu_memory_utilization, c.cache_config.enable_prefix_caching) == (16, 0.92, True)
    assert c.model_config.seed == 0 and c.attention_config.backend is None and c.model_config.vocab_size == 512


def test_budget_and_seats_follow_each_other(config_of):
    of = lambda **kw: (lambda s: (s.max_num_batched_tokens, s.max_num_seqs))(config_of(**kw).scheduler_config)
    assert of(max_num_batched_tokens=8) == (8, 8)
    assert of(max_num_seqs=2) == (512, 2)                                     # 2 requests of 256 tokens
    assert of(max_num_seqs=2, enable_chunked_prefill=False) == (512, 2)
    assert of(max_num_seqs=2, max_num_batched_tokens=9999) == (9999, 2)       # as asked
    with pytest.raises(ValueError, match="max_num_batched_tokens=8 is less than max_num_seqs=9"): of(max_num_batched_tokens=8, max_num_seqs=9)


def test_chunking_off_grows_the_default_budget_and_warns_of_a_small_one(config_of, tiny_llama, tmp_path, caplog):
    for f in os.listdir(tiny_llama): (tmp_path/f).symlink_to(os.path.join(tiny_llama, f))
    long = json.loads((tmp_path/"config.json").read_text()) | {"max_position_embeddings": 32768}
    (tmp_path/"config.json").unlink(), (tmp_path/"config.json").write_text(json.dumps(long))
    assert EngineArgs(str(tmp_path), enable_chunked_prefill=False).create_engine_config(H100).scheduler_config.max_num_batched_tokens == 32768
    assert not caplog.records
    assert config_of(enable_chunked_prefill=False, max_num_batched_tokens=64).scheduler_config.max_num_batched_tokens == 64
    assert "max_num_batched_tokens=64 is less than max_model_len=256" in caplog.text


def test_max_model_len(config_of):
    assert config_of(max_model_len=100).scheduler_config.max_model_len == 100
    for n, words in ((257, "max_model_len=257 is more than the 256"), (0, "got 0"), (-1, "got -1")):
        with pytest.raises(ValueError, match=words): config_of(max_model_len=n)


@pytest.mark.parametrize("asked, device, got", [("auto", CPU, "float32"), ("auto", L4, "bfloat16"), ("half", CPU, "float16"), ("bfloat16", CPU, "bfloat16"),
                                                ("float", L4, "float32"), ("torch.float16", L4, "float16")])
def test_dtype(tiny_llama, tmp_path, asked, device, got):
    for f in os.listdir(tiny_llama): (tmp_path/f).symlink_to(os.path.join(tiny_llama, f))
    c = json.loads((tmp_path/"config.json").read_text())
    c.pop("torch_dtype", None)
    (tmp_path/"config.json").unlink(), (tmp_path/"config.json").write_text(json.dumps(c | {"dtype": "bfloat16"}))
    assert EngineArgs(str(tmp_path), dtype=asked).create_engine_config(device).model_config.dtype == got


@pytest.mark.parametrize("kw, error, words", [
    (dict(max_num_seq=1), TypeError, "max_num_seq"), (dict(tensor_parallel_size=2), ValueError, "tensor_parallel_size=2"),
    (dict(max_logprobs=-2), ValueError, "max_logprobs.*-2"), (dict(seed=2**63), ValueError, "seed"), (dict(max_num_seqs=2**70), ValueError, "max_num_seqs"),
    (dict(speculative_config={"method": "ngram"}), ValueError, "speculative_config"), (dict(kv_cache_dtype="fp8"), ValueError, "kv_cache_dtype.*fp8"),
    (dict(attention_backend="FLASHINFER"), ValueError, "attention_backend.*FLASHINFER"), (dict(scheduling_policy="sjf"), ValueError, "sjf"),
    (dict(block_size=0), ValueError, "block_size.*0"), (dict(block_size=2**62), ValueError, "block_size must be from 1 to 2"),
    (dict(num_gpu_blocks_override=2**31), ValueError, "num_gpu_blocks_override must be from 2 to 2.*2147483648"),
    (dict(gpu_memory_utilization=0.0), ValueError, "gpu_memory_utilization"),
    (dict(gpu_memory_utilization=1.01), ValueError, "1.01"), (dict(num_gpu_blocks_override=1), ValueError, "num_gpu_blocks_override.*1"),
    (dict(kv_cache_memory_bytes=0), ValueError, "kv_cache_memory_bytes"), (dict(dtype="int4"), ValueError, "int4"),
    (dict(max_num_seqs=0), ValueError, "max_num_seqs.*0"), (dict(max_num_batched_tokens=0), ValueError, "max_num_batched_tokens.*0"),
    (dict(long_prefill_token_threshold=-1), ValueError, "long_prefill_token_threshold"), (dict(load_format="dummy"), ValueError, "dummy"),
])
def test_engine_arguments_refused_by_name(config_of, kw, error, words):
    with pytest.raises(error, match=words): config_of(**kw)


ARG_INTS = ["max_model_len", "block_size", "max_num_batched_tokens", "max_num_seqs", "long_prefill_token_threshold", "num_gpu_blocks_override",
            "kv_cache_memory_bytes", "seed", "max_logprobs", "max_cudagraph_capture_size"]
ARG_BOOLS = ["enable_chunked_prefill", "enable_prefix_caching", "async_scheduling", "enforce_eager", "skip_tokenizer_init", "disable_log_stats"]
ARG_TEXTS = ["tokenizer", "scheduling_policy", "kv_cache_dtype", "device", "attention_backend", "load_format", "generation_config", "served_model_name"]
ARG_WRONG = ([(name, v) for name in ARG_INTS for v in ("4", 2.5, 4.0, True, [4], np.float64(4))]
             + [(name, v) for name in ARG_BOOLS for v in (1, 0, "no", "True", [], np.int64(0))]
             + [(name, v) for name in ARG_TEXTS for v in (4, b"x", ["a", 5][1:], True)]
             + [("gpu_memory_utilization", v) for v in ("0.9", True, [0.9])] + [("model", v) for v in (None, 4, ["a"], b"a", True)])


@pytest.mark.parametrize("name, value", ARG_WRONG, ids=lambda v: repr(v)[:30])
def test_engine_arguments_of_a_wrong_type_are_type_errors_with_the_name(name, value):
    with pytest.raises(TypeError, match=name): EngineArgs(**{"model": "m", name: value})
    changed = EngineArgs("m")
    setattr(changed, name, value)
    with pytest.raises(TypeError, match=name): changed.create_engine_config(CPU)   # an assignment is checked, too


def test_engine_arguments_become_plain_python_that_the_wire_carries(tiny_llama):
    from pathlib import Path
    n = np.int64
    args = EngineArgs(Path(tiny_llama), tokenizer=Path(tiny_llama), max_model_len=n(64), block_size=n(8), max_num_batched_tokens=n(32), max_num_seqs=n(4),
                      num_gpu_blocks_override=n(9), gpu_memory_utilization=np.float32(0.5), enable_prefix_caching=np.False_, enforce_eager=np.True_,
                      seed=None, max_logprobs=n(-1), kv_cache_memory_bytes=n(2**40), served_model_name=["a", "b"])
    c = args.create_engine_config(CPU)
    assert VllmConfig.from_bytes(c.to_bytes()) == c
    assert (c.cache_config.block_size, c.model_config.seed, c.model_config.max_logprobs, c.model_config.served_model_name) == (8, 0, -1, "a")
    assert c.cache_config.enable_prefix_caching is False and c.model_config.enforce_eager is True
    assert EngineArgs(tiny_llama, seed=-5).create_engine_config(CPU).model_config.seed == -5


OTHER = {f.name: f.default for f in fields(OtherArgs)}
FREE = {"trust_remote_code": True, "swap_space": 4, "disable_custom_all_reduce": True, "max_seq_len_to_capture": 8192, "disable_cascade_attn": False,
        "max_parallel_loading_workers": 2, "use_tqdm_on_load": False, "ignore_patterns": ["*.bin"], "pt_load_map_location": "cuda"}


@pytest.mark.parametrize("name", OTHER)
def test_vllms_other_arguments_are_taken_where_they_change_nothing(config_of, name, caplog):
    for value in (OTHER[name], None):
        EngineArgs("m", **{name: value}).warn_of_no_effect()
        assert not caplog.records
    if name in FREE:
        EngineArgs("m", **{name: FREE[name]}).warn_of_no_effect()
        assert f"{name}={FREE[name]!r} has no effect" in caplog.text
        return
    for other in (3, "other", ["a"], {"a": 1}, not OTHER[name] if isinstance(OTHER[name], bool) else True):
        with pytest.raises(ValueError, match=f"does not act on {name}="): EngineArgs("m", **{name: other})


def test_vllms_other_arguments_change_nothing_in_the_configuration(config_of, caplog):
    plain = config_of()
    caplog.clear()
    assert config_of(**OTHER) == config_of(**dict.fromkeys(OTHER)) == plain and not caplog.records
    assert config_of(**FREE) == plain and len(caplog.records) == len(FREE)
    assert config_of(revision="main", tokenizer_revision="main", code_revision="main", compilation_config=0, offload_params=set(), hf_overrides={},
                     runner="generate", task="generate", tokenizer_mode="hf", distributed_executor_backend="mp") == plain


def test_every_argument_of_vllms_is_known_with_its_default(tiny_llama, config_of, caplog):
    "A script may write out what is the default anyway. enforce_eager=False asks for a compiled model on a CPU too; disable_log_stats is no part of the configuration."
    known, args = {f.name for f in fields(AsyncEngineArgs)}, VLLM["EngineArgs"] | VLLM["AsyncEngineArgs"]
    assert len(args) > 200 and set(args) <= known and set(VLLM["LLM"]) <= set(args) | {"chat_template"} <= known
    args.pop("model")
    assert AsyncEngineArgs(tiny_llama, **args).create_engine_config(CPU) == config_of(enforce_eager=False)
    assert [r.args[0] for r in caplog.records if "no effect" in r.message] == ["ignore_patterns"]   # a list is no dataclass default: any is told of
    assert EngineArgs(tiny_llama, **VLLM["LLM"]).create_engine_config(CPU) == config_of(enforce_eager=False)


@pytest.mark.parametrize("name, call", [("LLM.generate", LLM.generate), ("LLM.chat", LLM.chat), ("AsyncLLM.generate", AsyncLLM.generate)])
def test_the_calls_have_vllms_keywords_and_defaults(name, call):
    ours = {p.name: p.default for p in inspect.signature(call).parameters.values()}
    assert {k: ours.get(k, "missing") for k in VLLM[name]} == VLLM[name]
    if name == "LLM.chat": assert [*ours][2:] == [*VLLM[name]]   # its order, too: all may be given by position


def test_async_engine_args_are_engine_args():
    a = AsyncEngineArgs("m", max_num_seqs=3, enable_log_requests=True)
    assert isinstance(a, EngineArgs) and a.max_num_seqs == 3 and AsyncEngineArgs("m").enable_log_requests is False
    with pytest.raises(TypeError, match="enable_log_requests"): AsyncEngineArgs("m", enable_log_requests=1)
    with pytest.raises(TypeError, match="max_num_seqs"): AsyncEngineArgs("m", max_num_seqs="3")


BAD_FILES = {"{": "can't be read", "[]": "not an object", "\x00": "can't be read", '{"eos_token_id": "2"}': "eos_token_id.*'2'", '{"eos_token_id": [2, "7"]}': "eos_token_id",
             '{"eos_token_id": 2.0}': "eos_token_id.*2.0", '{"eos_token_id": [[2]]}': "eos_token_id", '{"eos_token_id": true}': "eos_token_id.*True",
             '{"eos_token_id": {"a": 2}}': "eos_token_id", '{"temperature": "hot"}': "temperature must be a number", '{"top_p": 2}': "top_p.*got 2",
             '{"max_new_tokens": 0}': "max_tokens.*generation_config='vllm'", '{"top_k": 1.5}': "top_k"}


@pytest.mark.parametrize("text", BAD_FILES)
def test_a_bad_generation_config_is_a_value_error_before_a_core_is_built(tiny_llama, tmp_path, text, monkeypatch):
    "L3: and it names the file, or the field."
    for f in os.listdir(tiny_llama):
        if f != "generation_config.json": (tmp_path/f).symlink_to(os.path.join(tiny_llama, f))
    (tmp_path/"generation_config.json").write_text(text)
    monkeypatch.setattr("litevllm.engine.core_client.SyncMPClient.configure", lambda *a, **kw: pytest.fail("a core was built"))
    with pytest.raises(ValueError, match=BAD_FILES[text]) as e: LLM(str(tmp_path))
    assert "generation_config.json" in str(e.value)
    (tmp_path/"generation_config.json").write_text('{"eos_token_id": null, "temperature": null, "pad_token_id": "odd"}')
    assert EngineArgs(str(tmp_path)).create_engine_config(CPU).model_config.get_diff_sampling_param() == {}


def test_a_taste_that_is_no_good_can_be_done_without(tiny_llama, tmp_path):
    for f in os.listdir(tiny_llama): (tmp_path/f).symlink_to(os.path.join(tiny_llama, f))
    (tmp_path/"generation_config.json").unlink(missing_ok=True)
    (tmp_path/"generation_config.json").write_text('{"temperature": "hot", "eos_token_id": [2, 7]}')
    c = EngineArgs(str(tmp_path), generation_config="vllm").create_engine_config(CPU).model_config
    assert c.get_diff_sampling_param() == {} and c.try_get_generation_config()["eos_token_id"] == [2, 7]
    with pytest.raises(ValueError, match="no-such-folder"): EngineArgs(str(tmp_path), generation_config="/no-such-folder").create_engine_config(CPU)


@pytest.mark.parametrize("text, words", [('{"model_max_length": "long"}', "model_max_length.*long"), ("{", "tokenizer_config.json.*can't be read"),
                                         ('{"model_max_length": 0}', "model_max_length")])
def test_a_bad_tokenizer_config(tiny_llama, tmp_path, text, words):
    for f in os.listdir(tiny_llama):
        if f != "tokenizer_config.json": (tmp_path/f).symlink_to(os.path.join(tiny_llama, f))
    (tmp_path/"tokenizer_config.json").write_text(text)
    with pytest.raises(ValueError, match=words): EngineArgs(str(tmp_path)).create_engine_config(CPU)


def test_models_that_are_none(tmp_path):
    "A model of an architecture that litevllm can't read is refused by name, before a core is built."
    for config, words in (({"model_type": "llama", "max_position_embeddings": 64}, "names no architecture"),
                          ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*max_position_embeddings")):
        (tmp_path/"config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=words): EngineArgs(str(tmp_path)).create_engine_config(CPU)


def test_unknown_device(tiny_llama):
    with pytest.raises(ValueError, match="device.*tpu"): EngineArgs(tiny_llama, device="tpu").create_engine_config()


def test_drafts_with_async_scheduling_are_refused_by_name():
    with pytest.raises(ValueError, match="num_speculative_tokens=2.*async_scheduling"): SchedulerConfig(8, 4, 64, num_speculative_tokens=2)
    assert SchedulerConfig(8, 4, 64, num_speculative_tokens=2, async_scheduling=False).num_speculative_tokens == 2


# ---- compiled, recorded, 8-bit

def compiled(config_of, device=L4, **kw):
    c = config_of(device, **kw).compilation_config
    return c.mode, str(c.cudagraph_mode), c.max_cudagraph_capture_size


@pytest.mark.parametrize("device, kw, got", [
    (L4, {}, ("compile", "FULL_AND_PIECEWISE", 512)), (CPU, {}, ("none", "NONE", 0)), (L4, dict(enforce_eager=True), ("none", "NONE", 0)),
    (L4, dict(max_num_seqs=8), ("compile", "FULL_AND_PIECEWISE", 16)), (L4, dict(compilation_config=0), ("none", "NONE", 0)),
    (L4, dict(compilation_config={"mode": "NONE", "cudagraph_mode": "full"}), ("none", "FULL", 512)),
    (L4, dict(compilation_config={"cudagraph_mode": "NONE"}), ("compile", "NONE", 0)),
    (L4, dict(compilation_config={"cudagraph_mode": "PIECEWISE"}, max_cudagraph_capture_size=20), ("compile", "PIECEWISE", 16)),
    (L4, dict(cudagraph_capture_sizes=[1, 512], max_cudagraph_capture_size=512, max_num_batched_tokens=256), ("compile", "FULL_AND_PIECEWISE", 1)),
    (L4, dict(compilation_config={"cudagraph_capture_sizes": [2, 7]}), ("compile", "FULL_AND_PIECEWISE", 7)),
    (L4, dict(compilation_config=CompilationConfig(mode="compile", cudagraph_mode="FULL", cudagraph_capture_sizes=[1, 3])), ("compile", "FULL", 3)),
    (L4, dict(max_num_batched_tokens=100, max_num_seqs=90), ("compile", "FULL_AND_PIECEWISE", 100)),
    (CPU, dict(compilation_config=3), ("compile", "NONE", 0)), (CPU, dict(compilation_config=3, enforce_eager=True), ("none", "NONE", 0)),
    (CPU, dict(compilation_config={"cudagraph_mode": "FULL"}), ("none", "NONE", 0))])
def test_what_is_compiled_and_recorded(config_of, device, kw, got): assert compiled(config_of, device, **kw) == got


def test_capture_sizes_are_vllms():
    "(max_num_seqs, max_num_batched_tokens) -> the list in the docstring of vllm/config/vllm.py, for engines of every size"
    for seqs, tokens in ((1, 64), (3, 8192), (100, 8192), (256, 8192), (1024, 16384), (256, 300), (256, 500)):
        largest = min(2 * seqs, 512, tokens)
        want = [i for i in [1, 2, 4] if i <= largest] + list(range(8, min(largest + 1, 256), 8)) + list(range(256, largest + 1, 16))
        if tokens <= largest and tokens not in want: want.append(tokens)
        c = resolve_compilation({}, False, "cuda", seqs, tokens)
        assert c.cudagraph_capture_sizes == sorted(want) and CompilationConfig(**{f.name: getattr(c, f.name) for f in fields(c)}) == c


@pytest.mark.parametrize("kw, error, words", [
    (dict(compilation_config={"mode": 1}), ValueError, "mode.*1"), (dict(compilation_config={"cudagraph_mode": "SOME"}), ValueError, "cudagraph_mode.*SOME"),
    (dict(compilation_config="3"), TypeError, "compilation_config"), (dict(compilation_config={"modus": 0}), ValueError, "modus"),
    (dict(compilation_config={"custom_ops": ["all"]}), ValueError, "custom_ops"), (dict(compilation_config={"cudagraph_capture_sizes": [1]}, cudagraph_capture_sizes=[1]), ValueError, "leave out one"),
    (dict(cudagraph_capture_sizes=[]), ValueError, "cudagraph_capture_sizes"), (dict(cudagraph_capture_sizes=[0]), ValueError, "cudagraph_capture_sizes"),
    (dict(cudagraph_capture_sizes=["a"]), TypeError, "cudagraph_capture_sizes"), (dict(cudagraph_capture_sizes=8), TypeError, "cudagraph_capture_sizes"),
    (dict(max_cudagraph_capture_size=0), ValueError, "max_cudagraph_capture_size"), (dict(cudagraph_capture_sizes=[1, 8], max_cudagraph_capture_size=4), ValueError, "max_cudagraph_capture_size=4"),
    (dict(cudagraph_capture_sizes=[10000], max_num_batched_tokens=512), ValueError, "10000.*512")])
def test_compilation_settings_are_refused_by_name(config_of, kw, error, words):
    with pytest.raises(error, match=words): config_of(L4, **kw)


def test_what_has_no_effect_is_told(config_of, caplog):
    config_of(CPU, compilation_config={"cudagraph_mode": "FULL"})
    config_of(L4, compilation_config={"mode": 0, "cudagraph_mode": "PIECEWISE"})
    config_of(L4, compilation_config={"mode": 3}, enforce_eager=True)
    config_of(L4, cudagraph_capture_sizes=[1, 999999])
    told = [r.getMessage() for r in caplog.records if r.name == "litevllm.compilation_config"]
    assert len(told) == 4 and ["CPU" in told[0], "compiled model" in told[1], "mode" in told[2], "999999" in told[3]] == [True] * 4


@pytest.mark.parametrize("device, backend, words", [
    (CPU, None, "CPU_ATTN stores no 8-bit"), (CPU, "TORCH_REF", "TORCH_REF stores no 8-bit"), (DeviceFacts("cuda", "NVIDIA A10", 22*GiB, 86), None, "8.9.*NVIDIA A10 has 8.6"),
    (DeviceFacts("cuda", "Tesla T4", 15*GiB, 75), "TRITON_ATTN", "8.9.*Tesla T4 has 7.5")])
def test_an_8_bit_cache_is_refused_where_it_cannot_be(config_of, device, backend, words):
    for name in ("fp8", "fp8_e4m3"):
        with pytest.raises(ValueError, match=f"kv_cache_dtype='{name}' needs.*{words}"): config_of(device, kv_cache_dtype=name, attention_backend=backend)


def test_an_8_bit_cache_is_taken_where_it_can_be(config_of):
    for device in (DeviceFacts("cuda", "NVIDIA L4", 22*GiB, 89), DeviceFacts("cuda", "NVIDIA H200", 140*GiB, 90), L4):
        assert config_of(device, kv_cache_dtype="fp8").cache_config.cache_dtype == "fp8"
    assert config_of(CPU, kv_cache_dtype="fp8_e4m3", attention_backend="TRITON_ATTN").cache_config.cache_dtype == "fp8_e4m3"   # for the interpreter
    for name in ("fp8_e5m2", "int8", "bfloat16"):
        with pytest.raises(ValueError, match=f"kv_cache_dtype must be one of auto, fp8, fp8_e4m3, got '{name}'"): config_of(L4, kv_cache_dtype=name)


def test_the_config_on_the_wire(config_of):
    c = config_of(max_num_seqs=3, block_size=4, num_gpu_blocks_override=9, attention_backend="TORCH_REF", scheduling_policy="priority", enforce_eager=False)
    c.compilation_config.static_forward_context["layer"] = object()
    back = VllmConfig.from_bytes(c.to_bytes())
    assert back.compilation_config.static_forward_context == {} and back.compilation_config.mode == "compile"
    assert replace(back, compilation_config=c.compilation_config) == c
    gpu = config_of(L4, max_num_seqs=4)
    assert VllmConfig.from_bytes(gpu.to_bytes()) == gpu and gpu.compilation_config.cudagraph_mode.has_full_cudagraphs()
    with pytest.raises(msgspec.ValidationError): VllmConfig.from_bytes(msgspec.msgpack.encode({"model_config": {}}))
    with pytest.raises(msgspec.ValidationError, match="max_num_seqs"):   # checked again on arrival
        VllmConfig.from_bytes(c.to_bytes().replace(b"\xacmax_num_seqs\x03", b"\xacmax_num_seqs\x00"))


# ---- LLM

@pytest.fixture(scope="module")
def llm(tiny_llama):
    "An engine in this process: what is tested here is the front."
    with pytest.MonkeyPatch.context() as m:
        m.setenv("LITEVLLM_ENABLE_MULTIPROCESSING", "0")
        llm = LLM(tiny_llama, attention_backend="TORCH_REF", num_gpu_blocks_override=33)
    with llm: yield llm


def texts(outs): return [o.outputs[0].text for o in outs]


def test_public_names(): assert {LLMEngine, EngineDeadError, RequestOutput, CompletionOutput} and issubclass(EngineDeadError, RuntimeError)


def test_every_form_of_prompt(llm):
    ids = llm.get_tokenizer().encode("Once upon a time")
    forms = ["Once upon a time", ids, tuple(ids), {"prompt": "Once upon a time"}, {"prompt_token_ids": ids}]
    expected = llm.generate(forms[0], GREEDY, use_tqdm=False)
    assert len(expected) == 1 and len(expected[0].outputs[0].token_ids) == 6 and expected[0].outputs[0].finish_reason == "length"
    for f in forms[1:]: assert texts(llm.generate(f, GREEDY, use_tqdm=False)) == texts(expected)
    assert texts(llm.generate(forms, GREEDY, use_tqdm=False)) == texts(expected)*5
    assert llm.generate([], GREEDY, use_tqdm=False) == []


@pytest.mark.parametrize("prompt, error", [("", ValueError), ([[]], ValueError), ([[1, 512]], ValueError), ([[-1]], ValueError), (7, TypeError),
                                           (b"x", TypeError), ([3.5], TypeError), ({"text": "x"}, ValueError), (None, TypeError), ([None], TypeError)])
def test_no_prompt(llm, prompt, error):
    if prompt == "":   # this tokenizer adds nothing: an empty text has no tokens
        assert llm.get_tokenizer().encode("") == []
    with pytest.raises(error): llm.generate(prompt, GREEDY, use_tqdm=False)
    assert llm.llm_engine.get_num_unfinished_requests() == 0


def test_outputs_in_the_order_of_the_prompts_with_parameters_of_their_own(llm):
    lengths = [9, 1, 5, 12, 3]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    outs = llm.generate([[10 + i]*(i + 1) for i in range(5)], params, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outs] == lengths and [len(o.prompt_token_ids) for o in outs] == [1, 2, 3, 4, 5]
    assert all(p.output_kind is RequestOutputKind.CUMULATIVE for p in params)   # the user's objects are theirs
    with pytest.raises(ValueError, match="5 prompts, but 4 sampling parameters"): llm.generate([[1]]*5, params[:4])
    with pytest.raises(TypeError, match="dict"): llm.generate([[1]], [{"temperature": 0}])


def test_a_hundred_calls_in_a_row_get_their_own_outputs(llm):
    prompts = [[i + 1, 2*i + 1, 7] for i in range(100)]
    params = [SamplingParams(temperature=0, max_tokens=1 + i % 2, ignore_eos=True) for i in range(100)]
    together = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
    assert len(set(map(tuple, together))) > 10   # a stranger's answer would show
    for prompt, p, expected in zip(prompts, params, together):
        [out] = llm.generate([prompt], p, use_tqdm=False)
        assert (out.prompt_token_ids, out.outputs[0].token_ids, out.finished) == (prompt, expected, True)
    assert llm.llm_engine.get_num_unfinished_requests() == 0 and llm.llm_engine.engine_core.get_request_counts() == (0, 0)


def test_one_bad_prompt_and_nothing_runs(llm):
    with pytest.raises(ValueError, match=r"prompts\[2\] \(of 4\): .*300 tokens.*256"): llm.generate([[1], [2], [3]*300, [4]], GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match=r"prompts\[1\] \(of 2\): .*logprobs=21.*max_logprobs.*20"):
        llm.generate([[1], [2]], [GREEDY, SamplingParams(logprobs=21)], use_tqdm=False)
    assert llm.llm_engine.get_num_unfinished_requests() == 0 and llm.llm_engine.engine_core.get_request_counts() == (0, 0)
    assert len(llm.generate([[1]], GREEDY, use_tqdm=False)) == 1


def test_progress_bar(llm, capsys):
    llm.generate([[5, 6, 7]]*3, GREEDY)
    err = capsys.readouterr().err
    assert "Processed prompts: 100%" in err and "3/3" in err and "est. speed input: " in err and " toks/s, output: " in err
    llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""
    made = []
    class Bar:
        format_dict = {"elapsed": 2.0}
        def __init__(self, **kw): self.n, self.kw, self.closed = 0, kw, False; made.append(self)
        def update(self, n): self.n += n
        def close(self): self.closed = True
    llm.generate([[5, 6, 7]]*3, GREEDY, use_tqdm=Bar)
    [bar] = made
    assert bar.n == bar.kw["total"] == 3 and bar.closed and bar.postfix == "est. speed input: 4.50 toks/s, output: 9.00 toks/s"


@pytest.mark.parametrize("how", ["generate", "chat"])
def test_an_interrupt_leaves_nothing(llm, how):
    class Bar:
        format_dict = {"elapsed": 1.0}
        def __init__(self, **kw): pass
        def update(self, n): raise KeyboardInterrupt
        def close(self): pass
    long = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    prompts = {"generate": [[5, 6, 7]]*3, "chat": [[{"role": "user", "content": "Hello"}]]*3}[how]
    with pytest.raises(KeyboardInterrupt): getattr(llm, how)(prompts, [GREEDY, long, long], use_tqdm=Bar)
    assert llm.llm_engine.get_num_unfinished_requests() == 0 and llm.llm_engine.engine_core.get_request_counts() == (0, 0)
    outs = llm.generate([[9, 8]], GREEDY, use_tqdm=False)
    assert len(outs) == 1 and outs[0].prompt_token_ids == [9, 8]


def test_defaults_from_generation_config(tiny_llama, llm):
    config = llm.llm_engine.model_config
    assert llm.get_default_sampling_params() == SamplingParams(**config.get_diff_sampling_param())
    outs = llm.generate([[5, 6, 7]], use_tqdm=False)
    assert len(outs[0].outputs[0].token_ids) <= 16


def test_generation_config_file(tiny_llama, tmp_path):
    for f in os.listdir(tiny_llama): (tmp_path/f).symlink_to(os.path.join(tiny_llama, f))
    (tmp_path/"generation_config.json").unlink(missing_ok=True)
    (tmp_path/"generation_config.json").write_text(json.dumps(dict(eos_token_id=[2, 9], temperature=0.3, top_k=None, max_new_tokens=5, do_sample=True)))
    model = EngineArgs(str(tmp_path)).create_engine_config(CPU).model_config
    assert model.get_diff_sampling_param() == dict(temperature=0.3, max_tokens=5)
    assert model.try_get_generation_config()["eos_token_id"] == [2, 9]
    assert replace(model, generation_config="vllm").get_diff_sampling_param() == {}
    (tmp_path/"generation_config.json").unlink()
    assert model.try_get_generation_config() == {"eos_token_id": json.loads((tmp_path/"config.json").read_text())["eos_token_id"]}


def test_chat(llm):
    tokenizer = llm.get_tokenizer()
    talk = [{"role": "user", "content": "Hello"}]
    [one] = llm.chat(talk, GREEDY, use_tqdm=False)
    assert one.prompt == tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert one.prompt_token_ids == tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)
    two = llm.chat([talk, talk + [{"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Bye"}]], GREEDY, use_tqdm=False)
    assert texts(two)[0] == texts([one])[0] and len(two) == 2
    [go_on] = llm.chat([*talk, {"role": "assistant", "content": "I am"}], GREEDY, use_tqdm=False, add_generation_prompt=False, continue_final_message=True)
    assert go_on.prompt.endswith("I am")
    [own] = llm.chat(talk, GREEDY, use_tqdm=False, chat_template="{{ bos_token }}{% for m in messages %}{{ m['content'] }}!{% endfor %}")
    assert own.prompt_token_ids == [tokenizer.bos_token_id, *tokenizer.encode("Hello!", add_special_tokens=False)]   # one BOS


def test_chat_refusals(llm, monkeypatch):
    talk = [{"role": "user", "content": "Hello"}]
    for messages in ([[]], [{"content": "x"}], [{"role": "user", "content": [{"type": "text"}]}], [talk, ["x"]]):
        with pytest.raises(ValueError): llm.chat(messages, GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match="refuses the conversation.*alternate"):
        llm.chat(talk, GREEDY, use_tqdm=False, chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="contradict"): llm.chat(talk, GREEDY, continue_final_message=True)
    monkeypatch.setattr(llm.get_tokenizer(), "chat_template", None)
    with pytest.raises(ValueError, match="chat_template"): llm.chat(talk, GREEDY)


def test_a_priority_without_its_policy_is_taken_and_warned_of_once(llm, caplog):
    caplog.set_level(logging.WARNING, "litevllm")
    plain = [o.outputs[0].token_ids for o in llm.generate([[1], [2]], GREEDY, use_tqdm=False, priority=[0, 0])]
    llm.llm_engine.input_processor.warns_of_priority = True   # other tests share this engine
    assert "priority" not in caplog.text
    for _ in range(2): assert [o.outputs[0].token_ids for o in llm.generate([[1], [2]], GREEDY, use_tqdm=False, priority=[1, -3])] == plain
    assert caplog.text.count("scheduling_policy='priority'") == 1 and "priority=1 has no effect" in caplog.text
    with pytest.raises(ValueError, match="2 prompts, but 1 priorities"): llm.generate([[1], [2]], GREEDY, priority=[1])
    with pytest.raises(TypeError, match=r"prompts\[1\] \(of 2\): priority must be an integer"): llm.generate([[1], [2]], GREEDY, priority=[1, "2"])


def test_what_is_not_offered_is_refused_by_name_and_taken_when_empty(llm):
    talk = [{"role": "user", "content": "Hello"}]
    for call, what in ((llm.generate, [[1]]), (llm.chat, talk)):
        assert len(call(what, GREEDY, use_tqdm=False, lora_request=None, mm_processor_kwargs=None)) == 1
        assert len(call(what, GREEDY, use_tqdm=False, mm_processor_kwargs={})) == 1
        for name, value in (("lora_request", object()), ("mm_processor_kwargs", {"num_crops": 4})):
            with pytest.raises(ValueError, match=f"does not act on {name}="): call(what, GREEDY, use_tqdm=False, **{name: value})


def test_unknown_engine_arguments_before_anything_starts(tiny_llama):
    for name, near in (("max_sequences", ""), ("gpu_memory_utilisation", "gpu_memory_utilization"), ("max_num_seq", "max_num_seqs"), ("tensor_parallel", "tensor_parallel_size")):
        with pytest.raises(TypeError) as e: LLM(tiny_llama, **{name: 4})
        assert f"LLM has no argument {name!r}" in str(e.value) and (not near or f"did you mean '{near}'?" in str(e.value))


# ---- in a process of its own

def run(code: str, *args: str, timeout: float = 150) -> str:
    "stdout of a script, which is no module and has no main guard"
    env = os.environ | {"LITEVLLM_LOGGING_LEVEL": "WARNING", "LITEVLLM_ENABLE_MULTIPROCESSING": "1"}
    r = subprocess.run([sys.executable, "-c", textwrap.dedent(code), *args], capture_output=True, text=True, timeout=timeout, env=env)
    assert r.returncode == 0, f"exit {r.returncode}\n{r.stdout}\n{r.stderr}"
    return r.stdout


@pytest.mark.parametrize("statement", ["import litevllm", "from litevllm import LLM, SamplingParams"])
def test_import_is_light(statement):
    out = run(f"""
        import sys, time
        t = time.process_time()
        {statement}
        print(time.process_time() - t, *(m for m in ("torch", "transformers", "triton", "numba", "numpy") if m in sys.modules))""")
    seconds, *heavy = out.split()
    assert not heavy and float(seconds) < 0.5


def test_ctrl_c_then_del_with_a_child(tiny_llama):
    "Interrupts at several moments of generate() and chat(); after each the engine answers a new prompt with its own output; at the end the child goes with its owner."
    out = run("""
        import os, signal, sys, threading, time, psutil
        from litevllm import LLM, SamplingParams
        llm = LLM(sys.argv[1], attention_backend="TORCH_REF", num_gpu_blocks_override=65)
        engine, greedy = llm.llm_engine, SamplingParams(temperature=0, max_tokens=4)
        long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        expected = llm.generate([[9, 8]], greedy, use_tqdm=False)[0].outputs[0].token_ids
        interrupted = 0
        generate = lambda: llm.generate([[5, 6, 7]]*30, long, use_tqdm=False)
        chat = lambda: llm.chat([[{"role": "user", "content": "Hello"}]]*30, long, use_tqdm=False)
        for delay, ask in ((0.0, generate), (0.002, generate), (0.01, generate), (0.05, generate), (0.2, generate), (0.002, chat), (0.2, chat)):
            t = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
            try:
                t.start()
                while True: ask()
            except KeyboardInterrupt: interrupted += 1
            t.join()
            assert engine.get_num_unfinished_requests() == 0 and not engine.output_processor.external_req_ids
            [out] = llm.generate([[9, 8]], greedy, use_tqdm=False)
            assert out.prompt_token_ids == [9, 8] and out.outputs[0].token_ids == expected
            assert engine.engine_core.get_request_counts() == (0, 0)
        child = psutil.Process(engine.engine_core.resources.child.process.pid)
        del llm, engine, generate, chat, ask
        child.wait(20)
        print("interrupted", interrupted)""", tiny_llama)
    assert out.split() == ["interrupted", "7"]


def test_two_engines_of_which_one_is_killed_and_none_is_closed(tiny_llama):
    "generate() raises EngineDeadError soon, and again at once; the other engine is untouched; the program ends by itself, and its child with it."
    out = run("""
        import os, signal, sys, threading, time
        from litevllm import LLM, EngineDeadError, SamplingParams
        a, b = (LLM(sys.argv[1], attention_backend="TORCH_REF", num_gpu_blocks_override=65) for _ in range(2))
        pid_a, pid_b = (x.llm_engine.engine_core.resources.child.process.pid for x in (a, b))
        long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        threading.Timer(0.3, os.kill, (pid_a, signal.SIGKILL)).start()
        try:
            while True: a.generate([[5, 6, 7]]*8, long, use_tqdm=False)
        except EngineDeadError as e: assert "SIGKILL" in str(e), e
        t = time.monotonic()
        for _ in range(3):
            try: a.generate("Hello", use_tqdm=False)
            except EngineDeadError as e: assert "SIGKILL" in str(e), e
            else: raise AssertionError("a dead engine answered")
        assert time.monotonic() - t < 1
        print(len(b.generate("Hello", SamplingParams(max_tokens=3), use_tqdm=False)), pid_b)""", tiny_llama)
    n, pid = map(int, out.split())
    assert n == 1
    with pytest.raises(ProcessLookupError): os.kill(pid, 0)


def test_the_signal_handler_is_given_back(llm):
    before = signal.getsignal(signal.SIGINT)
    llm.generate([[1]], GREEDY, use_tqdm=False)
    assert signal.getsignal(signal.SIGINT) is before
