"""The process boundary under faults: whoever dies, nobody waits for ever, and nothing is left behind. Executors without a model
(ipc_fakes.py) stand in for the worker; the scheduler, the busy loop and the sockets are the real ones."""
import gc, io, os, signal, subprocess, sys, tempfile, textwrap, threading, time
from pathlib import Path
from types import SimpleNamespace

import msgspec, psutil, pytest

import ipc_fakes as fakes
from ipc_fakes import FakeExecutor, make_config, make_request
from litevllm.engine.child_process import ChildProcess
from litevllm.engine.core import EngineCore
from litevllm.engine.core_client import EngineCoreClient, EngineDeadError, InprocClient, SyncMPClient
from litevllm.messages import FinishReason

pytestmark = pytest.mark.timeout(60)
HERE = Path(__file__).parent
MODES = [("1", True), ("1", False), ("0", True), ("0", False)]


def children(): return [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]


def wait_until(condition, seconds, what):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.01)


@pytest.fixture
def tmp(monkeypatch):
    "A short directory of our own for sockets (Unix socket paths are limited), empty at the end."
    d = tempfile.mkdtemp(prefix="ipc", dir="/tmp")
    monkeypatch.setattr(tempfile, "tempdir", d)
    yield d
    wait_until(lambda: not os.listdir(d), 5, f"socket directories gone, there are {os.listdir(d)}")
    os.rmdir(d)


@pytest.fixture
def make(tmp, monkeypatch):
    "A client factory; at the end no child, no thread of ours, no socket directory is left."
    threads, clients = set(threading.enumerate()), []
    def make(executor=FakeExecutor, mp="1", async_scheduling=True, **config):
        monkeypatch.setenv("LITEVLLM_ENABLE_MULTIPROCESSING", mp)
        clients.append(EngineCoreClient.make_client(make_config(async_scheduling, **config), executor_class=executor))
        return clients[-1]
    yield make
    for c in clients: c.shutdown()
    assert not children()
    wait_until(lambda: set(threading.enumerate()) <= threads, 5, "threads gone")


def collect(client, ids):
    "Tokens and last output of each request, all of them finished."
    tokens, last = {i: [] for i in ids}, {}
    while len(last) < len(tokens):
        for o in client.get_output().outputs:
            tokens[o.request_id] += o.new_token_ids   # KeyError: an output nobody asked for
            if o.finished: last[o.request_id] = o
    return tokens, last


def expected(first, prompt_len, n): return [1000 * first + prompt_len + i for i in range(n)]


def pid_of(client): return client.resources.child.process.pid


def in_thread(f, *args):
    "Runs it; a list to which its result or exception and the time of that are appended."
    box = []
    def run():
        try: box.append((f(*args), time.monotonic()))
        except BaseException as e: box.append((e, time.monotonic()))
    threading.Thread(target=run, daemon=True).start()
    return box


# ---- what it is for -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("mp,async_scheduling", MODES)
def test_every_request_gets_its_own_tokens(make, mp, async_scheduling):
    client = make(mp=mp, async_scheduling=async_scheduling)
    assert type(client) is (SyncMPClient if mp == "1" else InprocClient)
    ready = client.ready
    assert (ready.max_model_len, ready.num_gpu_blocks, ready.async_scheduling, ready.dtype) == (1 << 20, 4096, async_scheduling, "float32")
    for call in range(10):
        n = {f"{call}-{i}": i % 7 + 1 for i in range(20)}
        for i, (r, m) in enumerate(n.items()): client.add_request(make_request(r, [i + 1] * (i + 3), max_tokens=m))
        tokens, last = collect(client, n)
        assert tokens == {r: expected(i + 1, i + 3, m) for i, (r, m) in enumerate(n.items())}
        assert {o.finish_reason for o in last.values()} == {FinishReason.LENGTH}
    assert client.get_request_counts() == (0, 0)
    assert client.make_stats().num_free_blocks == 4095 and client.reset_prefix_cache() is True


def test_a_burst_larger_than_any_high_water_mark(make):
    client = make()
    ids = [f"r{i}" for i in range(3000)]
    for i, r in enumerate(ids): client.add_request(make_request(r, [i], max_tokens=1))
    tokens, _ = collect(client, ids)
    assert tokens == {r: [1000 * i + 1] for i, r in enumerate(ids)}


def test_tcp_where_a_socket_path_would_be_too_long(tmp, make, monkeypatch):
    deep = Path(tmp, "d" * 90)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    client = make()
    assert client.resources.input_address.startswith("tcp://127.0.0.1:")
    client.add_request(make_request("a", [3, 4]))
    assert collect(client, ["a"])[0] == {"a": expected(3, 2, 4)}
    deep.rmdir()


def test_two_engines_at_once_do_not_mix(make):
    one, two = make(), make()
    assert pid_of(one) != pid_of(two)
    for i in range(5):
        one.add_request(make_request(f"r{i}", [1], max_tokens=9))
        two.add_request(make_request(f"r{i}", [2], max_tokens=9))
    two_tokens, one_tokens = collect(two, [f"r{i}" for i in range(5)])[0], collect(one, [f"r{i}" for i in range(5)])[0]
    assert all(t == expected(1, 1, 9) for t in one_tokens.values()) and all(t == expected(2, 1, 9) for t in two_tokens.values())
    one.shutdown()
    two.add_request(make_request("after", [2]))
    assert collect(two, ["after"])[0] == {"after": expected(2, 1, 4)}


def test_several_threads_may_use_one_client(make):
    client, errors = make(), []
    def ask(k):
        try:
            for i in range(50): client.add_request(make_request(f"{k}-{i}", [k], max_tokens=2))
            for _ in range(50): assert len(client.get_request_counts()) == 2
        except BaseException as e: errors.append(e)
    threads = [threading.Thread(target=ask, args=(k,)) for k in range(4)]
    for t in threads: t.start()
    tokens, _ = collect(client, [f"{k}-{i}" for k in range(4) for i in range(50)])
    for t in threads: t.join(20)
    assert not errors and all(t == expected(int(r[0]), 1, 2) for r, t in tokens.items())


# ---- bad requests, aborts, utility calls ------------------------------------------------------------------------------------------

@pytest.mark.parametrize("mp", ["1", "0"])
def test_bad_requests_hurt_nobody_else(make, mp):
    client = make(mp=mp)
    client.add_request(make_request("good", [1], max_tokens=200))
    client.add_request(make_request("huge", [2] * (4096 * 16)))
    client.abort_requests(["nobody", "good-but-unknown"])
    client.abort_requests([])
    tokens, last = collect(client, ["good", "huge"])
    assert tokens == {"good": expected(1, 1, 200), "huge": []}
    assert last["huge"].finish_reason is FinishReason.ERROR and "4095" in last["huge"].error
    for bad in ("shutdown", "__init__", "no_such_thing", "abort_requests"):
        with pytest.raises(RuntimeError, match=f"'{bad}' is not a utility method"): client.call_utility(bad)
    with pytest.raises(RuntimeError, match="get_request_counts failed: TypeError"): client.call_utility("get_request_counts", 1, 2)
    assert client.get_request_counts() == (0, 0)


@pytest.mark.parametrize("mp", ["1", "0"])
def test_a_duplicate_id_is_refused_and_the_engine_goes_on(make, mp):
    client = make(mp=mp)
    client.add_request(make_request("twin", [1], max_tokens=50))
    client.add_request(make_request("twin", [2], max_tokens=50))
    tokens, errors = [], []
    while len(tokens) < 50:
        for o in client.get_output().outputs:
            tokens += o.new_token_ids
            if o.error: errors.append(o.error)
    assert tokens == expected(1, 1, 50) and len(errors) == 1 and "twin" in errors[0]


def test_unreadable_messages_hurt_nobody(make):
    "Where the id can be read its owner is told; the rest is logged and dropped."
    client = make()
    for frames in ([b"\x00", b"\xc1"], [b"\x00", msgspec.msgpack.encode(["id", "no ids"])], [b"\x77", b"x"], [b"\x00"], [b"\x03", b"\xc1"]):
        client.resources.post(*frames)
    [told] = client.get_output().outputs
    assert told.request_id == "id" and told.finish_reason is FinishReason.ERROR and "Expected `array`" in told.error
    client.add_request(make_request("a", [1]))
    assert collect(client, ["a"])[0] == {"a": expected(1, 1, 4)}


@pytest.mark.parametrize("mp,async_scheduling", MODES)
def test_abort_frees_the_request_and_stops_its_outputs(make, mp, async_scheduling):
    client = make(mp=mp, async_scheduling=async_scheduling)
    for r in ("a", "b"): client.add_request(make_request(r, [1], max_tokens=30_000))
    while len({o.request_id for o in client.get_output().outputs}) < 2: pass
    client.abort_requests(["a", "a", "zzz"])
    assert client.get_request_counts() == (1, 0)
    while not client.resources.outputs.empty() if mp == "1" else client._outputs: client.get_output()   # those made before the abort
    for _ in range(5): assert {o.request_id for o in client.get_output().outputs} == {"b"}
    client.abort_requests(["b"])
    assert client.get_request_counts() == (0, 0)
    client.add_request(make_request("c", [3]))
    tokens = []
    while len(tokens) < 4: tokens += [t for o in client.get_output().outputs if o.request_id == "c" for t in o.new_token_ids]
    assert tokens == expected(3, 1, 4)


def test_an_abort_is_seen_while_a_step_runs(make):
    "The step of 0.3 s that runs when the abort comes yields nothing any more, nor is another one planned."
    client = make(fakes.SlowExecutor, async_scheduling=False)
    client.add_request(make_request("a", [1], max_tokens=100))
    client.get_output()
    time.sleep(0.1)     # the second step is running
    client.abort_requests(["a"])
    start = time.monotonic()
    assert client.get_request_counts() == (0, 0)
    assert time.monotonic() - start < 0.6 and client.resources.outputs.empty()


def test_an_id_can_be_used_again_after_its_abort(make):
    """The abort's eager copy must not hit the id's next owner. (With async scheduling a late token of the old owner could: that is why
    internal ids end in 8 random digits.)"""
    client = make(fakes.SlowExecutor, async_scheduling=False)
    client.add_request(make_request("a", [1], max_tokens=100))
    client.get_output()
    client.abort_requests(["a"])
    client.add_request(make_request("a", [2], max_tokens=2))
    tokens = []
    while len(tokens) < 2: tokens += [t for o in client.get_output().outputs for t in o.new_token_ids if t >= 2000]
    assert tokens == expected(2, 1, 2)
    assert client.get_request_counts() == (0, 0)


# ---- the engine dies ----------------------------------------------------------------------------------------------------------------

def test_sigkill_while_generating_wakes_every_waiter(make):
    client = make(fakes.Deaf, async_scheduling=False)   # a step that never ends: all callers are waiting
    client.add_request(make_request("a", [1]))
    time.sleep(0.3)
    boxes = [in_thread(client.get_output), in_thread(client.get_output), in_thread(client.call_utility, "make_stats")]
    time.sleep(0.3)
    assert not any(boxes)
    killed = time.monotonic()
    os.kill(pid_of(client), signal.SIGKILL)
    wait_until(lambda: all(boxes), 5, "every waiting caller has its error")
    for box in boxes:
        error, when = box[0]
        assert isinstance(error, EngineDeadError) and "SIGKILL" in str(error) and when - killed < 5
    texts = set()
    for call in (client.get_output, lambda: client.add_request(make_request("b")), client.reset_prefix_cache, client.get_output):
        start = time.monotonic()
        with pytest.raises(EngineDeadError) as e: call()
        assert time.monotonic() - start < 0.2
        texts.add(str(e.value))
    assert texts == {str(boxes[0][0][0])}
    client.abort_requests(["a"])   # nothing to abort any more: no second error on the way out


def test_sigkill_while_idle(make):
    client = make()
    os.kill(pid_of(client), signal.SIGKILL)
    wait_until(lambda: client.resources.dead_reason, 5, "the death is noticed without a call")
    with pytest.raises(EngineDeadError, match="SIGKILL"): client.add_request(make_request("a"))


@pytest.mark.parametrize("when", ["hello", "load"])
def test_sigkill_during_start_up(make, when):
    def kill():
        wait_until(children, 20, "there is a child")
        if when == "load": wait_until(lambda: "zmq" in " ".join(m.path for m in children()[0].memory_maps()), 20, "it has come to the sockets")
        time.sleep(0.0 if when == "hello" else 0.5)
        children()[0].kill()
    killer = in_thread(kill)
    with pytest.raises(RuntimeError, match="failed to start: its process .* was killed by SIGKILL"): make(fakes.SleepsAtLoad)
    assert killer[0][0] is None


@pytest.mark.parametrize("mp", ["1", "0"])
def test_an_error_in_a_step_is_fatal_and_named(make, mp):
    client = make(fakes.BrokenStep, mp=mp)
    client.add_request(make_request("a", [1], max_tokens=100))
    with pytest.raises(EngineDeadError, match="the sixth step went wrong") as first:
        while True: client.get_output()
    with pytest.raises(EngineDeadError) as later: client.add_request(make_request("b"))
    assert str(later.value) == str(first.value) and "Traceback" in str(later.value)


def test_last_words_always_arrive(make):
    "Closing the sockets must not overtake what is still to be sent: one in ten was lost that way once, and the caller waited for ever."
    for _ in range(25):
        client = make(fakes.BrokenStep)
        client.add_request(make_request("a", [1], max_tokens=100))
        started = time.monotonic()
        with pytest.raises(EngineDeadError, match="the sixth step went wrong"):
            while True: client.get_output()
        client.shutdown()
        assert time.monotonic() - started < 10


def test_a_fork_of_the_front_process_is_told(make):
    "Threads are not forked: in a fork nobody would ever answer."
    client = make()
    pid = os.fork()
    if pid == 0:
        try:
            for call in (client.get_output, lambda: client.add_request(make_request("a", [1])), lambda: client.call_utility("make_stats")):
                try: call()
                except EngineDeadError as e: assert "fork" in str(e)
                else: os._exit(1)
            os._exit(0)
        finally: os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    client.add_request(make_request("b", [1]))
    assert client.get_output().outputs      # ours is unharmed


def test_a_second_close_does_what_the_first_was_kept_from(make, monkeypatch):
    client = make()
    with monkeypatch.context() as m:
        m.setattr(client.resources.child, "stop", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt): client.shutdown()
    client.shutdown()
    assert not children()


def test_a_child_that_ignores_sigterm_is_killed(make):
    client = make(fakes.Deaf)
    client.add_request(make_request("a"))
    time.sleep(0.2)
    start = time.monotonic()
    client.shutdown()
    assert time.monotonic() - start < 8 and not children()
    client.shutdown()   # again: nothing


@pytest.mark.parametrize("mp", ["1", "0"])
def test_a_waiter_is_told_of_a_shutdown(make, mp):
    client = make(mp=mp)
    waiting = in_thread(client.get_output) if mp == "1" else None
    time.sleep(0.1)
    client.shutdown()
    if waiting is not None:
        wait_until(lambda: waiting, 2, "the waiter woke")
        assert isinstance(waiting[0][0], EngineDeadError)
    for call in (client.get_output, client.get_request_counts, lambda: client.add_request(make_request("a"))):
        with pytest.raises(EngineDeadError, match="shut down"): call()
    client.abort_requests(["a"])


# ---- it does not start ----------------------------------------------------------------------------------------------------------------

class _Elsewhere: pass
_Elsewhere.__module__ = "no_such_module"


@pytest.mark.parametrize("executor,reason", [
    (fakes.BrokenLoad, r"ValueError: weight model.norm.weight has shape \[7\], expected \[64\]"),
    (fakes.NoMemory, "ValueError: one request of 256 tokens needs 16 KV blocks, the pool has 3"),
    (fakes.ExitsAtLoad, "SystemExit: someone called sys.exit"),
    (fakes.Crashes, r"was killed by SIGSEGV(.|\n)*last words before the crash(.|\n)*ipc_fakes.py"),
    (_Elsewhere, "No module named 'no_such_module'")])
def test_start_up_failures_carry_the_childs_own_reason(make, executor, reason):
    with pytest.raises(RuntimeError, match=f"failed to start: (.|\n)*{reason}"): make(executor)
    assert not children()


def test_an_import_error_before_the_first_message(make, tmp, monkeypatch):
    bad = Path(tempfile.mkdtemp(dir="/tmp"))
    (bad / "msgspec.py").write_text("raise ImportError('libmsgspec.so.7 cannot be opened')")
    monkeypatch.syspath_prepend(str(bad))
    with pytest.raises(RuntimeError, match=r"exited with code 1(.|\n)*ImportError: libmsgspec.so.7 cannot be opened"): make()
    (bad / "msgspec.py").unlink()
    for p in bad.glob("__pycache__/*"): p.unlink()


def test_start_up_has_a_time_limit(make, monkeypatch):
    monkeypatch.setenv("LITEVLLM_STARTUP_TIMEOUT", "1.5")
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="LITEVLLM_STARTUP_TIMEOUT"): make(fakes.SleepsAtLoad)
    assert time.monotonic() - start < 5 and not children()


@pytest.mark.parametrize("executor", [fakes.BrokenLoad, fakes.NoMemory])
def test_in_process_the_error_comes_as_it_is(make, executor):
    with pytest.raises(ValueError, match="expected|the pool has 3"): make(executor, mp="0")


# ---- nothing is left behind ---------------------------------------------------------------------------------------------------------

def test_build_and_close_five_times_leaves_all_flat(tmp):
    def state(): return len(children()), len(threading.enumerate()), len(os.listdir(tmp)), psutil.Process().num_fds()
    def use(end):
        client = EngineCoreClient.make_client(make_config(), executor_class=FakeExecutor)
        client.add_request(make_request("a", [1], max_tokens=1000))   # still running at the end
        client.get_output()
        assert not os.listdir(tmp)   # the sockets are connected; their files are gone already
        if end == "close": client.shutdown()
        del client
        gc.collect()
    use("close")   # ZeroMQ and others keep a few things from first use
    before = state()
    for end in ("close", "del", "close", "del", "del"): use(end)
    assert state() == before


def run(script, *argv, timeout=40, **kw):
    "Runs a script in a process of its own, with tests/ on its path."
    env = os.environ | {"PYTHONPATH": str(HERE), "PYTHONUNBUFFERED": "1"} | kw.pop("env", {})
    return subprocess.run([sys.executable, *argv, *([] if script is None else ["-c", textwrap.dedent(script)])], capture_output=True, text=True,
                          timeout=timeout, env=env, **kw)


GENERATE = """
from ipc_fakes import *
from litevllm.engine.core_client import EngineCoreClient, EngineDeadError
client = EngineCoreClient.make_client(make_config(), executor_class=FakeExecutor)
client.add_request(make_request("a", [7], max_tokens=3))
tokens = []
while len(tokens) < 3: tokens += [t for o in client.get_output().outputs for t in o.new_token_ids]
print("tokens", tokens, "child", client.resources.child.process.pid, flush=True)
"""


def test_python_c_and_exit_without_close(tmp):
    r = run(GENERATE, env={"TMPDIR": tmp})
    assert r.returncode == 0, r.stderr
    assert "tokens [7001, 7002, 7003]" in r.stdout
    assert not psutil.pid_exists(int(r.stdout.split()[-1]))


def test_script_without_main_guard_from_a_directory_with_decoys(tmp):
    where = Path(tempfile.mkdtemp(dir="/tmp"))
    for name in ("queue.py", "signal.py", "msgspec.py"): (where / name).write_text("raise SystemExit('the wrong module')")
    script = where / "app"
    script.mkdir()
    (script / "main.py").write_text(GENERATE)
    r = run(None, str(script / "main.py"), env={"TMPDIR": tmp}, cwd=where)
    assert r.returncode == 0 and "tokens [7001, 7002, 7003]" in r.stdout, r.stderr
    for p in sorted(where.rglob("*"), reverse=True): p.rmdir() if p.is_dir() else p.unlink()
    where.rmdir()


def test_an_uncaught_error_in_the_callers_code(tmp):
    r = run(GENERATE + "client.add_request(make_request('b', max_tokens=10000))\nraise LookupError('in user code')", env={"TMPDIR": tmp})
    assert r.returncode == 1 and "in user code" in r.stderr
    assert not psutil.pid_exists(int(r.stdout.split()[-1]))


def test_parent_ends_normally_after_the_childs_death(tmp):
    r = run(GENERATE + """
os.kill(client.resources.child.process.pid, signal.SIGKILL)
try: client.get_output()
except EngineDeadError as e: print("dead:", e)
""", env={"TMPDIR": tmp})
    assert r.returncode == 0 and "SIGKILL" in r.stdout, r.stderr


@pytest.mark.parametrize("state", ["idle", "stepping", "starting", "forked"])
def test_the_child_does_not_outlive_a_killed_parent(tmp, state):
    script = {"idle": GENERATE,
              "stepping": GENERATE.replace("FakeExecutor", "Deaf").replace("while len(tokens) < 3", "while False"),
              "starting": "import threading\nfrom ipc_fakes import *\nfrom litevllm.engine.core_client import EngineCoreClient\n"
                          "threading.Thread(target=EngineCoreClient.make_client, args=(make_config(),), kwargs={'executor_class': SleepsAtLoad}).start()",
              "forked": GENERATE + "if os.fork() == 0: time.sleep(15); os._exit(0)\n"}[state]   # the fork holds the child's stdin open
    env = os.environ | {"PYTHONPATH": str(HERE), "TMPDIR": tmp}
    parent = subprocess.Popen([sys.executable, "-c", script + "\nprint('up', flush=True)\ntime.sleep(60)"], env=env, stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, text=True)
    while "up" not in parent.stdout.readline(): pass
    cores = lambda ps: [p for p in ps if "litevllm.engine.core" in p.cmdline()]
    wait_until(lambda: cores(psutil.Process(parent.pid).children()), 20, "there is a child")
    child, = cores(psutil.Process(parent.pid).children())
    time.sleep(0.5)
    assert child.is_running()
    parent.kill()
    parent.wait()
    wait_until(lambda: not child.is_running(), 4, "the child is gone")
    parent.stdout.close()


def test_the_engine_outlives_the_thread_that_built_it(make):
    made = []
    thread = threading.Thread(target=lambda: made.append(make()))
    thread.start()
    thread.join(20)
    time.sleep(0.3)
    made[0].add_request(make_request("a", [4]))
    assert collect(made[0], ["a"])[0] == {"a": expected(4, 1, 4)}


def test_a_fork_of_the_parent_does_not_take_the_engine_with_it(tmp):
    r = run(GENERATE + """
if os.fork() == 0: sys.exit(0)      # runs the fork's exit handlers
os.wait()
client.add_request(make_request("b", [8], max_tokens=1))
print("after", [o.new_token_ids for o in client.get_output().outputs])
""", env={"TMPDIR": tmp})
    assert r.returncode == 0 and "after [[8001]]" in r.stdout, r.stderr


# ---- Ctrl-C -------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("mp,async_scheduling", MODES)
def test_interrupts_hit_the_waiter_and_never_the_engine(tmp, mp, async_scheduling):
    "SIGINT to the whole process group at random moments; after abort the next call gets exactly its own tokens."
    r = run(f"""
import random
seed = {time.time_ns() % 10_000}
print("seed", seed)
rng = random.Random(seed)
from ipc_fakes import *
from litevllm.engine.core_client import EngineCoreClient
client = EngineCoreClient.make_client(make_config({async_scheduling}), executor_class=FakeExecutor)
sent = []
for k in range(12):
    ids = [f"{{k}}-{{i}}" for i in range(3)]
    timer = threading.Timer(rng.uniform(0.0, 0.03), lambda: (sent.append(k), os.killpg(0, signal.SIGINT)))
    try:
        timer.start()
        for r in ids: client.add_request(make_request(r, [k + 1], max_tokens=100_000))
        while True: client.get_output()
    except KeyboardInterrupt: client.abort_requests(ids)
    timer.join()
    client.add_request(make_request(f"{{k}}-next", [500 + k], max_tokens=3))
    tokens, alive = [], True
    while alive:
        for o in client.get_output().outputs:
            if o.request_id == f"{{k}}-next":
                tokens += o.new_token_ids
                alive = not o.finished
            else: assert o.request_id in ids
    assert tokens == [1000 * (500 + k) + 1 + i for i in range(3)], tokens
    assert client.get_request_counts() == (0, 0)
client.shutdown()
print("interrupted", len(sent))
""", env={"TMPDIR": tmp, "LITEVLLM_ENABLE_MULTIPROCESSING": mp}, start_new_session=True)
    assert r.returncode == 0 and "interrupted 12" in r.stdout, r.stdout + r.stderr


def test_interrupt_during_start_up(tmp):
    r = run("""
from ipc_fakes import *
from litevllm.engine.core_client import EngineCoreClient
threading.Timer(0.7, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
start = time.monotonic()
try: EngineCoreClient.make_client(make_config(), executor_class=SleepsAtLoad)
except KeyboardInterrupt: print("interrupted", time.monotonic() - start < 5, flush=True)
import psutil
print("children", psutil.Process().children())
""", env={"TMPDIR": tmp})
    assert r.returncode == 0 and "interrupted True\nchildren []" in r.stdout, r.stdout + r.stderr


# ---- what the child prints ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", ["stringio", "none", "closed"])
def test_odd_streams(make, monkeypatch, kind):
    stream = {"stringio": io.StringIO(), "none": None, "closed": io.StringIO()}[kind]
    if kind == "closed": stream.close()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    client = make(fakes.Chatty)    # more output than a pipe holds: someone must be reading it
    client.add_request(make_request("a", [1]))
    assert collect(client, ["a"])[0] == {"a": expected(1, 1, 4)}
    if kind == "stringio":
        wait_until(lambda: "Asynchronous scheduling is enabled." in stream.getvalue(), 5, "the child's log came through")
        assert "noise 2999 é" in stream.getvalue() and f"(EngineCore pid={pid_of(client)})" in stream.getvalue()


# ---- step_with_batch_queue ------------------------------------------------------------------------------------------------------------

class Stepwise(FakeExecutor):
    "Batches are finished by the test, oldest first."
    def __init__(self, vllm_config):
        super().__init__(vllm_config)
        self.pending = []

    def execute_model(self, plan, non_block=False):
        from concurrent.futures import Future
        future = Future()
        self.pending.append((future, self.run(plan), plan))
        return future

    def finish(self):
        future, output, plan = self.pending.pop(0)
        future.set_result(output)
        return plan


def test_batch_queue_fills_before_it_waits():
    core = EngineCore(make_config(), executor_class=Stepwise)
    ex = core.model_executor
    assert core.step_fn() == (None, False) and not core.has_work()
    core.add_request(core.preprocess_add_request(make_request("a", [1, 1], max_tokens=3)))
    assert core.step_fn() == (None, True)                       # prefill is in flight: plan the next at once
    assert [p.num_scheduled_tokens for _, _, p in ex.pending] == [{"a": 2}]
    ex.finish()                                                 # the oldest is done: the next call plans one more, then takes it
    outputs, executed = core.step_fn()
    assert executed and outputs.outputs[0].new_token_ids == [1002]
    assert [p.num_scheduled_tokens for _, _, p in ex.pending] == [{"a": 1}] and len(core.batch_queue) == 1
    box = in_thread(core.step_fn)                               # two in flight: the queue is full, so it waits for the older
    wait_until(lambda: len(ex.pending) == 2, 5, "the third batch was planned before the wait")
    time.sleep(0.1)
    assert not box
    ex.finish()
    wait_until(lambda: box, 5, "the oldest is taken")
    assert box[0][0][0].outputs[0].new_token_ids == [1003]
    box = in_thread(core.step_fn)                               # nothing more to plan: an empty plan, and wait for the last
    wait_until(lambda: len(ex.pending) == 2, 5, "the empty plan went out")
    assert ex.pending[1][2].total_num_scheduled_tokens == 0
    ex.finish()
    wait_until(lambda: box, 5, "the last token")
    out = box[0][0][0].outputs[0]
    assert out.new_token_ids == [1004] and out.finish_reason is FinishReason.LENGTH
    assert core.has_work()                                      # finished, not flushed: the worker must still hear of it
    flushed = []
    while core.has_work():
        box = in_thread(core.step_fn)
        while not box:
            if ex.pending: flushed.append(ex.finish())
            time.sleep(0.01)
    assert any(p.finished_req_ids == {"a"} for p in flushed)
    core.shutdown()


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("end", ["length", "abort"])
def test_what_has_finished_but_is_not_flushed_counts_as_work(async_scheduling, end):
    "The worker hears of a request's end with the next plan; where no other request asks for one, an empty plan is sent (semantics 63)."
    core = EngineCore(make_config(async_scheduling), executor_class=FakeExecutor)
    core.add_request(core.preprocess_add_request(make_request("a", [1], max_tokens=3 if end == "length" else 1000)))
    finished = False
    for _ in range(3 if end == "abort" else 20):
        outputs, _ = core.step_fn()
        finished = finished or bool(outputs and outputs.outputs and outputs.outputs[0].finished)
        if finished: break
    assert finished == (end == "length")
    if end == "abort": core.abort_requests(["a"])
    assert not core.scheduler.has_unfinished_requests() and core.model_executor.first == {"a": 1} and core.has_work()
    while core.has_work(): core.step_fn()
    assert core.model_executor.first == {} and core.get_request_counts() == (0, 0)
    core.shutdown()


def test_schedule_overlaps_execution():
    "With async scheduling plan n+1 is made before step n ends; without, after."
    for overlap in (True, False):
        core, events = EngineCore(make_config(overlap), executor_class=fakes.SlowExecutor), []
        schedule, run = core.scheduler.schedule, core.model_executor.run
        def timed(name, f):
            def call(*args):
                start = time.monotonic()
                result = f(*args)
                plan = result if name == "schedule" else args[0]
                if plan.total_num_scheduled_tokens: events.append((name, start, time.monotonic()))
                return result
            return call
        core.scheduler.schedule, core.model_executor.run = timed("schedule", schedule), timed("run", run)
        core.add_request(core.preprocess_add_request(make_request("a", [1], max_tokens=3)))
        while core.has_work(): core.step_fn()
        plans, runs = [e for e in events if e[0] == "schedule"], [e for e in events if e[0] == "run"]
        assert len(plans) == len(runs) == 3
        assert (plans[1][1] < runs[0][2]) is overlap and (plans[2][1] < runs[1][2]) is overlap
        core.shutdown()


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_an_outgrown_request_ends_with_the_reason_through_the_loop(make, async_scheduling):
    "Its error comes with an update whose plan was empty; the loop must deliver it all the same."
    client = make(fakes.SmallPool, async_scheduling=async_scheduling)
    client.add_request(make_request("a", [1] * 10, max_tokens=1000))
    tokens, last = collect(client, ["a"])
    assert last["a"].finish_reason is FinishReason.ERROR and "5" in last["a"].error, last
    assert len(tokens["a"]) >= 5 * 16 - 10
    assert client.get_request_counts() == (0, 0) and client.make_stats().num_free_blocks == 5


def test_a_signal_without_a_name_is_a_reason_like_others():
    child = ChildProcess()
    child.process, child.relay = SimpleNamespace(pid=1, poll=lambda: -40), SimpleNamespace(join=lambda seconds: None)
    assert "was killed by signal 40" in child.exit_reason()
