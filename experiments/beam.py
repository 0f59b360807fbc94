"""What a wider beam does to translations: of a good model, and of weak ones.

    python experiments/beam.py                        in half an hour
    python experiments/beam.py --sentences 4 --steps 5 --seeds 1 --out some.csv

The package's translator, and small ones that were trained for 400 steps only,
translate sentences with combinations that none of them has read, with every
width and exponent of the length. `ratio` is the number of words written over
that of the right translations, `empty` the share of translations without a
word, `log_prob` the mean sum of what was found, and `above` the share of
sentences for which that is more than the model gives the right translation:
there it is the model that errs, not the search. Seconds are of the processor.
Rows of `risk` choose, instead, among so many draws (min-p 0.05) the one that
shares most words with all of them on average; they have no `log_prob`.

Rows are written as they come; a run that was stopped goes on where it was.
"""

import math
from functools import lru_cache, partial

import torch
from torch.nn.utils.rnn import pad_sequence

import common
import tformer
from tformer.corpora import bilingual
from tformer.inference.beam import (
    BeamHypothesis,
    beam_search,
    select_minimum_bayes_risk,
)
from tformer.inference.generation import generate
from tformer.inference.sampler import SamplingParams
from tformer.models.seq2seq import PreNormSeq2Seq, Seq2SeqConfig
from tformer.tasks.translation import (
    TRANSLATION_SPECIAL_TOKENS,
    PairLoader,
    TranslationTokenizer,
    bleu_and_chrf,
    exact_match_by_phenomenon,
    translation_loss,
)
from tformer.text.tokenizer import Tokenizer
from tformer.training.optimizers import AdamW
from tformer.training.schedules import inverse_sqrt
from tformer.training.trainer import LossMonitor, Trainer

WIDTHS = (1, 2, 4, 8, 16, 64)
ALPHAS = (0.0, 0.6, 1.0)
SENTENCES = 100
STEPS = 400
READ = 20_000
PIECES = 1200
SHAPE = dict(d_model=64, n_layers=2, n_heads=4, d_ff=256, max_len=64, dropout=0.0)
GOOD = "translator"
WEAK = "weak"
DRAWS = 32


@lru_cache(1)
def trained(model, seed, steps):
    "A model and its tokenizer: the package's, or one that read little."
    if model == GOOD:
        found = tformer.load(GOOD)
        return found.model, TranslationTokenizer.wrap(found.tokenizer)
    read = bilingual.generate_pairs(READ if steps >= STEPS else 500, seed)
    texts = [text for pair in read[:10_000] for text in pair[:2]]
    sides = TranslationTokenizer.wrap(
        Tokenizer.train(texts, PIECES, special_tokens=TRANSLATION_SPECIAL_TOKENS)
    )
    torch.manual_seed(seed)
    made = PreNormSeq2Seq(Seq2SeqConfig(vocab_size=len(sides), **SHAPE))
    Trainer(
        made,
        PairLoader(read, sides, 48, seed=seed),
        max_steps=steps,
        loss_fn=partial(translation_loss, label_smoothing=0.1),
        optimizer=AdamW(
            made.parameters(), lr=4e-3, betas=(0.9, 0.98), eps=1e-9, weight_decay=0.0
        ),
        lr_schedule=inverse_sqrt(100),
        loss_monitor=LossMonitor(None),
    ).fit()
    return made.eval(), sides


@torch.no_grad()
def read(model, sides, texts):
    "What the decoder is given of some sentences."
    rows = [torch.tensor(row) for row in sides.encode_sources(texts)]
    src = pad_sequence(rows, batch_first=True, padding_value=-1)
    memory = model.encode(src.where(src >= 0, sides.pad_token_id), src >= 0)
    return {"encoder_hidden_states": memory, "encoder_attention_mask": src >= 0}


def search(model, sides, texts, *, width, alpha, room, batch=50):
    "The best beam of each sentence."
    found = []
    for at in range(0, len(texts), batch):
        some = texts[at : at + batch]
        found += beam_search(
            model,
            [[sides.decoder_start_token_id]] * len(some),
            num_beams=width,
            length_penalty=alpha,
            max_new_tokens=room,
            stop_token_ids=sides.eos_token_id,
            **read(model, sides, some),
        )
    return [best for (best,) in found]


def shared(a, b):
    "F1 of the words of two texts."
    a = a.split()
    b = b.split()
    both = sum(min(a.count(word), b.count(word)) for word in {*a})
    return 2 * both / max(len(a) + len(b), 1)


def by_risk(model, sides, texts, *, width, alpha, room):
    "For each sentence, of ``width`` draws the one most like all of them."
    found = []
    for i, text in enumerate(texts):
        given = {
            name: x.expand(width, *x.shape[1:])
            for name, x in read(model, sides, [text]).items()
        }
        some = generate(
            model,
            [[sides.decoder_start_token_id]] * width,
            max_new_tokens=room,
            stop_token_ids=sides.eos_token_id,
            sampling_params=SamplingParams(min_p=0.05, seed=width * i),
            **given,
        )
        wrote = [sides.decode_target(t.ids) for t in some]
        best = some[wrote.index(select_minimum_bayes_risk(wrote, shared))]
        found.append(BeamHypothesis(best.ids, math.nan, math.nan, best.finish_reason))
    return found


WAYS = {"beam": search, "risk": by_risk}


@lru_cache(1)
@torch.no_grad()
def right_sums(model, seed, steps, sentences):
    "The log-probability of each right translation."
    net, sides = trained(model, seed, steps)
    pairs = bilingual.generate_pairs(sentences, 100, held_out_only=True)
    rows = PairLoader(pairs, sides, max_len=net.max_len)
    found = []
    for i in range(len(pairs)):
        batch = rows.make_batch([i])
        loss = translation_loss(net, batch, label_smoothing=0)
        found.append(-loss.item() * batch.num_targets)
    return found


def measure(*, way, model, seed, steps, sentences, width, alpha):
    "The further columns of a row."
    net, sides = trained(model, seed, steps)
    new = bilingual.generate_pairs(sentences, 100, held_out_only=True)
    with common.Stopwatch() as watch:
        best = WAYS[way](
            net, sides, [pair.source for pair in new], width=width, alpha=alpha, room=60
        )
    wrote = [sides.decode_target(beam.ids) for beam in best]
    words = [
        sum(len(text.split()) for text in texts)
        for texts in (wrote, [pair.target for pair in new])
    ]
    right = right_sums(model, seed, steps, sentences)
    n = len(new)
    return {
        "exact": round(exact_match_by_phenomenon(wrote, new)["all"].accuracy, 4),
        "bleu": round(bleu_and_chrf(wrote, [p.target for p in new]).bleu, 2),
        "ratio": round(words[0] / words[1], 4),
        "empty": round(sum(not text for text in wrote) / n, 4),
        "log_prob": round(sum(beam.log_prob for beam in best) / n, 4),
        "above": round(
            sum(
                beam.log_prob > sum_ + 1e-4
                for beam, sum_ in zip(best, right, strict=True)
            )
            / n,
            4,
        ),
        "seconds": round(watch.seconds, 2),
    }


def main():
    made = common.parser(__doc__, "beam.csv")
    made.add_argument("--steps", type=int, default=STEPS)
    made.add_argument("--sentences", type=int, default=SENTENCES)
    made.add_argument("--widths", type=int, nargs="*", default=WIDTHS)
    args = made.parse_args()
    torch.set_num_threads(1)
    models = [(GOOD, 0), *((WEAK, seed) for seed in range(args.seeds))]
    rows = common.kept(args.out, args.again, sentences=args.sentences, steps=args.steps)
    ways = [("beam", w, alpha) for w in args.widths for alpha in ALPHAS]
    for model, seed in models:
        for way, width, alpha in [*ways, ("risk", DRAWS, 0.0)]:
            what = {
                "way": way,
                "model": model,
                "seed": seed,
                "steps": args.steps,
                "sentences": args.sentences,
                "width": width,
                "alpha": alpha,
            }
            if any(all(row[k] == str(x) for k, x in what.items()) for row in rows):
                continue
            row = what | measure(**what)
            print(*row.values(), flush=True)
            rows.append({k: str(x) for k, x in row.items()} | common.about())
            common.write(rows, args.out)


if __name__ == "__main__":
    main()
