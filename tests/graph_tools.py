"""CUDA graphs and launch paths without a GPU: workers whose recorder is a stand-in, and a watch for whatever would wait for a value."""
import contextlib
from dataclasses import replace

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from litevllm.model.attention import AttentionImpl
from litevllm.worker.cuda_graphs import EagerGraph
from litevllm.worker.worker import Worker, get_num_blocks
from worker_harness import make_config

SIZES = [1, 2, 4, 8]


def graph_config(path, mode="FULL_AND_PIECEWISE", sizes=SIZES, compile="eager", **args):
    "A CPU configuration with CUDA graphs; `compile` None: not compiled, for full graphs only."
    config = make_config(path, compile=compile, **args)
    compilation = replace(config.compilation_config, cudagraph_mode=mode, cudagraph_capture_sizes=list(sizes) if mode != "NONE" else [])
    return replace(config, compilation_config=compilation)


def graph_worker(config, factory=EagerGraph, blocks=128):
    "A started worker whose graphs are of `factory`, with the addresses of arguments checked at each replay."
    worker = Worker(config)
    worker.init_device()
    worker.model_runner.graphs.graph_factory, worker.model_runner.graphs.check_addresses = factory, True
    worker.load_model()
    num_blocks = get_num_blocks(worker.vllm_config, worker.determine_available_memory(), worker.page_size_bytes())
    worker.initialize_from_config(min(num_blocks, blocks))
    worker.compile_or_warm_up_model()
    return worker


WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::masked_select", "aten::equal", "aten::_unique2", "aten::unique_dim", "aten::item"}
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
METHODS = ("tolist", "item", "cpu", "__bool__", "__int__", "__float__", "__index__")


class NoSync(TorchDispatchMode):
    "Raises where a GPU's queue would have to be emptied first: scalars, nonzero, boolean indices, sizes that depend on values."
    def __init__(self):
        super().__init__()
        self.seen, self.asleep = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self.asleep: self.check(func._schema.name, args, kwargs or {})
        return func(*args, **kwargs or {})

    def check(self, name, args, kwargs):
        self.seen.append(name)
        boolean = name in INDEXING and any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
        if name in WAITS or boolean or name.startswith("aten::repeat_interleave") and kwargs.get("output_size") is None:
            raise AssertionError(f"{name} waits for a value")

    def refuse(self, name, original):
        "A method of tensors that a CPU answers without the dispatcher."
        def method(tensor, *args, **kwargs):
            if not self.asleep: raise AssertionError(f"Tensor.{name}() waits for a value")
            return original(tensor, *args, **kwargs)
        return method

    def kernel(self, function):
        "What runs on the device: inside, anything goes."
        def call(*args, **kwargs):
            self.asleep += 1
            try:
                with _disable_current_modes(): return function(*args, **kwargs)   # Dynamo would not run compiled code under a mode
            finally: self.asleep -= 1
        return call


@contextlib.contextmanager
def no_sync(kernels=()):
    "Scope in which nothing may wait, but inside of attention and of `kernels`, given as (owner, name) pairs: these run on the device."
    watch = NoSync()
    patched = [(torch.Tensor, name, watch.refuse(name, getattr(torch.Tensor, name))) for name in METHODS]
    for owner, name in (*kernels, *((AttentionImpl, name) for name in ("forward", "do_kv_cache_update", "do_rope_and_kv_cache_update"))):
        patched.append((owner, name, watch.kernel(getattr(owner, name))))
    before = [(owner, name, vars(owner).get(name)) for owner, name, _ in patched]
    for owner, name, new in patched: setattr(owner, name, new)
    try:
        with watch: yield watch
    finally:
        for owner, name, old in before:
            if old is None: delattr(owner, name)
            else: setattr(owner, name, old)


def tear_apart(runner):
    "Two memories for each table, as on a GPU: the host's side learns of no sampled token."
    for table in (runner.rows.tokens, runner.rows.blocks):
        if table.shared: table.gpu, table.shared = table.gpu.clone(), False
    return runner
