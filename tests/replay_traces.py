"""Replay recorded runs of the vLLM 0.22 scheduler against this one, operation by operation.

usage: python tests/replay_traces.py FILE.jsonl[.xz]

One JSON object a line, in the format of tests/data/README.md. Prints the first difference with the trace's seed, the operation's
index
and content, and exits 1; exits 2 with a message where the file cannot be read or is malformed; exits 0 where all is equal.
"""
import json, lzma, sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from litevllm.config import CacheConfig, SchedulerConfig
from litevllm.core.async_scheduler import AsyncScheduler
from litevllm.core.output import ModelRunnerOutput
from litevllm.core.request import Request, RequestStatus
from litevllm.core.scheduler import Scheduler
from litevllm.sampling_params import SamplingParams


STATE = {"running", "waiting", "free_blocks"}
FIELDS = {"add": {"req"}, "abort": {"req"} | STATE, "update": {"sampled", "outputs"} | STATE,
          # what each kind of operation holds
          "schedule": {"num_scheduled_tokens", "total", "new", "cached", "preempted", "finished"} | STATE}


class MalformedTrace(Exception):
    "The file is not a trace file."


@dataclass
class Difference:
    "The first place where the two schedulers part."
    seed: int
    index: int
    op: dict
    field: str
    expected: object
    got: object

    def __str__(self):
        return (f"seed {self.seed}, operation {self.index} ({self.op['op']}), field {self.field!r}:\n"
                f"  vLLM 0.22: {self.expected!r}\n  litevllm:  {self.got!r}\n  operation: {json.dumps(self.op)}")


def read_traces(path):
    "Yield the traces of a .jsonl or .jsonl.xz file; MalformedTrace with the line number for anything else."
    try:
        with (lzma.open if str(path).endswith(".xz") else open)(path, "rt", encoding="utf-8") as f:
            lines = [(i, line) for i, line in enumerate(f, 1) if line.strip()]
    except (OSError, lzma.LZMAError, UnicodeDecodeError, EOFError) as e:
        raise MalformedTrace(f"{path}: {e}") from e
    if not lines: raise MalformedTrace(f"{path}: holds no trace")
    for number, line in lines:
        try: trace = json.loads(line)
        except json.JSONDecodeError as e: raise MalformedTrace(f"{path}, line {number}: {e}") from e
        missing = {"seed", "config", "eos_token_id", "requests", "ops"} - (trace.keys() if isinstance(trace, dict) else set())
        if missing: raise MalformedTrace(f"{path}, line {number}: lacks {', '.join(sorted(missing))}")
        yield trace


def make_scheduler(config):
    "A scheduler with the options of a trace; an unknown option is a TypeError."
    cache = {k: v for k, v in config.items() if k in ("block_size", "num_gpu_blocks", "enable_prefix_caching")}
    scheduler_config = SchedulerConfig(**{"async_scheduling": False} | {k: v for k, v in config.items() if k not in cache})
    return (AsyncScheduler if scheduler_config.async_scheduling else Scheduler)(scheduler_config, CacheConfig(**cache))


def make_request(req_id, spec, eos_token_id, block_hasher):
    "A request as a trace describes it."
    params = SamplingParams(temperature=0, max_tokens=spec["max_tokens"], min_tokens=spec["min_tokens"],
                            ignore_eos=spec["ignore_eos"],
                            stop_token_ids=spec["stop_token_ids"])
    params.update_from_generation_config({}, eos_token_id)
    return Request(req_id, spec["prompt_token_ids"], params, arrival_time=spec["arrival_time"], cache_salt=spec["cache_salt"],
                   priority=spec["priority"], block_hasher=block_hasher)


class Replay:
    "One trace and the scheduler that follows it; each operation's method returns what the scheduler answered."
    def __init__(self, trace):
        self.trace = trace
        self.scheduler = make_scheduler(trace["config"])
        # a malformed one is found here
        for item in trace["requests"].items(): make_request(*item, trace["eos_token_id"], None)
        self.in_flight = deque()      # plans not yet updated; with async_scheduling there are two

    def add(self, op):
        req_id = op["req"]
        self.scheduler.add_request(make_request(req_id, self.trace["requests"][req_id], self.trace["eos_token_id"],
                                                self.scheduler.block_hasher))
        return {}

    def abort(self, op):
        self.scheduler.finish_requests(op["req"], RequestStatus.FINISHED_ABORTED)
        return {}

    def schedule(self, op):
        plan = self.scheduler.schedule()
        self.in_flight.append(plan)
        cached = plan.scheduled_cached_reqs
        return dict(
            num_scheduled_tokens=[list(item) for item in plan.num_scheduled_tokens.items()],
            total=plan.total_num_scheduled_tokens,
            new=[dict(req=n.req_id, num_computed_tokens=n.num_computed_tokens, block_ids=n.block_ids)
                 for n in plan.scheduled_new_reqs],
            cached=[dict(req=r, num_computed_tokens=n, new_block_ids=b, resumed=r in cached.resumed_req_ids)
                    for r, n, b in zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True)],
            preempted=sorted(plan.preempted_req_ids), finished=sorted(plan.finished_req_ids))

    def update(self, op):
        plan, ids = self.in_flight.popleft(), list(op["sampled"])
        # The runner answers for what was planned; a planned request that the recording does not name would go unnoticed
        # otherwise.
        if set(ids) != set(plan.num_scheduled_tokens): return dict(sampled={r: None for r in plan.num_scheduled_tokens})
        output = ModelRunnerOutput(ids, {r: i for i, r in enumerate(ids)}, [list(t) for t in op["sampled"].values()])
        outputs = self.scheduler.update_from_output(plan, output).outputs
        return dict(outputs=[dict(req=o.request_id, new_token_ids=o.new_token_ids, stop_reason=o.stop_reason,
                                  finish_reason=None if o.finish_reason is None else str(o.finish_reason))
                                  for o in outputs])

    def state(self):
        waiting, scheduler = [r.request_id for r in self.scheduler.waiting], self.scheduler
        if self.trace["config"]["policy"] == "priority": waiting.sort()     # recorded as a sorted set
        return dict(running=[r.request_id for r in scheduler.running], waiting=waiting,
                    free_blocks=scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def check_op(self, index, op):
        "MalformedTrace for an operation that the format does not know or that lacks a field."
        kind = op.get("op") if isinstance(op, dict) else None
        if kind not in FIELDS: raise MalformedTrace(f"operation {index} is of no known kind: {op!r}")
        if missing := FIELDS[kind] - op.keys():
            raise MalformedTrace(f"operation {index} ({kind}) lacks {', '.join(sorted(missing))}")
        if kind == "add" and op["req"] not in self.trace["requests"]:
            raise MalformedTrace(f"operation {index} adds {op['req']!r}, which is not in requests")
        if kind == "update" and not self.in_flight:
            raise MalformedTrace(f"operation {index} updates, and no schedule is left to update")

    def difference(self):
        "The first Difference, or None."
        for index, op in enumerate(self.trace["ops"]):
            self.check_op(index, op)
            try: got = getattr(self, op["op"])(op) | self.state()
            except Exception as e: return Difference(self.trace["seed"], index, op, "(raised)", "no error",
                                                     f"{type(e).__name__}: {e}")
            for field, value in op.items():
                if field in ("op", "req", "sampled") and field not in got: continue
                expected = sorted(value) if field in ("preempted", "finished") else value
                if field not in got or got[field] != expected: return Difference(self.trace["seed"], index, op, field, expected,
                                                                                 got.get(field))
        return None


def replay_file(path):
    "(number of traces, number of operations, first Difference or None)."
    num_traces = num_ops = 0
    for trace in read_traces(path):
        try: difference = Replay(trace).difference()
        except (KeyError, TypeError, ValueError, AttributeError, MalformedTrace) as e:
            raise MalformedTrace(f"{path}, trace with seed {trace['seed']}: {type(e).__name__}: {e}") from e
        num_traces, num_ops = num_traces + 1, num_ops + len(trace["ops"])
        if difference: return num_traces, num_ops, difference
    return num_traces, num_ops, None


def main(argv):
    if len(argv) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    try: num_traces, num_ops, difference = replay_file(Path(argv[0]))
    except MalformedTrace as e:
        print(f"malformed trace file: {e}", file=sys.stderr)
        return 2
    if difference:
        print(f"DIFFERENCE in {argv[0]}: {difference}")
        return 1
    print(f"{num_traces} traces, {num_ops} operations: no difference")
    return 0


if __name__ == "__main__": sys.exit(main(sys.argv[1:]))
