"""Greedy parity with transformers: the one comparison that all parity tests use."""
import torch

NEAR_TIE = 1e-4   # below this top-2 logit gap, float32 rounding may pick either token


def hf_greedy(model, prompt, n):
    "`n` greedy token ids that transformers' `generate` gives after `prompt` (a list of ids)."
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=n, min_new_tokens=n,
                         eos_token_id=None, pad_token_id=0)
    return out[0, len(prompt):].tolist()


@torch.inference_mode()
def count_skips(model, prompt, ours, n):
    """Assert that `ours` is transformers' greedy continuation of `prompt`; return how many steps were near ties.

    Every step must be the argmax of transformers' logits after the same prefix, as in `generate`, but for steps whose two
    best logits lie closer than NEAR_TIE. One run of the model over all of `ours` tells."""
    assert len(ours) == n, (len(ours), n)
    logits = model(torch.tensor([prompt + ours[:-1]])).logits[0, len(prompt) - 1:].float()
    top = logits.topk(2, dim=-1)
    skips = 0
    for i, (token, ids, values) in enumerate(zip(ours, top.indices.tolist(), top.values.tolist())):
        if token == ids[0]: continue
        gap = values[0] - values[1]
        assert gap < NEAR_TIE and token == ids[1], f"step {i}: ours {token}, transformers {ids[0]}, top-2 gap {gap:.3g}\n{ours}"
        skips += 1
    return skips
