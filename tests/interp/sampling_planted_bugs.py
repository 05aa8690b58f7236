"""Bugs for the sampling kernels, and the checks that must notice. Run by tests/test_kernels_interp.py with TRITON_INTERPRET=1."""
import pytest
import sampling_checks as checks
import torch
from planting import plant
from sampling_checks import kept, kept_by_torch, metadata_of

BUGS = [  # what is wrong then, the line as it is, the line with the bug, the check that must notice
    ("the hash loses a fold", "    x ^= x >> 15\n    x *= 0x846CA68B", "    x *= 0x846CA68B", "noise"),
    ("both halves of the key are one", "tl.load(keys_ptr + 2 * row + 1)", "tl.load(keys_ptr + 2 * row)", "small"),
    ("small noise is rounded", "tl.where(u < 0.25, near,", "tl.where(u < -1.0, near,", "noise"),
    ("negative keys run backwards", "return bits ^ ((bits >> 31) & 0x7FFFFFFF)", "return bits", "normal, top_p"),
    ("the temperature divides nothing", "return ids, tl.div_rn(x, temperature)", "return ids, x", "small"),
    ("the row ends too late",
     "mask=ids < vocab_size, other=float(\"-inf\"))\n    return", "mask=ids < vocab_size + 8, other=float(\"-inf\"))\n    return", "small"),
    ("the goal is put too high", "reached = mass >= goal\n", "reached = mass >= goal * 1.05\n", "normal, top_p"),
    ("a goal met in registers is not seen", ", w, 0.0), 0) >= goal", ", w, 0.0), 0) > goal", "small"),
    ("the weight above the bracket is forgotten", "reached = above + tl.sum", "reached = tl.sum", "normal, top_p"),
    ("the upper end is not moved", "high = tl.where(reached, high, tl.minimum(high, key))", "high = high", "normal, top_p"),
    ("gathered values overwrite each other", "place = taken + tl.cumsum(", "place = tl.cumsum(", "all"),
    ("more are gathered than fit", "mask=candidate & (place < CAP)", "mask=candidate", "equal, top_p"),
    ("the buffer's rest is read", "mask=tl.arange(0, CAP) < taken, other", "mask=tl.arange(0, CAP) >= 0, other", "small"),
    ("equals are not counted when they are many", "tl.where(taken > CAP, taken,", "tl.where(taken > CAP * 4, taken,", "equal, top_p"),
    ("top_k drops its ties", "(score == cut) & (ids >= tie)", "(score == cut) & (ids >= 0)", "few, top_k"),
    ("top_p keeps all ties", "if ties > places:", "if ties > places * 1e9:", "few, top_p"),
    ("ties have one place too many", "(rank <= places)", "(rank <= places + 1)", "few, top_p"),
    ("equals of the blocks before are forgotten", "rank = seen + tl.cumsum", "rank = tl.cumsum", "few, top_p"),
    ("top_p looks at what top_k dropped", "weights += tl.where(x >= cut, tl.exp(x - top), 0.0)", "weights += tl.exp(x - top)", "all"),
    ("top_k forgets min_p", "cut = tl.maximum(cut, kth)", "cut = kth", "small"),
    ("k past the vocabulary acts", "limited = (top_k > 0) & (top_k < vocab_size)", "limited = top_k > 0", "fewer"),
    ("NaN never wins", "score = tl.where(score != score, float(\"inf\"), score)", "score = tl.where(score != score, float(\"-inf\"), score)", "broken"),
    ("nothing left passes for broken", "tl.where(x == float(\"-inf\"), 1,", "tl.where(x == float(\"-inf\"), 2,", "broken"),
    ("overflow is not seen", "x = tl.div_rn(x, tl.where(temperature > 0, temperature, 1.0))", "x = x", "overflow"),
    ("greedy rows get noise",
     "        if temperature > 0:\n            score = tl.div_rn", "        if temperature >= 0:\n            score = tl.div_rn", "small"),
    ("blocks are not told apart", "tl.store(winner_ptr + at, block * BLOCK + place)", "tl.store(winner_ptr + at, place)", "all"),
    ("row offsets in 32 bits",
     "    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)\n",
     "    row, block = tl.program_id(0).to(tl.int32), tl.program_id(1)\n    logits_stride = logits_stride.to(tl.int32)\n", "far rows"),
    ("the position's own token counts",
     "mask=at < end, other=0)\n    return r, logits_row, at < end,", "mask=at <= end, other=0)\n    return r, logits_row, at <= end,", "processors"),
    ("the prompt counts as output", "return r, logits_row, at < end, at < prompt_len, token", "return r, logits_row, at < end, at < 0, token", "processors"),
    ("every occurrence changes the logit", "mine = live & (count != 0)", "mine = live", "processors"),
    ("negative logits are divided", "tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)", "tl.div_rn(x, repetition)", "processors"),
    ("presence counts for the prompt", "tl.where(times > 0, presence, 0.0)", "presence", "processors"),
    ("the first piece only", "at = start + tl.program_id(1) * BLOCK +", "at = start +", "processors"),
    ("a prompt may begin a bad word", "if begin >= prompt_len:", "if begin >= 0:", "processors"),
    ("a bad word's first token is enough",
     "if tl.sum((wanted != said).to(tl.int32), 0) == 0:", "if tl.sum(((wanted != said) & (i < 1)).to(tl.int32), 0) == 0:", "processors"),
    ("bad words look one place off", "begin = position - (length - 1) ", "begin = position - length ", "processors"),
    ("bans are plain stores", "tl.atomic_xchg(logit_ptr, MINUS_INF, sem=\"relaxed\")", "tl.store(logit_ptr, MINUS_INF)", "processors"),
]


def case(*args): return lambda module, patch: checks.test_the_same_tokens_are_kept_and_the_same_one_wins(*args)


def fewer(module, patch):
    "Fewer tokens than k: those that are banned must not come back, nor k act as the rest's size"
    logits, metadata = torch.tensor([[3., 3., 2., 1.]]), metadata_of(1, top_k=[4], top_p=[.5])
    assert torch.equal(kept(logits, metadata), kept_by_torch(logits, metadata))
    with checks.tools.metered() as meter: module.find_cuts(torch.zeros(1, 5000), metadata_of(1, top_k=[2**31 - 1]))
    assert meter["loaded"] < 100, "top_k is off: the row need not be read"


CHECKS = {"all": case(5003, "rounded to bfloat16", "all"), "small": case(1500, "normal", "all"), "few, top_k": case(5003, "few values", "top_k"),
          "few, top_p": case(5003, "few values", "top_p"), "equal, top_p": case(5003, "all equal", "top_p"), "normal, top_p": case(5003, "normal", "top_p"),
          "fewer": fewer, "noise": lambda module, patch: checks.test_noise_is_that_of_the_sampler(),
          "broken": lambda module, patch: [checks.test_rows_without_a_winner(filters) for filters in ("nothing", "all")],
          "overflow": lambda module, patch: checks.test_a_tempered_logit_that_overflows_is_seen(),
          "far rows": lambda module, patch: checks.test_rows_beyond_two_to_the_31_elements(),
          "processors": lambda module, patch: [checks.test_processors_change_the_same_logits_to_the_same_bits(seed, vocab, patch)
                        for seed, vocab in ((0, 5), (1, 40))]}


def run(module, name):
    "One check with this module in place of the kernels; raises if it fails"
    sound, checks.K = checks.K, module
    try:
        with pytest.MonkeyPatch.context() as patch: CHECKS[name](module, patch)
    finally: checks.K = sound


test_as_they_are, test_planted = plant(("sampling",), BUGS, run)
