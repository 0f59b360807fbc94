"""What choosing costs: python tests/bench/bench_sampling.py

Every row is a ratio of two things that run in turn in this process: the median,
over the rounds, of the processor time of one call of ``Sampler``, divided by
that of a decoding step of a model (6 layers, d 384, 32,000 ids, 64 to 128 ids
in its cache). A step is the model's call; choosing is not in it. The last rows
divide by what the peer takes: the logits processors of ``transformers`` and
``torch.multinomial``. One thread.

The logits are normal, times 4: at p = 0.9 a nucleus has some 300 ids at
temperature 1, and fewer below. Flatter ones cost top-p and typical more.

--quick    small sizes, one round: that everything runs, not how fast
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import timing
from tformer.inference.sampler import Sampler, SamplingParams
from tformer.models.llama import Llama, LlamaConfig
from timing import AT_MOST

WAYS = {  # settings, and whether they are to be below 5 % of a step
    "greedy": (SamplingParams(temperature=0.0), True),
    "temperature": (SamplingParams(temperature=0.8), True),
    "top-k 50": (SamplingParams(top_k=50), True),
    "top-k 50, top-p 0.9": (SamplingParams(temperature=0.8, top_k=50, top_p=0.9), True),
    "min-p 0.05": (SamplingParams(min_p=0.05), True),
    "top-p 0.9": (SamplingParams(temperature=0.8, top_p=0.9), False),
    "typical 0.9": (SamplingParams(typical_p=0.9), False),
    "top-k 50, repetition 1.2": (
        SamplingParams(top_k=50, repetition_penalty=1.2),
        True,
    ),
}


def peer_of(settings):
    "The same by transformers and torch.multinomial."
    from transformers import generation as peers

    rules = [peers.TemperatureLogitsWarper(settings.temperature)]
    if settings.top_k:
        rules.append(peers.TopKLogitsWarper(settings.top_k))
    if settings.top_p:
        rules.append(peers.TopPLogitsWarper(settings.top_p))
    chain = peers.LogitsProcessorList(rules)
    return lambda z: torch.multinomial(chain(None, z).softmax(-1), 1)


@torch.inference_mode()
def rows(b, rounds=25):
    vocab = 500 if timing.quick else 32_000
    torch.manual_seed(0)
    model = Llama(
        LlamaConfig(
            vocab_size=vocab,
            d_model=384,
            n_layers=6,
            n_heads=6,
            n_kv_heads=6,
            max_len=512,
        )
    ).eval()
    cache = model.new_cache(b)
    model(torch.randint(vocab, (b, 64)), cache=cache)
    one = torch.randint(vocab, (b, 1))
    z = 4 * torch.randn(b, vocab)
    wrote = torch.randint(vocab, (b, 128))

    def step():
        cache.crop(64)
        return model(one, cache=cache)

    work = {"step": step}
    for name, (settings, _) in WAYS.items():
        sampler = Sampler(settings)
        work[name] = lambda sampler=sampler: sampler(z, wrote)
    both = WAYS["top-k 50, top-p 0.9"][0]
    for name, settings in (("peer", both), ("peer, plain", SamplingParams())):
        work[name] = lambda peer=peer_of(settings): peer(z)
    for function in work.values():
        function()
    took = timing.in_turn(work, rounds)
    for name, (_, bound) in WAYS.items():
        timing.row(
            f"{name} / a step, batch {b}",
            took[name] / took["step"],
            (AT_MOST, 0.05) if bound else None,
            f"{1e3 * took[name]:.2f} of {1e3 * took['step']:.1f} ms",
        )
    for name, peer in (("top-k 50, top-p 0.9", "peer"), ("temperature", "peer, plain")):
        timing.row(
            f"{name} / transformers, batch {b}",
            took[name] / took[peer],
            None,
            f"{1e3 * took[peer]:.2f} ms",
        )


def main():
    timing.begin(__doc__)
    timing.head("Choosing the next id, 32,000 ids")
    for b in (1, 8):
        rows(b)


if __name__ == "__main__":
    main()
