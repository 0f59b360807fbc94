"""What beams cost: python tests/bench/bench_beam.py

Every row is a ratio of two things that run in turn in this process, the median
over the rounds of their processor time: a search of 32 new ids for 4 prompts of
16 (Llama, 4 layers, d 256, 8,000 ids), without an end. The first rows divide by
a greedy text of the same length, the others by ``transformers`` with the same
weights, as many beams and its own cache. One thread.

--quick    small sizes, one round: that everything runs, not how fast
"""

import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import timing
from tformer.inference.beam import beam_search
from tformer.inference.generation import generate
from tformer.models.llama import Llama, LlamaConfig
from timing import AT_MOST

PROMPTS = 4


def models(vocab, d):
    "Ours and theirs, of one size."
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers
    torch.manual_seed(0)
    ours = Llama(
        LlamaConfig(
            vocab_size=vocab,
            d_model=d,
            n_layers=4,
            n_heads=4,
            n_kv_heads=4,
            d_ff=2 * d,
            max_len=128,
        )
    ).eval()
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=vocab,
            hidden_size=d,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=2 * d,
            max_position_embeddings=128,
            eos_token_id=None,
            bos_token_id=None,
            pad_token_id=0,
        )
    ).eval()
    return ours, theirs


@torch.inference_mode()
def rows(rounds=7):
    vocab, d, n = (100, 32, 4) if timing.quick else (8000, 256, 32)
    ours, theirs = models(vocab, d)
    ids = torch.randint(1, vocab, (PROMPTS, 16))
    work = {"greedy": lambda: generate(ours, ids, max_new_tokens=n)}
    widths = (1, 4, 16)
    for w in widths:
        work[f"{w} beams"] = lambda w=w: beam_search(
            ours, ids, num_beams=w, max_new_tokens=n
        )
        work[f"theirs, {w}"] = lambda w=w: theirs.generate(
            ids,
            num_beams=w,
            max_new_tokens=n,
            do_sample=False,
            attention_mask=torch.ones_like(ids),
        )
    for function in work.values():
        function()
    took = timing.in_turn(work, rounds)
    for w in widths:
        timing.row(
            f"{w} beams / greedy",
            took[f"{w} beams"] / took["greedy"],
            (AT_MOST, 1.5 * w),
            f"{1e3 * took[f'{w} beams']:.0f} ms",
        )
    for w in widths[1:]:
        timing.row(
            f"{w} beams / transformers",
            took[f"{w} beams"] / took[f"theirs, {w}"],
            (AT_MOST, 1.0),
            f"{1e3 * took[f'theirs, {w}']:.0f} ms",
        )


def main():
    timing.begin(__doc__)
    timing.head("Beam search, 4 prompts, 32 new ids")
    rows()


if __name__ == "__main__":
    main()
