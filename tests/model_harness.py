"""A model on its own paged KV cache, packed by hand: what the tests of model/ use in place of a worker."""
import random

import torch

from litevllm.config import EngineArgs
from litevllm.model.attention import AttentionMetadata
from litevllm.model.forward_context import set_forward_context
from litevllm.model.loader import get_kv_cache_spec, get_model


class PagedModel:
    """`step({"A": [ids], "B": [ids]})` runs one forward over the packed tokens and returns float32 logits for each token, by request.

    Blocks are handed out in shuffled order, and the cache starts full of NaN."""

    def __init__(self, path, block_size=16, num_blocks=64, seed=0, **engine_args):
        self.config = EngineArgs(model=str(path), block_size=block_size, device="cpu", **engine_args).create_engine_config()
        self.model = get_model(self.config)
        self.block_size, self.requests = block_size, {}
        self.free = list(range(1, num_blocks))
        random.Random(seed).shuffle(self.free)
        for name, (heads, size) in get_kv_cache_spec(self.config).items():
            layer = self.config.compilation_config.static_forward_context[name]
            shape = layer.backend.get_kv_cache_shape(num_blocks, block_size, heads, size)
            layer.kv_cache = torch.full(shape, float("nan"), dtype=layer.kv_cache_torch_dtype)

    def pack(self, chunks, pad_to=None):
        "input_ids, positions and the metadata by layer name, for the next tokens of each request."
        ids, positions, slots, starts, lengths, tables = [], [], [], [0], [], []
        for req, new in chunks.items():
            done, blocks = self.requests.setdefault(req, [0, []])
            total = done + len(new)
            while len(blocks) * self.block_size < total: blocks.append(self.free.pop())
            ids += new
            positions += range(done, total)
            slots += [blocks[p // self.block_size] * self.block_size + p % self.block_size for p in range(done, total)]
            starts.append(starts[-1] + len(new)); lengths.append(total); tables.append(blocks)
            self.requests[req][0] = total
        n, width = len(ids), max(map(len, tables))
        extra = max((pad_to or n) - n, 0)
        int32 = dict(dtype=torch.int32)
        metadata = AttentionMetadata(
            n, max(map(len, chunks.values())), torch.tensor(starts, **int32), max(lengths), torch.tensor(lengths, **int32),
            torch.tensor([t + [0] * (width - len(t)) for t in tables], **int32), torch.tensor(slots + [-1] * extra))
        by_layer = {name: metadata for name in self.config.compilation_config.static_forward_context}
        return torch.tensor(ids + [0] * extra), torch.tensor(positions + [0] * extra), by_layer

    def step(self, chunks, pad_to=None, forward=None):
        input_ids, positions, by_layer = self.pack(chunks, pad_to)
        with torch.inference_mode(), set_forward_context(by_layer, self.config):
            hidden = (forward or self.model)(input_ids, positions)
        logits = self.model.compute_logits(hidden)
        starts = next(iter(by_layer.values())).query_start_loc.tolist()
        return {req: logits[a:b] for req, a, b in zip(chunks, starts, starts[1:])}
