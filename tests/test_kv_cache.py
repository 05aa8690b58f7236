"""Block pool, block tables and prefix cache: statements 25-38 of the design's semantics page, cases P1 and P2, and a dictionary
model."""
import os, random, subprocess, sys

import pytest
from core_tools import Engine, abort, add, check_books, free_ids, make_request, make_scheduler, solo, step

from litevllm.core.block_pool import BlockHasher, BlockPool, hash_block_tokens
from litevllm.core.kv_cache_manager import KVCacheManager
from litevllm.core.request import Request
from litevllm.sampling_params import SamplingParams

PROMPT = list(range(100, 160))


def hit(s, req_id): return next(n.num_computed_tokens for n in s.scheduled_new_reqs if n.req_id == req_id)


def request_of(tokens, hasher=None, salt=None, **params): return Request("R", tokens, SamplingParams(**params), cache_salt=salt,
                                                                         block_hasher=hasher)


@pytest.mark.parametrize("n,cached,scheduled", [(8, 4, 4), (9, 8, 1)])
def test_s25_p1_a_hit_never_covers_the_last_token(n, cached, scheduled):
    "25: 8-token repeat, blocks of 4: hit 4, schedule 4. 9 tokens: hit 8, schedule 1."
    s = make_scheduler()
    add(s, "A", PROMPT[:n], max_tokens=1)
    step(s)
    add(s, "B", PROMPT[:n])
    plan = s.schedule()
    assert (hit(plan, "B"), plan.num_scheduled_tokens) == (cached, {"B": scheduled})


@pytest.mark.parametrize("bs", [1, 4, 16])
def test_p1_every_length_around_a_block(bs):
    """P1: n*b-1, n*b, n*b+1, cold, warm, warm beside a cold one, and a third longer prompt: same output, hit = whole blocks
    before the last token."""
    for n in sorted({max(1, k * bs + d) for k in (1, 2, 3) for d in (-1, 0, 1)}):
        s = make_scheduler(blocks=200, bs=bs)
        engine = Engine(s)
        want = None
        for name, prompt, beside in [("cold", PROMPT[:n], 0), ("warm", PROMPT[:n], 0), ("beside", PROMPT[:n], 1),
                                     ("longer", PROMPT[:n] + [7], 0)]:
            r = add(s, name, prompt, max_tokens=5)
            if beside: add(s, "other", [9] * 6, max_tokens=5)
            engine.drain()
            assert engine.outputs[name] == solo(r, 256)[0], (bs, n, name)
            assert r.num_cached_tokens == {"cold": 0, "longer": n // bs * bs}.get(name, (n - 1) // bs * bs), (bs, n, name)
            want = want or engine.outputs[name]
            if name != "longer": assert engine.outputs[name] == want


def test_s26_no_dedupe_and_the_first_block_wins():
    "26: a recomputed last block is a second physical block; look-ups keep finding the first."
    s = make_scheduler()
    add(s, "A", PROMPT[:8]), step(s)
    add(s, "B", PROMPT[:8]), step(s)
    a, b = (s.kv_cache_manager.get_block_ids(i) for i in "AB")
    assert a[0] == b[0] and a[1] != b[1]
    hits, n = s.kv_cache_manager.get_computed_blocks(make_request(s, "C", PROMPT[:9]))
    assert ([x.block_id for x in hits], n) == (a[:2], 8)
    abort(s, "A")
    hits, _ = s.kv_cache_manager.get_computed_blocks(make_request(s, "C", PROMPT[:9]))
    assert [x.block_id for x in hits] == a[:2], "still the first, though nobody owns it"


def test_s27_blocks_are_noted_when_allocated():
    "27: two equal 10-token prompts in one step, blocks of 4: {A10,B2}, sharing blocks [1,2]."
    s = make_scheduler()
    add(s, "A", PROMPT[:10]), add(s, "B", PROMPT[:10])
    plan = step(s)
    assert plan.num_scheduled_tokens == {"A": 10, "B": 2} and [n.block_ids for n in plan.scheduled_new_reqs] == [[1, 2, 3],
                                                                                                                 [1, 2, 4]]


def test_s28_a_hit_counts_an_owner():
    "28: a hit adds 1 to ref_cnt and takes the block out of the free list; freeing one owner leaves 1."
    s = make_scheduler()
    add(s, "A", PROMPT[:9], max_tokens=1), step(s)
    assert {1, 2} <= set(free_ids(s))
    add(s, "B", PROMPT[:9]), step(s)
    add(s, "C", PROMPT[:9]), step(s)
    blocks = s.kv_cache_manager.req_to_blocks["B"]
    assert [b.block_id for b in blocks[:2]] == [1, 2] and [b.ref_cnt for b in blocks] == [2, 2, 1] and not {1,
                                                                                                            2} & set(free_ids(s))
    abort(s, "B")
    assert [b.ref_cnt for b in blocks] == [1, 1, 0]
    check_books(s)


def test_s29_freed_in_reverse():
    "29: blocks [1,2,3], pool 8: free list [4,5,6,7,3,2,1]."
    s = make_scheduler(blocks=8)
    add(s, "A", 12), step(s), abort(s, "A")
    assert free_ids(s)[-3:] == [3, 2, 1] and len(free_ids(s)) == 7
    s = make_scheduler(blocks=8)
    add(s, "A", 12, max_tokens=1), step(s)
    assert free_ids(s) == [4, 5, 6, 7, 3, 2, 1]


def test_s30_lru_and_late_forgetting():
    "30: allocation takes from the head and only then forgets that block's hash."
    s = make_scheduler(blocks=8)
    add(s, "A", PROMPT[:12], max_tokens=1), step(s)                 # free: 4 5 6 7 3 2 1
    add(s, "B", 19, max_tokens=1), step(s)                          # takes 4 5 6 7 and 3
    hits, _ = s.kv_cache_manager.get_computed_blocks(make_request(s, "C", PROMPT[:13]))
    assert [b.block_id for b in hits] == [1, 2], "the tail is gone, the head is still found"


def test_s31_only_full_blocks_and_decoded_ones_too():
    "31: a partly filled block is not cached; one completed by decoding is."
    s = make_scheduler()
    add(s, "A", PROMPT[:6], ignore_eos=True), step(s)
    noted = lambda: [b.block_hash is not None for b in s.kv_cache_manager.req_to_blocks["A"]]
    assert noted() == [True, False]
    step(s), step(s)
    assert noted() == [True, True]
    add(s, "B", PROMPT[:6] + [7, 7, 1])
    assert hit(step(s), "B") == 8


def test_s32_a_preempted_request_hits_its_own_blocks():
    "32: 12 computed, blocks of 4: it resumes with a hit of 12 if nothing was evicted, and schedules 1."
    s = make_scheduler(blocks=8)
    add(s, "A", 12, ignore_eos=True), add(s, "B", PROMPT[:12], ignore_eos=True)
    step(s)                                       # 3 + 3 of 7 blocks
    plan = step(s)                                # A takes the last one; B needs one: preempted
    assert plan.preempted_req_ids == {"B"} and s.requests["B"].num_tokens == 13
    abort(s, "A")
    plan = s.schedule()
    assert plan.scheduled_cached_reqs.num_computed_tokens == [12] and plan.num_scheduled_tokens == {"B": 1}


def test_s33_cache_salt():
    "33: the same salt hits; another or none does not."
    s = make_scheduler()
    add(s, "A", PROMPT[:9], salt="x", max_tokens=1), step(s)
    for name, salt, expected in [("B", "x", 8), ("C", "y", 0), ("D", None, 0)]:
        add(s, name, PROMPT[:9], salt=salt, max_tokens=1)
        assert hit(step(s), name) == expected


def test_s34_prompt_logprobs_skip_cache_reads():
    "34: every prompt position must be computed; what it computes is still cached for others."
    s = make_scheduler()
    add(s, "A", PROMPT[:9], max_tokens=1), step(s)
    add(s, "B", PROMPT[:9], max_tokens=1, prompt_logprobs=1)
    assert hit(step(s), "B") == 0


def test_s35_hash_chain():
    "35: parent, tokens and extra keys all count; [a,b] after [x] differs from [a,b] after [y]."
    hasher = BlockHasher(2)
    prompts = dict(x=([1, 1, 5, 6], None), y=([2, 2, 5, 6], None), s=([1, 1, 5, 6], "s"), x2=([1, 1, 5, 6, 7], None))
    chains = {name: request_of(tokens, hasher, salt).block_hashes for name, (tokens, salt) in prompts.items()}
    assert chains["x"] == chains["x2"] and len({c[1] for c in chains.values()}) == 3 and len(chains["x"][0]) == 32
    assert request_of([1, 1, 5, 6], BlockHasher(2)).block_hashes != chains["x"], "another engine, another root"


def test_s35_the_serialisation_has_no_collisions():
    "35: lists cut at other places, salts that look like tokens, and long ids stay apart."
    root = bytes(32)
    inputs = [([1, 2], ()), ([1], ()), ([258], ()), ([2, 1], ()), ([1, 2], ("a",)), ([1, 2], ("a", "")), ([1, 2], ("", "a")),
              ([1, 2], ("ab",)),
              ([1, 2], ("a", "b")), ([1 << 40, 2], ()), ([0, 0], ()), ([0], ()), ([], ()), ([1], ("\x02\0\0\0\0\0\0\0",))]
    assert len({hash_block_tokens(root, t, e) for t, e in inputs}) == len(inputs)


def test_s35_root_is_random_unless_pythonhashseed_is_set():
    "35: two processes agree only if PYTHONHASHSEED says so."
    def name(seed):
        env = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"} | ({} if seed is None else {"PYTHONHASHSEED": seed})
        code = "from litevllm.core.block_pool import BlockHasher; print(BlockHasher(4).root.hex())"
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True,
                              env=env).stdout.strip()
    assert name("0") == name("0") != name("1")
    assert len({name(None), name(None), name("0")}) == 3


def test_s36_allocate_slots_errors_and_none_without_side_effect():
    "36: 0 tokens raises; None when blocks are short, with nothing changed; free hits count against the free total."
    kv = KVCacheManager(5, 4, 256)
    hasher = BlockHasher(4)
    a = request_of(PROMPT[:8], hasher)
    with pytest.raises(ValueError, match="room for 0 tokens"): kv.allocate_slots(a, 0)
    assert [b.block_id for b in kv.allocate_slots(a, 8)] == [1, 2]
    kv.free(a)
    big = Request("big", PROMPT[:8] + [1] * 12, SamplingParams(), block_hasher=hasher)
    hits, n = kv.get_computed_blocks(big)
    state = lambda: ([b.block_id for b in kv.block_pool.free_block_queue.get_all_free_blocks()],
                     [(b.ref_cnt, b.block_hash) for b in kv.block_pool.blocks],
                     dict(kv.req_to_blocks), dict(kv.num_cached_block))
    before = state()
    assert n == 8 and kv.allocate_slots(big, 12, hits) is None and state() == before      # 2 free hits + 3 new > 4
    assert kv.allocate_slots(big, 4, hits, full_sequence_must_fit=True) is None and state() == before
    assert [b.block_id for b in kv.allocate_slots(big, 8, hits)] == [3, 4]
    assert kv.get_block_ids("big") == [1, 2, 3, 4] and kv.usage == 1.0


def test_s37_null_block_and_usage():
    "37: block 0 is never given out, freed or cached; usage = 1 - free/(n-1); the last usable block can be allocated."
    pool = BlockPool(5)
    assert pool.null_block.block_id == 0 and pool.get_usage() == 0.0
    blocks = pool.get_new_blocks(4)
    assert [b.block_id for b in blocks] == [1, 2, 3, 4] and pool.get_usage() == 1.0 and pool.get_num_free_blocks() == 0
    with pytest.raises(ValueError, match="1 blocks asked for, 0 are free"): pool.get_new_blocks(1)
    pool.free_blocks(blocks[:1])
    assert pool.get_usage() == 0.75 and pool.null_block.ref_cnt == 0


def test_s38_shared_prefix_tables():
    "38: pool 11, blocks of 16: a 55-token request gets [1,2,3,4]; one sharing 3 full blocks gets [5] new."
    s = make_scheduler(blocks=11, bs=16, budget=64)
    add(s, "A", PROMPT[:55])
    assert step(s).scheduled_new_reqs[0].block_ids == [1, 2, 3, 4]
    add(s, "B", PROMPT[:48] + [1, 2, 3])
    assert step(s).scheduled_new_reqs[0].block_ids == [1, 2, 3, 5]


def test_p2_a_replaced_block_is_never_found():
    "P2 (a): pool of 6 blocks, prompts A B C A of about 4 blocks each: every output equals SOLO."
    s = make_scheduler(blocks=6)
    engine = Engine(s)
    prompts = {c: [200 + 50 * i + k for k in range(14)] for i, c in enumerate("ABC")}
    for i, c in enumerate("ABCAAB"):
        r = add(s, f"{i}{c}", prompts[c], max_tokens=4)
        engine.drain()
        assert engine.outputs[r.request_id] == solo(r, 256)[0]
        check_books(s)


def test_p2_freeing_one_twin_keeps_the_other():
    "P2 (b): two equal last blocks; one owner leaves and its block is reused; the other's content is still found."
    s = make_scheduler(blocks=7)
    add(s, "A", PROMPT[:8], ignore_eos=True), step(s)
    add(s, "B", PROMPT[:8], ignore_eos=True), step(s)
    b = s.kv_cache_manager.get_block_ids("B")
    abort(s, "A")
    add(s, "C", 12, max_tokens=1), step(s)      # beside the block that B grows into, that is every free block
    hits, n = s.kv_cache_manager.get_computed_blocks(make_request(s, "D", PROMPT[:9]))
    assert n == 8 and [x.block_id for x in hits] == b[:2]
    check_books(s)


class DictModel:
    "The block pool again, in the plainest terms: who owns what, an order, and what each block holds since when."
    def __init__(self, n): self.free, self.owners, self.holds, self.clock = list(range(1, n)), {}, {}, 0

    def find(self, name):
        "Of the blocks that hold this, the one noted first."
        return min((since, block) for block, (content, since) in self.holds.items() if content == name)[1] if any(
            content == name for content, _ in self.holds.values()) else None

    def new(self, n):
        taken, self.free = self.free[:n], self.free[n:]
        for b in taken:
            self.owners[b] = 1
            self.holds.pop(b, None)
        return taken

    def note(self, block, name):
        self.clock += 1
        self.holds[block] = (name, self.clock)

    def touch(self, block):
        if block in self.free: self.free.remove(block)
        self.owners[block] = self.owners.get(block, 0) + 1

    def drop(self, block):
        self.owners[block] -= 1
        if self.owners[block] == 0:
            del self.owners[block]
            self.free.append(block)


@pytest.mark.parametrize("seed", range(3))
def test_p2_pool_against_a_dictionary_model(seed):
    """P2: 10,000 random allocations, hits, frees, notes, evictions and resets; after each one the pool and the model agree in
    everything."""
    print("seed", seed)
    rng, n = random.Random(seed), 12
    pool, model, held = BlockPool(n), DictModel(n), []        # held: block ids, once for each owner
    names = [bytes([i]) * 32 for i in range(6)]               # few, so that twins are common
    done = dict.fromkeys(("new", "note", "hit", "free", "evict", "reset"), 0)
    for _ in range(10_000):
        kind = rng.choice(("new", "note", "hit", "hit", "free", "free", "evict", "reset"))
        if kind == "new" and model.free:
            k = rng.randint(1, min(3, len(model.free)))
            got, want = [b.block_id for b in pool.get_new_blocks(k)], model.new(k)
            assert got == want
            held += got
        elif kind == "note" and (fresh := [b for b in set(held) if b not in model.holds]):
            block, name = rng.choice(fresh), rng.choice(names)
            pool.cache_full_blocks([pool.blocks[block]], [name])
            model.note(block, name)
        elif kind == "hit":
            name = rng.choice(names)
            got, want = pool.get_cached_block(name), model.find(name)
            assert (got and got.block_id) == want
            if want is None: continue
            pool.touch([got])
            model.touch(want)
            held.append(want)
        elif kind == "free" and held:
            ids = [held.pop(rng.randrange(len(held))) for _ in range(rng.randint(1, min(3, len(held))))]
            pool.free_blocks([pool.blocks[b] for b in ids])
            for b in ids: model.drop(b)
        elif kind == "evict" and rng.random() < .3:
            block = rng.randrange(1, n)
            pool.evict_blocks([pool.blocks[block]])
            model.holds.pop(block, None)
        elif kind == "reset" and rng.random() < .1:
            assert pool.reset_prefix_cache() == (not held)
            if not held: model.holds.clear()
        else: continue
        done[kind] += 1
        assert [b.block_id for b in pool.free_block_queue.get_all_free_blocks()] == model.free
        assert pool.get_num_free_blocks() == len(model.free)
        assert [b.ref_cnt for b in pool.blocks] == [model.owners.get(i, 0) for i in range(n)]
        assert [b.block_hash for b in pool.blocks] == [model.holds.get(i, (None,))[0] for i in range(n)]
        assert [pool.get_cached_block(x) and pool.get_cached_block(x).block_id for x in names] == [model.find(x) for x in names]
        assert len(pool.cached_block_hash_to_block) == len({c for c, _ in model.holds.values()})
    assert min(done.values()) > 50, done


def test_a_pool_needs_a_usable_block():
    "Block 0 alone is no pool."
    with pytest.raises(ValueError, match="no usable block"): BlockPool(1)
