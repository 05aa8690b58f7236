"""What Triton's interpreter lacks, for tests only. Import with TRITON_INTERPRET=1 set, before the kernels run.

`install()` repairs bfloat16 (3.9.0 multiplies the raw bits in `tl.dot` and truncates where a GPU rounds) and fp8 (its conversion loses a carry, 31.4
becomes 16, and NaN), and puts every load and store under watch:

- a bounds sanitizer: each unmasked lane must lie inside a tensor that was passed to the launch, or named to `reachable` (`OutOfBounds`);
- a race detector: no two programs of a launch may store to one address (`WriteRace`);
- a meter: bytes loaded and stored, programs run, bytes loaded by argument (`METER`);
- `grid_order("reversed" | "shuffled")`: programs run in another order, as a GPU may run them.

The interpreter cannot show races of a load with another program's store, nor anything about speed."""
import contextlib
import os
import random

assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1 before importing triton"

import numpy as np  # noqa: E402
import torch  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

Builder, Handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
ORIGINAL = {name: getattr(Builder, name) for name in ("create_dot", "cast_impl", "create_masked_load", "create_masked_store", "set_grid_idx",
                                                            "create_fp_to_fp")}
RUN_GRID, PATCH_LANG = interpreter.GridExecutor.__call__, interpreter._patch_lang
NP_DTYPE, NP_DTYPES = interpreter._get_np_dtype, {}
METER = dict(loaded=0, stored=0, programs=0, of={})


class OutOfBounds(Exception): pass


class WriteRace(Exception): pass


class Launch:
    "What is known of the launch that is running"
    regions: list = []  # (first byte, byte behind the last, argument name)
    more: list = []  # the same, of memory that a kernel reaches through addresses in a table
    writers: dict = {}  # address -> program
    program = None
    order = "given"
    patched = None  # what of the language is patched for this launch


# --- bfloat16

def widen(bits):
    "bfloat16 bit patterns as float32"
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(x):
    "float32 as bfloat16 bit patterns, rounded to nearest even as GPUs do"
    u = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return np.where(np.isnan(x), np.uint16(0x7FC0), ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16))


def dot(self, a, b, *rest):
    a, b = (Handle(widen(x.data), tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
    return ORIGINAL["create_dot"](self, a, b, *rest)


def cast(self, src, to):
    pair = src.dtype.scalar, to.scalar
    if tl.float8e4nv in pair and pair[0] != pair[1]:  # torch converts as hardware does; what is not float32 goes through it
        if pair[0] == tl.float8e4nv:
            wide = torch.from_numpy(np.ascontiguousarray(src.data)).view(torch.float8_e4m3fn).float().numpy()
            return self.cast_impl(Handle(wide, tl.float32), to)
        wide = np.ascontiguousarray(self.cast_impl(src, tl.float32).data)
        return Handle(torch.from_numpy(wide).to(torch.float8_e4m3fn).view(torch.uint8).numpy(), to.scalar)
    if pair == (tl.float32, tl.bfloat16): return Handle(narrow(src.data), to.scalar)
    if pair == (tl.bfloat16, tl.float32): return Handle(widen(src.data), to.scalar)
    return ORIGINAL["cast_impl"](self, src, to)


def convert(self, src, to, rounding):
    if tl.float8e4nv in (src.dtype.scalar, to.scalar): return cast(self, src, to)
    return ORIGINAL["create_fp_to_fp"](self, src, to, rounding)


# --- memory

def addresses(pointers, mask, what):
    "The addresses of the unmasked lanes, all of them checked; and the bytes of one element"
    size = interpreter._get_np_dtype(pointers.get_element_ty()).itemsize
    used = np.broadcast_to(pointers.data, mask.data.shape)[mask.data.astype(bool)].ravel()
    inside = np.zeros(used.shape, bool)
    for low, high, name in Launch.regions:
        hits = (used >= low) & (used + size <= high)
        if what == "load": METER["of"][name] = METER["of"].get(name, 0) + int(hits.sum()) * size
        inside |= hits
    if not inside.all():
        bad = int(used[~inside][0])
        low, high, name = min(Launch.regions, key=lambda r: min(abs(bad - r[0]), abs(bad - r[1])))
        raise OutOfBounds(f"{what} of {int((~inside).sum())} lanes outside every tensor, e.g. byte {bad - low} of {name} ({high - low} bytes), "
                          f"program {Launch.program}")
    return used, size


def masked_load(self, pointers, mask, *rest):
    used, size = addresses(pointers, mask, "load")
    METER["loaded"] += used.size * size
    return ORIGINAL["create_masked_load"](self, pointers, mask, *rest)


def masked_store(self, pointers, value, mask, *rest):
    used, size = addresses(pointers, mask, "store")
    METER["stored"] += used.size * size
    for address in used.tolist():
        if Launch.writers.setdefault(address, Launch.program) != Launch.program:
            raise WriteRace(f"programs {Launch.writers[address]} and {Launch.program} store to one address")
    return ORIGINAL["create_masked_store"](self, pointers, value, mask, *rest)


# --- launches

def extent(name, x):
    "First byte and byte behind the last that the tensor's shape and strides can reach"
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride())) if x.numel() else -1
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size(), name


def set_program(self, x, y, z):
    "Called by the interpreter in grid order; runs program number `order[n]` in the n-th place"
    n = (x * self.grid_dim[1] + y) * self.grid_dim[2] + z
    if n == 0:
        programs = list(np.ndindex(*self.grid_dim))
        if Launch.order == "reversed": programs.reverse()
        if Launch.order == "shuffled": random.Random(0).shuffle(programs)
        Launch.programs = programs
    Launch.program = tuple(int(i) for i in Launch.programs[n])
    METER["programs"] += 1
    return ORIGINAL["set_grid_idx"](self, *Launch.program)


def np_dtype(dtype):
    "The interpreter's answer for each type of element, asked once: it builds its table anew at each call"
    name = dtype.scalar.name
    if name not in NP_DTYPES: NP_DTYPES[name] = NP_DTYPE(dtype)
    return NP_DTYPES[name]


def patch_language(fn):
    "Once a launch and module, which stays so until its end: the interpreter goes through the whole language at each call of a helper, half of its time"
    modules = tuple(m for m in (tl, tl.core) if any(x is m for x in fn.__globals__.values()))
    if Launch.patched is not None:
        if modules in Launch.patched: return interpreter._LangPatchScope()
        Launch.patched.add(modules)
    return PATCH_LANG(fn)


def run_grid(self, *args, **kwargs):
    named = dict(zip(self.arg_names, args)) | kwargs
    Launch.regions = [extent(n, x) for n, x in named.items() if hasattr(x, "data_ptr")] + Launch.more
    Launch.writers, Launch.patched = {}, set()
    try:
        return RUN_GRID(self, *args, **kwargs)
    except interpreter.InterpreterError as e:
        raise e.__cause__ if isinstance(e.__cause__, (OutOfBounds, WriteRace)) else e
    finally:
        Launch.regions, Launch.patched = [], None


@contextlib.contextmanager
def grid_order(order: str):
    "Run the programs of every launch in this order"
    before, Launch.order = Launch.order, order
    try: yield
    finally: Launch.order = before


@contextlib.contextmanager
def metered():
    "Count from zero inside the block; yields the counts"
    METER.update(loaded=0, stored=0, programs=0, of={})
    yield METER


@contextlib.contextmanager
def reachable(*tensors):
    "Launches inside the block may touch these tensors too, though they are not among the arguments"
    Launch.more = [extent(f"tensor {i}", x) for i, x in enumerate(tensors)]
    try: yield
    finally: Launch.more = []


def install(bf16: bool = True, watch: bool = True):
    "Patch the interpreter; `install(False, False)` takes everything back"
    for name, new in (("create_dot", dot), ("cast_impl", cast)): setattr(Builder, name, new if bf16 else ORIGINAL[name])
    for name in ("create_fp_ext", "create_fp_trunc"): setattr(Builder, name, lambda self, src, to: self.cast_impl(src, to))
    Builder.create_fp_to_fp = convert if bf16 else ORIGINAL["create_fp_to_fp"]
    for name, new in (("create_masked_load", masked_load), ("create_masked_store", masked_store), ("set_grid_idx", set_program)):
        setattr(Builder, name, new if watch else ORIGINAL[name])
    interpreter.GridExecutor.__call__ = run_grid if watch else RUN_GRID
    interpreter._patch_lang = patch_language
    interpreter._get_np_dtype = np_dtype
    interpreter.GridExecutor._restore_args_dev = lambda *args: None  # CPU tensors are used in place: nothing to copy back
