"""The benchmarks: their arithmetic, their processes, and that a wrong kernel or a wrong token does not pass for a fast one."""
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from litevllm.bench import curves, floor, one_peer, peers
from litevllm.tiny import write_tiny_model

ROOT = Path(__file__).resolve().parent.parent
LETTERS = lambda text: list(text.encode())


def workload(name="w", prompts=((1, 2, 3), (4, 5)), wanted=(3, 2)):
    return {"name": name, "requests": [{"prompt_token_ids": list(p), "max_tokens": n} for p, n in zip(prompts, wanted)]}


def fake_peer(tmp_path, body, name="vllm", limit=5.0):
    "A peer whose Python is a shell script: what a broken engine looks like from outside."
    script = tmp_path/"python"
    script.write_text("#!/bin/sh\n" + body)
    script.chmod(0o755)
    return peers.Running(peers.Peer(name, str(script), {}), tmp_path, limit)


# --- workloads and their floor

def test_workloads_come_from_their_seed():
    a, b, c = floor.make_workloads(LETTERS), floor.make_workloads(LETTERS), floor.make_workloads(LETTERS, seed=1)
    assert a == b and a != c and [w["name"] for w in a] == ["mixed64", "prefix32", "single"]
    mixed, prefix, single = (w["requests"] for w in a)
    assert len(mixed) == 64 and all(16 <= len(r["prompt_token_ids"]) <= 256 and 16 <= r["max_tokens"] <= 128 for r in mixed)
    assert len({len(r["prompt_token_ids"]) for r in mixed}) > 30, "lengths are spread"
    assert floor.shared_prefix(prefix) >= 512 and all(len(r["prompt_token_ids"]) == 528 for r in prefix) and floor.shared_prefix(mixed) == 0
    assert len(single) == 1 and single[0]["max_tokens"] == 128


def test_a_floor_is_the_sum_of_what_cannot_be_avoided():
    gemms = {"a": {m: {"body_ms": 1.0 + m, "head_ms": 0.5} for m in (1, 2, 4)}, "b": {m: {"body_ms": 4.0, "head_ms": 9.0} for m in (1, 2, 4)}}
    f = floor.floor_of(workload(), gemms, read_gb_s=2.0, kv_bytes=1000)
    per_token = 4.0/4                                             # prompts go at the best rate of any size: b's at 4 rows
    assert f["prefill_s"]*1e3 == pytest.approx(5*per_token + 0.5)
    assert f["decode_s"]*1e3 == pytest.approx((1 + 2 + .5) + (1 + 1 + .5))      # a step of two, a step of one
    assert f["kv_read_s"]*1e3 == pytest.approx(((3 + 1) + (2 + 1) + (3 + 2))*1000/2.0/1e6)
    assert f["winner"] == {1: "a", 2: "a", 4: "b"} and f["output_tokens_per_s"] == pytest.approx(5/f["seconds"])


def test_fewer_rows_never_cost_more_and_json_keys_serve():
    gemms = {"a": {1: {"body_ms": 5.0, "head_ms": 1.0}, 2: {"body_ms": 3.0, "head_ms": 1.0}}}
    assert floor.fastest(gemms, "body_ms") == {1: (3.0, "a"), 2: (3.0, "a")}
    assert floor.fastest(json.loads(json.dumps(gemms)), "body_ms") == floor.fastest(gemms, "body_ms")


def test_a_shared_prefix_is_paid_once():
    prompts = [list(range(100)) + [200 + i] for i in range(4)]
    gemms = {"a": {1: {"body_ms": 1.0, "head_ms": 0.0}, 256: {"body_ms": 256.0, "head_ms": 0.0}}}
    assert floor.floor_of(workload(prompts=prompts, wanted=(1,)*4), gemms, 1.0, 0)["prefill_tokens"] == 100 + 4


def test_better_takes_the_faster_of_both():
    a = {"bandwidth": {"read": 1.0, "copy": 5.0}, "gemms": {"k": {"1": {"body_ms": 2.0, "head_ms": 1.0}}}}
    b = {"bandwidth": {"read": 3.0, "copy": 4.0}, "gemms": {"k": {"1": {"body_ms": 1.0, "head_ms": 7.0}}}}
    assert floor.better(a, b) == {"bandwidth": {"read": 3.0, "copy": 5.0}, "gemms": {"k": {"1": {"body_ms": 1.0, "head_ms": 1.0}}}}


def test_every_kernel_of_the_floor_multiplies(tmp_path):
    import torch
    x, w = torch.randn(5, 48, generator=torch.Generator().manual_seed(0)), torch.randn(32, 48, generator=torch.Generator().manual_seed(1))
    kernels = floor.gemm_kernels(str(tmp_path))
    assert {"linear", "numba"} <= set(kernels)
    for name, make in kernels.items(): torch.testing.assert_close(make(w)(x), x @ w.T, rtol=1e-5, atol=1e-5, msg=name)


def test_shape_counts_a_models_weights(tmp_path):
    from safetensors.torch import load_file
    write_tiny_model(tmp_path, "llama")
    shape = floor.Shape(json.loads((tmp_path/"config.json").read_text()))
    products = sum(t.numel() for n, t in load_file(tmp_path/"model.safetensors").items() if n.endswith("proj.weight") or n == "lm_head.weight")
    assert shape.weights == products and shape.kv_bytes == 2*2*2*16*4


# --- one peer

def test_meter_counts_this_process_and_its_children():
    with one_peer.Meter() as m: subprocess.run([sys.executable, "-c", "sum(i*i for i in range(4_000_000))"], check=True)
    assert m.own_cpu_s >= 0.15 and 0 <= m.foreign <= 1 and m.seconds >= 0.15


def test_an_engine_with_the_wrong_number_of_tokens_is_refused():
    with pytest.raises(RuntimeError, match="1 of 2 answers"): one_peer.answer(lambda requests: [[1, 2, 3], [1]], workload(), 0)


def test_serve_goes_on_after_an_error(monkeypatch):
    def generate(requests):
        if requests[0]["prompt_token_ids"] == [9]: raise ValueError("nine")
        return [[7]*r["max_tokens"] for r in requests]
    monkeypatch.setitem(one_peer.STARTERS, "litevllm", lambda options: generate)
    lines = []
    one_peer.serve("litevllm-fp8", {"patience": 0}, [json.dumps(workload(prompts=([9],), wanted=(1,))), json.dumps(workload())], lines.append)
    assert lines[0]["ready"] == "litevllm-fp8" and lines[1] == {"error": "ValueError: nine"} and lines[2]["tokens"] == [[7]*3, [7]*2]


def test_it_runs_as_a_file_without_the_package(tmp_path):
    "A peer's Python has no litevllm: the file must import without it."
    code = f"import sys, runpy; sys.modules['litevllm'] = None; print(sorted(runpy.run_path({one_peer.__file__!r})['STARTERS']))"
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "transformers-static" in done.stdout, done.stderr


# --- the driver

def test_a_peer_that_dies_or_hangs_is_an_error(tmp_path):
    dead = fake_peer(tmp_path, "echo out of luck >&2; exit 3\n")
    assert "out of luck" in dead.ready["error"] and dead.process is None
    assert "died" in dead.ask(workload())["error"]                # started again, dies again
    slow = fake_peer(tmp_path, """echo '{"ready": "x"}'; read line; sleep 60\n""", limit=0.5)
    started = time.monotonic()
    assert slow.ready == {"ready": "x"}
    pid = slow.process.pid
    assert "not done after" in slow.ask(workload())["error"]
    assert time.monotonic() - started < 30 and slow.process is None
    left = subprocess.run(["ps", "-o", "stat=", "-g", str(pid)], capture_output=True, text=True).stdout.split()
    assert all(state.startswith("Z") for state in left), "something of its session lives on"


def test_turns_rotate_and_failures_are_not_repeated():
    asked = []
    class One:
        def __init__(self, name): self.peer = peers.Peer(name, "", {})
        def ask(self, w):
            asked.append((self.peer.name, w["name"]))
            if (self.peer.name, w["name"]) == ("b", "v"): return {"error": "no"}
            return {"seconds": 1.0, "output_tokens_per_s": 5.0, "foreign": None, "tokens": [[1]]}
    runs = peers.interleave([One("a"), One("b"), One("c")], [workload("u"), workload("v")], 2, {"c": 1})
    assert asked == [("a", "u"), ("b", "u"), ("c", "u"), ("a", "v"), ("b", "v"), ("c", "v"), ("b", "u"), ("a", "u"), ("a", "v")]
    assert [r["round"] for r in runs] == [0]*6 + [1]*3


def test_summary_takes_quiet_runs_and_sees_other_tokens():
    def run(peer, number, seconds, foreign, tokens):
        return dict(peer=peer, round=number, workload="w", seconds=seconds, output_tokens_per_s=6/seconds, foreign=foreign, tokens=tokens)
    runs = [run("litevllm", 0, 1.0, .01, [[1], [2]]), run("litevllm", 1, 2.0, .01, [[1], [2]]), run("litevllm", 2, 9.0, .5, [[1], [2]]),
            run("vllm", 0, 3.0, .01, [[1], [3]]), run("vllm", 2, 9.0, .9, [[1], [3]]), run("transformers-static", 0, 4.0, .2, [[1], [2]])]
    s = peers.summarize(runs, {"w": {"output_tokens_per_s": 12.0}})["w"]
    assert s["litevllm"]["quiet"] == 2 and s["litevllm"]["seconds"] == 1.5 and s["litevllm"]["of_floor"] == pytest.approx((6 + 3)/2/12)
    assert s["vllm"]["same_tokens"] == [1, 2] and s["vllm"]["ours_over_theirs"] == 2.0 and s["vllm"]["ratio_spread"] == [1.0, 3.0]
    assert s["transformers-static"]["quiet"] == 0 and s["transformers-static"]["seconds"] == 4.0, "none quiet: all count"


def test_peers_that_are_not_installed_are_left_out(monkeypatch, tmp_path):
    monkeypatch.delenv("PEERS", raising=False)
    monkeypatch.setattr(peers, "vllm_python", lambda: None)
    assert [p.name for p in peers.find_peers(["litevllm", "vllm", "transformers-static"], "m", 2)] == ["litevllm", "transformers-static"]
    monkeypatch.setattr(peers, "vllm_python", lambda: "/some/python")
    eager = peers.find_peers(["vllm-eager"], "m", 2)[0]
    assert eager.options["engine_args"] == {"enforce_eager": True} and eager.env["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"
    with pytest.raises(ValueError, match="sglang"): peers.find_peers(["sglang"], "m", 2)


def test_workloads_by_path_and_their_vocabulary(tmp_path):
    path = tmp_path/"mine.json"
    path.write_text(json.dumps(workload("mine", prompts=([600],), wanted=(1,))))
    assert peers.load_workloads([str(path)], "nowhere", 601)[0]["name"] == "mine"
    with pytest.raises(ValueError, match="600"): peers.load_workloads([str(path)], "nowhere", 512)
    model = write_tiny_model(tmp_path/"model")
    with pytest.raises(ValueError, match="nothing"): peers.load_workloads(["nothing"], model, 512)
    assert [w["name"] for w in peers.load_workloads(["single", "mixed64"], model, 512)] == ["single", "mixed64"]


def test_parts_are_kept_and_dated(tmp_path, monkeypatch, capsys):
    model, out = write_tiny_model(tmp_path/"model"), tmp_path/"out.json"
    out.write_text(json.dumps({"curves": {"old": 1}, "ladder": {"old": 2}, "dates": {"curves": "then", "ladder": "then"}}))
    monkeypatch.setattr(peers, "in_process", lambda module, *args, **kw: {"new": module})
    result = peers.main(["--model", model, "--out", str(out), "--parts", "curves", "--keep", "--workloads", "single"])
    assert result["curves"] == {"new": "curves"} and result["ladder"] == {"old": 2} and result["dates"]["ladder"] == "then" != result["dates"]["curves"]
    assert json.loads(out.read_text()) == result
    for bad, said in ((["--parts", "nonsense"], "no part nonsense"), (["--peers", "nope"], "no peer nope"), (["--rounds-of", "litevllm"], "PEER=N"),
                      (["--rounds-of", "nope=1"], "nope"), (["--peers", ""], "--peers needs"), (["--workloads", ""], "--workloads needs"),
                      (["--rounds", "0"], "--rounds must be positive, got 0"), (["--limit", "nan"], "--limit must be"),
                      (["--threads", "0"], "--threads must"), (["--keep", "--out", str(tmp_path / "no.json")], "no.json")):
        with pytest.raises(SystemExit): peers.main(bad)
        assert said in capsys.readouterr().err, bad


# --- the engine under load, and under the roof

def test_a_point_under_the_roof():
    p = curves.point("x", flops=6e9, nbytes=2e9, seconds=0.5)
    assert (p["flop_per_byte"], p["gflop_s"], p["gb_s"], p["ms"]) == (3.0, 12.0, 4.0, 500.0)


def test_decode_speed_counts_after_the_last_request_began():
    from types import SimpleNamespace as NS
    class Fake:
        def reset_prefix_cache(self): pass
        def stream(self, prompts, params):
            assert len({tuple(p["prompt_token_ids"]) for p in prompts}) == len(prompts), "prompts share nothing"
            for request, count in (("0", 1), ("0", 3), ("1", 1), ("0", 2), ("1", 2)):
                time.sleep(0.02)
                yield NS(request_id=request, outputs=[NS(token_ids=[5]*count)])
    d = curves.decode_speed(Fake(), 2, 8, 6, 100)
    assert d["tokens"] == 4 and d["step_s"] == pytest.approx(2*0.04/4, rel=0.5)


# --- the ladder

def test_every_rung_computes_the_same(tmp_path):
    import torch
    from litevllm.bench.ladder import RUNGS, Ladder, padded_attention
    ladder, logits = Ladder(write_tiny_model(tmp_path, "qwen2"), max_batch=3, context=21), []
    for rung in range(len(RUNGS)):
        ladder.climb(rung)
        logits.append(ladder.step(3))
    for other in logits[1:]: torch.testing.assert_close(other, logits[0], rtol=1e-4, atol=2e-4)
    assert ladder.linears[0].kernel is not None and ladder.blocks[0].fused_rope and ladder.fused[0].ops is not None
    with pytest.raises(ValueError, match="decodes"): padded_attention(*[None]*5, 2, None, 5, 1.0)


# --- the GPU script, on a CPU

GPU = """
import sys
from litevllm.bench import gpu
from litevllm.kernels import paged_attention, fused
{change}
sys.exit(gpu.main(["--device", "cpu", "--small", "--parts", "kernels", "--out", sys.argv[1]]))
"""


def run_gpu_script(tmp_path, change):
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", GPU.format(change=change), str(tmp_path/"gpu.json")], env=env, capture_output=True, text=True,
                          timeout=200, cwd=tmp_path)
    print(done.stdout[-3000:], done.stderr[-3000:])
    return done.returncode, json.loads((tmp_path/"gpu.json").read_text())


def test_the_gpu_script_finds_nothing_wrong(tmp_path):
    code, found = run_gpu_script(tmp_path, "")
    assert code == 0 and not found["failed_checks"] and not found["problems"], found
    assert len(found["results"]["check attention"]) >= 12 and {"check flash", "check fused", "check zero_blocks", "check sampling"} <= set(found["results"])


def test_the_gpu_script_finds_what_is_wrong(tmp_path):
    "A kernel that is off by a little, one that raises: both are named, the rest goes on, and the exit code says so."
    code, found = run_gpu_script(tmp_path, """
gpu.gpu_checks.SMALL_CASES = gpu.gpu_checks.SMALL_CASES[:3]
right = paged_attention.unified_attention
def wrong(q, k, v, out, **args):
    right(q, k, v, out, **args)
    out[0, 0, 0] += 0.01
paged_attention.unified_attention = wrong
def broken(*args): raise RuntimeError("no such kernel")
fused.silu_and_mul = broken
""")
    assert code == 1 and len(found["failed_checks"]) == 3 and found["problems"] == ["check fused: RuntimeError: no such kernel"]
    assert all(line["ok"] for line in found["results"]["check zero_blocks"])


def test_the_gpu_script_needs_a_gpu_or_says_what_else(tmp_path):
    env = os.environ | {"TRITON_INTERPRET": "0"}
    for args, words in ((["--device", "cpu"], "--small"), (["--device", "cpu", "--small"], "TRITON_INTERPRET=1")):
        done = subprocess.run([sys.executable, "-m", "litevllm.bench.gpu", *args], env=env, capture_output=True, text=True, timeout=60, cwd=ROOT)
        assert done.returncode == 2 and words in done.stderr
