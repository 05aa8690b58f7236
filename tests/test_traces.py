"""Recorded runs of the real vLLM 0.22 scheduler: not one difference; and the replay can fail."""
import copy, json, lzma, subprocess, sys
from pathlib import Path

import pytest
from replay_traces import MalformedTrace, Replay, main, read_traces, replay_file

HERE = Path(__file__).parent
FILE = HERE / "data" / "vllm022-scheduler-traces.jsonl.xz"


def test_all_recorded_traces_replay_without_a_difference():
    "80 runs, 6333 operations, by the command itself."
    done = subprocess.run([sys.executable, str(HERE / "replay_traces.py"), str(FILE)], capture_output=True, text=True,
                          timeout=120)
    assert (done.returncode, done.stdout) == (0, "80 traces, 6333 operations: no difference\n"), done.stdout + done.stderr


@pytest.fixture(scope="module")
def traces(): return list(read_traces(FILE))


MUTATIONS = {     # operation kind -> how to change one recorded answer of that kind; True if this operation could be changed
    "num_scheduled_tokens": lambda op: op["op"] == "schedule" and op["num_scheduled_tokens"]
    and not op["num_scheduled_tokens"][0].__setitem__(1, 99),
    "plan order": lambda op: op["op"] == "schedule" and len(op["num_scheduled_tokens"]) > 1
    and not op["num_scheduled_tokens"].reverse(),
    "total": lambda op: op["op"] == "schedule" and not op.__setitem__("total", op["total"] + 1),
    "block_ids": lambda op: op["op"] == "schedule" and op["new"] and not op["new"][0]["block_ids"].append(1),
    "num_computed_tokens": lambda op: op["op"] == "schedule" and op["cached"]
    and not op["cached"][-1].__setitem__("num_computed_tokens", -1),
    "resumed": lambda op: op["op"] == "schedule" and op["cached"]
    and not op["cached"][0].__setitem__("resumed", not op["cached"][0]["resumed"]),
    "preempted": lambda op: op["op"] == "schedule" and not op["preempted"].append("r9"),
    "finished": lambda op: op["op"] == "schedule" and op["finished"] and not op["finished"].clear(),
    "new_token_ids": lambda op: op["op"] == "update" and op["outputs"] and not op["outputs"][0]["new_token_ids"].append(3),
    "finish_reason": lambda op: op["op"] == "update" and op["outputs"]
    and not op["outputs"][0].__setitem__("finish_reason", "error"),
    "stop_reason": lambda op: op["op"] == "update" and op["outputs"] and not op["outputs"][0].__setitem__("stop_reason", 77),
    "running": lambda op: op["op"] == "abort" and not op["running"].append("r9"),
    "waiting": lambda op: op["op"] == "schedule" and op["waiting"] and not op["waiting"].clear(),
    "free_blocks": lambda op: op["op"] == "update" and not op.__setitem__("free_blocks", op["free_blocks"] - 1),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_one_changed_answer_is_found_where_it_is(traces, name):
    "Every field that is compared can differ, and the difference names seed, operation and field."
    trace, index = next((copy.deepcopy(t), i) for t in traces for i, op in enumerate(t["ops"]) if i > 5
                        and MUTATIONS[name](copy.deepcopy(op)))
    MUTATIONS[name](trace["ops"][index])
    difference = Replay(trace).difference()
    assert difference is not None and (difference.seed, difference.index) == (trace["seed"], index)
    assert difference.field in str(difference) and f"operation {index}" in str(difference)


def test_a_changed_option_is_found(traces):
    "A scheduler with another budget, pool or policy does not follow the recording."
    for key, value in (("max_num_batched_tokens", 200), ("num_gpu_blocks", 99), ("max_num_seqs", 1)):
        differences = [Replay(t | {"config": t["config"] | {key: value}}).difference() for t in traces[:20]]
        assert any(differences), key


def test_the_command_exits_1_on_a_difference(traces, tmp_path, capsys):
    "And prints what was expected and what came."
    trace = copy.deepcopy(traces[0])
    index = next(i for i, op in enumerate(trace["ops"]) if op["op"] == "schedule")
    trace["ops"][index]["free_blocks"] = 1234
    for name, opener in (("x.jsonl", open), ("x.jsonl.xz", lzma.open)):
        with opener(tmp_path / name, "wt") as f: f.write(json.dumps(traces[1]) + "\n" + json.dumps(trace) + "\n")
        assert main([str(tmp_path / name)]) == 1
        out = capsys.readouterr().out
        for part in (f"seed {trace['seed']}", f"operation {index} (schedule)", "1234", "'free_blocks'"): assert part in out, part


def test_a_planned_request_that_the_recording_lacks_is_a_difference(traces):
    "The recorded sample names other requests than were planned."
    trace = copy.deepcopy(traces[0])
    index = next(i for i, op in enumerate(trace["ops"]) if op["op"] == "update" and op["sampled"])
    trace["ops"][index]["sampled"] = {}
    assert Replay(trace).difference().index == index


EMPTY = '{"seed": 1, "config": %s, "eos_token_id": 2, "requests": {}, "ops": []}\n'


@pytest.mark.parametrize("text", ["", "\n\n", "not json\n", "[]\n", "{}\n", EMPTY % "{}", EMPTY % "null", EMPTY % '{"speed": 9}'])
def test_a_malformed_file_is_said_to_be_one(tmp_path, capsys, text):
    "Exit 2 and one line, never a traceback."
    file = tmp_path / "x.jsonl"
    file.write_text(text)
    assert main([str(file)]) == 2
    assert capsys.readouterr().err.startswith("malformed trace file: ")


def test_malformed_operations_and_missing_files(traces, tmp_path, capsys):
    "An unknown operation, one without its request, a file that is not there, one that is not xz; and no argument at all."
    for op in ({"op": "pause"}, {"op": "add"}, {"op": "add", "req": "nobody"}, {"op": "update", "sampled": {}},
               {"op": "abort", "req": "r0"}, 7,
               {"op": "update", "sampled": {}, "outputs": [], "running": [], "waiting": [], "free_blocks": 3}):
        file = tmp_path / "x.jsonl"
        file.write_text(json.dumps(traces[0] | {"ops": [op]}))
        assert main([str(file)]) == 2, op
    file.write_text(json.dumps(traces[0] | {"requests": {"r0": {"max_tokens": 3}}, "ops": []}))
    assert main([str(file)]) == 2
    (tmp_path / "x.jsonl.xz").write_text("plain text")
    with pytest.raises(MalformedTrace): replay_file(tmp_path / "x.jsonl.xz")
    assert main([str(tmp_path / "none.jsonl")]) == 2 and main([]) == 2
    assert "usage" in capsys.readouterr().err
