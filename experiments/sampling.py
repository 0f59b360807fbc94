"""What does each way of sampling do to the stories: right ones, different ones?

    python experiments/sampling.py           all settings, three seeds, recorded
    python experiments/sampling.py --texts 4 --seeds 1 --out some.csv

The package's storyteller writes so many texts with each setting and seed. They
are graded by the grammar that reads the stories: `right` is the share of their
sentences that no rule fails, `whole` that of the stories. `different` is the
share of texts that no other text equals, `distinct` that of different runs of
four words among all such runs (Li et al., 2016), and `words` is the mean length.

Every method is a curve: its own number varies. All of them draw at temperature
1, but `temperature`, whose number that is, and those called `hot …`, at 1.5.

The rows go to tformer/records/sampling.csv, which travels with the package.
Rows are written as they come; a run that was stopped goes on where it was.
"""

import torch

import common
import tformer
from tformer.bundle import ENDOFTEXT, fraction_correct
from tformer.inference.logits import distinct_n
from tformer.inference.sampler import Sampler, SamplingParams

OUT = "sampling.csv"
TEXTS = 120
HOT = 1.5
METHODS = {  # for each curve what is set, to what, besides what
    "temperature": ("temperature", (0.3, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5), {}),
    "top-k": ("top_k", (2, 3, 5, 10, 20), {}),
    "top-p": ("top_p", (0.5, 0.7, 0.8, 0.9, 0.95, 0.98), {}),
    "min-p": ("min_p", (0.02, 0.05, 0.1, 0.2, 0.4), {}),
    "typical": ("typical_p", (0.5, 0.7, 0.8, 0.9, 0.95), {}),
    "repetition": ("repetition_penalty", (1.05, 1.1, 1.2, 1.4), {}),
    "hot top-k": ("top_k", (2, 3, 5, 10, 20), {"temperature": HOT}),
    "hot top-p": ("top_p", (0.5, 0.7, 0.8, 0.9, 0.95), {"temperature": HOT}),
    "hot min-p": ("min_p", (0.02, 0.05, 0.1, 0.2, 0.4), {"temperature": HOT}),
}


@torch.no_grad()
def write(trained, sampler, n):
    "So many texts, side by side, each until it ends or has no more room."
    model, tokenizer, _ = trained
    end = tokenizer.token_to_id(ENDOFTEXT)
    ids = torch.full((n, 1), end)
    cache = model.new_cache(n)
    new = ids
    while ids.shape[1] < model.max_len and not (ids[:, 1:] == end).any(1).all():
        logits = model(new, cache=cache)[:, -1]
        new = sampler(logits, ids[:, 1:])[:, None]
        ids = torch.cat([ids, new], 1)
    return [tokenizer.decode(row[1:]).split(ENDOFTEXT)[0] for row in ids.tolist()]


def measure(trained, method, value, seed, texts):
    "The further columns of a row."
    name, _, besides = METHODS[method]
    settings = SamplingParams(**{name: value}, **besides, seed=seed * texts)
    told = write(trained, Sampler(settings), texts)
    words = sum(len(text.split()) for text in told) / texts
    return {
        "right": round(fraction_correct(told), 4),
        "whole": round(fraction_correct(told, per_story=True), 4),
        "different": round(len(set(told)) / texts, 4),
        "distinct": round(distinct_n(told), 4),
        "words": round(words, 1),
    }


def main():
    made = common.parser(__doc__, OUT)
    made.add_argument("--texts", type=int, default=TEXTS)
    args = made.parse_args()
    torch.set_num_threads(1)
    trained = tformer.load("stories")
    rows = common.kept(args.out, args.again, texts=args.texts)
    done = {(r["method"], r["value"], r["seed"]) for r in rows}
    for method, (_, values, _) in METHODS.items():
        for value in values:
            for seed in range(args.seeds):
                if (method, str(value), str(seed)) in done:
                    continue
                row = {
                    "method": method,
                    "value": value,
                    "seed": seed,
                    "texts": args.texts,
                } | measure(trained, method, value, seed, args.texts)
                print(*row.values(), flush=True)
                rows.append(row | common.about())
                common.write(rows, args.out)
    order = {
        (m, str(v)): i
        for i, (m, v) in enumerate((m, v) for m in METHODS for v in METHODS[m][1])
    }
    rows.sort(key=lambda r: (order[r["method"], str(r["value"])], int(r["seed"])))
    common.write(rows, args.out)


if __name__ == "__main__":
    main()
