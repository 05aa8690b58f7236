"""The process boundary under the real stack: a tiny model, the real worker, `LLM` on top (cases I1, I4, I5 of the public bug reports)."""
import json, os, random, shutil, threading, time

import psutil, pytest
from safetensors.torch import load_file, save_file

from litevllm import LLM, EngineDeadError, SamplingParams
from litevllm.tiny import write_tiny_model

pytestmark = pytest.mark.timeout(120)
ARGS = dict(num_gpu_blocks_override=64, attention_backend="TORCH_REF", max_num_seqs=8)


def cores():
    def is_core(p):
        try: return "litevllm.engine.core" in p.cmdline()
        except psutil.Error: return False
    return [p for p in psutil.Process().children(recursive=True) if is_core(p)]


def greedy(n): return SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)


def broken(tiny_llama, tmp_path, how):
    path = str(shutil.copytree(tiny_llama, tmp_path / "broken"))
    weights, config = f"{path}/model.safetensors", f"{path}/config.json"
    if how == "shape":
        tensors = load_file(weights)
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:7].clone()
        save_file(tensors, weights, metadata={"format": "pt"})
    elif how == "no weights": os.unlink(weights)
    elif how == "architecture":
        c = json.load(open(config))
        json.dump(c | {"architectures": ["FancyNewForCausalLM"]}, open(config, "w"))
    elif how == "truncated": open(weights, "r+b").truncate(1000)
    return path


@pytest.mark.parametrize("how,words", [
    ("shape", ["model.norm.weight", "7", "64"]), ("no weights", ["broken"]),
    ("architecture", ["FancyNewForCausalLM"]), ("truncated", ["model.safetensors"])])
def test_i4_a_broken_model_is_named_in_the_exception(tiny_llama, tmp_path, how, words):
    with pytest.raises((RuntimeError, ValueError, OSError)) as e: LLM(broken(tiny_llama, tmp_path, how), **ARGS)
    assert all(w in str(e.value) for w in words), str(e.value)
    assert not cores()


def test_i4_too_little_memory_for_one_request(tiny_llama):
    with pytest.raises(RuntimeError, match=r"failed to start: ValueError: .*16 KV blocks.*has 2 usable"):
        LLM(tiny_llama, attention_backend="TORCH_REF", kv_cache_memory_bytes=3 * 16 * 2 * 2 * 2 * 16 * 4)
    assert not cores()


def test_i1_sigkill_while_generate_runs(tiny_llama):
    with LLM(tiny_llama, **ARGS) as llm:
        core, = cores()
        threading.Timer(0.3, core.kill).start()
        start = time.monotonic()
        with pytest.raises(EngineDeadError, match="SIGKILL") as first:
            while True: llm.generate([{"prompt_token_ids": [1, 2, 3]}] * 4, greedy(200), use_tqdm=False)
        assert time.monotonic() - start < 15
        start = time.monotonic()
        with pytest.raises(EngineDeadError) as later: llm.generate({"prompt_token_ids": [1]}, greedy(1), use_tqdm=False)
        assert time.monotonic() - start < 1 and str(later.value) == str(first.value)
    assert not cores()


def test_i5_two_engines_with_different_weights_and_a_with_block_left_by_an_error(tiny_llama, tmp_path):
    prompts = [{"prompt_token_ids": [i + 1, i + 2]} for i in range(3)]
    tokens = lambda llm, p: [o.outputs[0].token_ids for o in llm.generate(p, greedy(12), use_tqdm=False)]
    other = write_tiny_model(tmp_path / "other", "llama", seed=5)
    with pytest.raises(LookupError):
        with LLM(tiny_llama, **ARGS) as one, LLM(other, **ARGS) as two:
            assert len(cores()) == 2
            alone = tokens(one, prompts), tokens(two, prompts)
            assert alone[0] != alone[1]
            together = [None, None]
            threads = [threading.Thread(target=lambda i=i, e=e: together.__setitem__(i, [tokens(e, prompts) for _ in range(3)]))
                       for i, e in enumerate((one, two))]
            for t in threads: t.start()
            for t in threads: t.join(60)
            assert together == [[alone[0]] * 3, [alone[1]] * 3]
            raise LookupError
    assert not cores()


def test_random_aborts_through_the_child_leave_nothing(tiny_llama):
    seed = 11
    print("seed", seed)
    rng, live = random.Random(seed), {"prompt_token_ids": [9, 8, 7]}
    with LLM(tiny_llama, **ARGS) as llm:
        engine, core = llm.llm_engine, llm.llm_engine.engine_core
        [want] = llm.generate(live, greedy(6), use_tqdm=False)
        for i in range(60):
            engine.add_request(f"r{i}", {"prompt_token_ids": [rng.randrange(3, 512) for _ in range(rng.randint(1, 30))]}, greedy(rng.randint(1, 12)))
            time.sleep(rng.uniform(0, 0.005))
            for _ in range(1 + (rng.random() < 0.2)):
                engine.abort_request([f"r{i}", f"never-{i}"])
                core.abort_requests([f"never-{i}"])   # the front passes over ids that it does not know; the core must too
        while engine.has_unfinished_requests(): engine.step()
        [again] = llm.generate(live, greedy(6), use_tqdm=False)
        assert again.prompt_token_ids == [9, 8, 7] and again.outputs[0].token_ids == want.outputs[0].token_ids
        assert core.get_request_counts() == (0, 0) and core.make_stats().num_free_blocks == 63
        assert not engine.has_unfinished_requests() and engine.get_num_unfinished_requests() == 0
