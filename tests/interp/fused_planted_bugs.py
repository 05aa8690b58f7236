"""Plant one bug at a time into the fused kernels and see that the checks notice. Run by tests/test_fused_kernels.py with TRITON_INTERPRET=1."""
import importlib.util
import sys
import tempfile
import time
from pathlib import Path

import fused_checks as checks
import triton_tools as tools

SOURCE = (Path(__file__).resolve().parents[2] / "litevllm/kernels/fused.py").read_text(encoding="utf-8").replace("from .", "from litevllm.kernels.")
CHECKS = {
    "norm": lambda K: [checks.check_rms_norm(K, *s) for s in ((5, 64), (3, 80), (1, 1040))],
    "small": lambda K: checks.check_rms_norm(K, 3, 64, spread=1e-4, eps=1e-5),
    "large": lambda K: checks.check_rms_norm(K, 3, 64, checks.F16, spread=3000.0),
    "heads": lambda K: checks.check_heads(K),
    "sum": lambda K: [checks.check_add_norm(K, *s) for s in ((5, 64), (3, 80), (5, 64, checks.BF16))],
    "silu": lambda K: checks.check_silu(K, 2, 1040),
    "rope": lambda K: [checks.check_rope(K, *s) for s in ((3, 9, 3, 64), (2, 3, 3, 80))],
    "cache": lambda K: [checks.check_cache(K, *s) for s in ((5, 4, 2, 64), (5, 3, 3, 80))],
    "last page": lambda K: checks.check_cache(K, block_size=24, slots=(30, 100, 143)),
    "fp8": lambda K: checks.check_cache(K, dtype=checks.BF16, cache=checks.FP8, scales=(0.5, 2.0)),
    "no fp8": lambda K: checks.check_cache(K, dtype=checks.BF16, scales=(0.5, 3.0)),
}
BUGS = [  # what is wrong then, the line as it is, the line with the bug, the check that must notice
    ("the mean is taken over the padded row", "tl.sum(x * x, 1) / SIZE", "tl.sum(x * x, 1) / BLOCK", "norm"),
    ("eps is forgotten", "tl.sqrt_rn(mean + eps)", "tl.sqrt_rn(mean)", "small"),
    ("eps comes after the root", "tl.sqrt_rn(mean + eps)", "(tl.sqrt_rn(mean) + eps)", "small"),
    ("the mean is taken off first, as in LayerNorm", "mean = tl.sum(x * x, 1) / SIZE", "mean = tl.sum(x * x, 1) / SIZE - (tl.sum(x, 1) / SIZE) * (tl.sum(x, 1) / SIZE)", "norm"),
    ("squares in float16", "x = tl.load(x_ptr + at[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)\n    out = normed(x,",
     "x = tl.load(x_ptr + at[:, None] + d[None, :], mask=mask, other=0.0)\n    out = normed(x,", "large"),
    ("the weight is read behind its end", "tl.load(weight_ptr + d, mask=d < SIZE, other=0.0)", "tl.load(weight_ptr + d)", "norm"),
    ("rows behind the last are read", "mask = (row < num_rows)[:, None] & (d < SIZE)[None, :]\n    at", "mask = (row >= 0)[:, None] & (d < SIZE)[None, :]\n    at", "norm"),
    ("columns behind the row are read", "mask = (row < num_rows)[:, None] & (d < SIZE)[None, :]\n    at", "mask = (row < num_rows)[:, None] & (d >= 0)[None, :]\n    at", "norm"),
    ("heads are taken to lie densely", "(row % HEADS) * stride_h", "(row % HEADS) * (stride_h + 1)", "heads"),
    ("tokens and heads are swapped", "(row // HEADS) * stride_t + (row % HEADS) * stride_h", "(row % HEADS) * stride_t + (row // HEADS) * stride_h", "heads"),
    ("the sum is not stored", "    tl.store(r_at, total, mask=mask)\n", "", "sum"),
    ("the sum is normed before it is rounded", ".to(residual_ptr.dtype.element_ty)\n    tl.store(r_at, total, mask=mask)\n", "\n    tl.store(r_at, total.to(residual_ptr.dtype.element_ty), mask=mask)\n", "sum"),
    ("x is normed, not the sum", "normed(total.to(tl.float32)", "normed(x.to(tl.float32)", "sum"),
    ("residual has the stride of x", "residual_ptr + row[:, None] * stride_r", "residual_ptr + row[:, None] * (stride_r - 1)", "sum"),
    ("gate and up are swapped", "out = gate / (1.0 + tl.exp(-gate)) * up", "out = up / (1.0 + tl.exp(-up)) * gate", "silu"),
    ("sigmoid of the wrong sign", "tl.exp(-gate)", "tl.exp(gate)", "silu"),
    ("the last piece of a row runs over", "mask = d < SIZE\n    gate", "mask = d >= 0\n    gate", "silu"),
    ("up begins one too late", "row * stride + SIZE + d", "row * stride + SIZE + 1 + d", "silu"),
    ("turned the other way", "(a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype)", "(a * cos + b * sin).to(dtype), (b * cos - a * sin).to(dtype)", "rope"),
    ("neighbours are paired", "b = tl.load(row_ptr + at + HALF,", "b = tl.load(row_ptr + at + 1,", "rope"),
    ("sines begin behind the padded half", "row + HALF + d", "row + HALF_PAD + d", "rope"),
    ("every token has the first one's position", "tl.load(position_ptr + token)", "tl.load(position_ptr)", "rope"),
    ("the place in the batch is the position", "tl.load(position_ptr + token).to(tl.int64) * stride", "token * stride", "rope"),
    ("key heads are not masked", "(h < NUM_HEADS)[:, None] & (d < HALF)[None, :]", "(h >= 0)[:, None] & (d < HALF)[None, :]", "rope"),
    ("the padded half is written", "(h < NUM_HEADS)[:, None] & (d < HALF)[None, :]", "(h < NUM_HEADS)[:, None] & (d >= 0)[None, :]", "rope"),
    ("keys are turned as heads behind the queries", "tile - Q_TILES, cos, sin, KV_HEADS, HALF, HALF_PAD, BLOCK_H)\n\n", "tile, cos, sin, KV_HEADS, HALF, HALF_PAD, BLOCK_H)\n\n", "rope"),
    ("slot -1 is written", "if slot >= 0:", "if slot >= -1:", "cache"),
    ("slots behind the map are read", "mask=token < num_slots, other=-1", "mask=token >= 0, other=-1", "cache"),
    ("slot 0 is taken for padding", "if slot >= 0:", "if slot > 0:", "cache"),
    ("the key is stored as it was", "tl.store(to, as_stored(a, k_scale,", "tl.store(to, as_stored(tl.load(key_ptr + token * key_stride + at, mask=mask), k_scale,", "cache"),
    ("page size taken for a power of two", "slot % BLOCK_SIZE", "slot & (BLOCK_SIZE - 1)", "last page"),
    ("values have the keys' scale", "mask=mask), v_scale", "mask=mask), k_scale", "fp8"),
    ("keys have the values' scale", "as_stored(b, k_scale", "as_stored(b, v_scale", "fp8"),
    ("keys are not rounded before they are stored", "dtype: tl.constexpr = row_ptr.dtype.element_ty", "dtype: tl.constexpr = tl.float32", "fp8"),
    ("the second half of the values is the first", "tl.store(to + HALF, as_stored(tl.load(value + HALF, mask=mask)", "tl.store(to + HALF, as_stored(tl.load(value, mask=mask)", "cache"),
]


def load(source, folder, name):
    "A module from source text; the interpreter wants to read it from a file"
    path = Path(folder) / f"{name}.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main():
    with tempfile.TemporaryDirectory() as folder:
        sound = load(SOURCE, folder, "sound")
        for check in CHECKS.values(): check(sound)
        missed = []
        for n, (what, line, bug, name) in enumerate(BUGS):
            assert line in SOURCE, f"fused_planted_bugs.py is out of date: {line!r} is not in the kernels"
            began = time.perf_counter()
            mutant = load(SOURCE.replace(line, bug), folder, f"bug{n}")
            try: CHECKS[name](mutant)
            except Exception as e:
                while e.__cause__ is not None: e = e.__cause__   # the interpreter wraps what goes wrong in a helper
                if not isinstance(e, (AssertionError, tools.OutOfBounds, tools.WriteRace)): raise
                print(f"found   {what}: {type(e).__name__} ({time.perf_counter() - began:.1f} s)", flush=True)
            else:
                missed.append(what)
                print(f"MISSED  {what}", flush=True)
    print(f"{len(BUGS) - len(missed)} of {len(BUGS)} planted bugs found")
    return len(missed)


if __name__ == "__main__": sys.exit(main())
