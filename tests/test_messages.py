"""The wire types: everything that is sent comes out equal on the other side, and what is not a message is refused."""
import msgspec, pytest
from hypothesis import given, settings, strategies as st

from litevllm.messages import (EngineCoreFailure, EngineCoreOutput, EngineCoreOutputs, EngineCoreReadyResponse, EngineCoreRequest,
                               EngineCoreRequestType, EngineHandshakeMetadata, FinishReason, SchedulerStats, UtilityOutput)
from litevllm.sampling_params import SamplingParams

ids = st.lists(st.integers(0, 2**31 - 1), max_size=40)
text = st.text(max_size=12)


def trip(message): return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message))


@st.composite
def sampling_params(draw):
    min_tokens = draw(st.integers(0, 5))
    p = SamplingParams(temperature=draw(st.floats(0, 2)), top_p=draw(st.floats(0.01, 1)), top_k=draw(st.integers(0, 100)), min_p=draw(st.floats(0, 1)),
                       seed=draw(st.none() | st.integers(0, 2**63 - 1)), max_tokens=draw(st.none() | st.integers(max(min_tokens, 1), 10**6)),
                       min_tokens=min_tokens, stop=draw(st.lists(st.text(min_size=1, max_size=8), max_size=3)), stop_token_ids=draw(ids),
                       ignore_eos=draw(st.booleans()), include_stop_str_in_output=draw(st.booleans()), skip_special_tokens=draw(st.booleans()))
    if draw(st.booleans()): p.update_from_generation_config({"eos_token_id": draw(st.lists(st.integers(0, 99), min_size=1, max_size=3))}, draw(st.none() | st.integers(0, 99)))
    return p


@settings(max_examples=150, deadline=None)
@given(text, ids, sampling_params(), st.floats(0, 2e9), st.none() | text, st.integers(-5, 5), st.none() | text)
def test_requests(request_id, prompt, params, arrival, salt, priority, external):
    sent = EngineCoreRequest(request_id, prompt, params, arrival, salt, priority, external)
    got = trip(sent)
    assert got == sent
    assert (got.sampling_params.eos_token_id, got.sampling_params.all_stop_token_ids) == (params.eos_token_id, params.all_stop_token_ids)
    assert got.sampling_params.sampling_type == params.sampling_type


outputs = st.builds(EngineCoreOutput, text, ids, st.none() | st.sampled_from(FinishReason), st.none() | st.integers(0, 10**6) | text, st.none() | st.integers(0, 10**6), st.none() | text)


@settings(max_examples=150, deadline=None)
@given(st.lists(outputs, max_size=5), st.none() | st.builds(SchedulerStats, *[st.integers(0, 99)] * 2, st.floats(0, 1), *[st.integers(0, 99)] * 4), st.floats(1, 1e9))
def test_outputs(outs, stats, timestamp):
    sent = EngineCoreOutputs(outs, stats, timestamp)
    got = trip(sent)
    assert got == sent and [o.finished for o in got.outputs] == [o.finish_reason is not None for o in outs]
    assert all(o.finish_reason is None or isinstance(o.finish_reason, FinishReason) for o in got.outputs)


@pytest.mark.parametrize("message", [
    EngineCoreReadyResponse(2048, 100, "bfloat16", False), EngineCoreFailure("ValueError", "é 9 > 8"),
    EngineHandshakeMetadata(b"\x00\xff", "ipc:///x", True, "a.b:C"), UtilityOutput(7, None, [1, "a", None, {"k": 2.5}]),
    EngineCoreOutputs(utility_output=UtilityOutput(3, "why not"))])
def test_other_messages(message): assert trip(message) == message


def test_timestamps_are_the_senders():
    early, late = EngineCoreOutputs(), EngineCoreOutputs()
    assert 0 < early.timestamp <= late.timestamp and trip(early).timestamp == early.timestamp
    assert early.outputs is not late.outputs


@pytest.mark.parametrize("bad", [[], ["id"], ["id", [1], {}], [1, [1], {}, 0.0], ["id", ["x"], {}, 0.0], ["id", [1], {"no_such_field": object}, "now"], "text", 7])
def test_what_is_no_request_is_refused(bad):
    data = msgspec.msgpack.encode(bad, enc_hook=lambda o: "?")
    with pytest.raises(msgspec.ValidationError): msgspec.msgpack.decode(data, type=EngineCoreRequest)


def test_kinds_are_single_bytes_and_all_different():
    assert {len(k.value) for k in EngineCoreRequestType} == {1} and len({k.value for k in EngineCoreRequestType}) == 3
    assert [str(r) for r in FinishReason] == ["stop", "length", "abort", "error"]
