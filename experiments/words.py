"""Five pairs of sentences and vocabularies of 18 words: what each correction mends.

    python experiments/words.py                    four seeds, a minute
    python experiments/words.py --seeds 1 --steps 2 --out some.csv

The program that chapter 18 takes from another document learns five pairs of sentences
with `nn.Transformer`. It is trained as it stands, with padding masks alone, with the
causal mask alone, and with all masks, each time for ten epochs (`steps`) of batches of
2, 2 and 1 pairs.

A row of tformer/records/words.csv is one training. It holds the mean loss of each epoch
(`losses`), the loss without dropout and with the future hidden (`future_hidden`), and
which of the five sentences the model writes (1) or misses (0), if embeddings are
multiplied by 1 when it writes (`right_1`) and by the root of their width, 16, as in the
training (`right_16`).
"""

import torch
from torch import nn

from common import arguments, run
from tformer.nn.embedding import sinusoids

EPOCHS = 10
WIDTH = 256
LONGEST = 9  # words
PAIRS = [
    ("I am a student", "Je suis un étudiant"),
    ("He is a teacher", "Il est un enseignant"),
    ("She is a nurse", "Elle est une infirmière"),
    ("I love you", "Je t'aime"),
    ("How are you?", "Comment ça va?"),
]
MARKS = "<unk> <pad> <bos> <eos>"
PAD = 1
START = 2
END = 3


def number_words(texts):
    words = " ".join([MARKS, *texts]).split()
    return {word: i for i, word in enumerate(dict.fromkeys(words))}


ENGLISH, FRENCH = (number_words(side) for side in zip(*PAIRS, strict=True))


def as_ids(text, words):
    return [START, *(words[word] for word in text.split()), END]


def in_columns(pairs):
    "Source and target ids, a column for each pair."
    both = zip(zip(*pairs, strict=True), (ENGLISH, FRENCH), strict=True)
    return [
        nn.utils.rnn.pad_sequence(
            [torch.tensor(as_ids(text, words)) for text in side], padding_value=PAD
        )
        for side, words in both
    ]


COLUMNS = [in_columns(PAIRS[i : i + 2]) for i in (0, 2, 4)]


class WordTranslator(nn.Module):
    def __init__(self):
        super().__init__()
        self.source = nn.Embedding(len(ENGLISH), WIDTH)
        self.target = nn.Embedding(len(FRENCH), WIDTH)
        self.stacks = nn.Transformer(WIDTH, 8, 3, 3, 512, dropout=0.1)
        self.output = nn.Linear(WIDTH, len(FRENCH))

    def enter(self, table, ids, factor=WIDTH**0.5):
        place = sinusoids(torch.arange(len(ids)), WIDTH)[:, None]
        return factor * table(ids) + place

    def forward(self, src, ids, **masks):
        return self.output(
            self.stacks(
                self.enter(self.source, src), self.enter(self.target, ids), **masks
            )
        )


def later(ids):
    return {"tgt_mask": torch.ones(len(ids), len(ids)).triu(1).bool()}


def pads(src, ids):
    return {
        "src_key_padding_mask": (src == PAD).T,
        "memory_key_padding_mask": (src == PAD).T,
        "tgt_key_padding_mask": (ids == PAD).T,
    }


WAYS = {
    "as it stands": lambda src, ids: {},
    "padding masks": pads,
    "causal mask": lambda src, ids: later(ids),
    "all masks": lambda src, ids: later(ids) | pads(src, ids),
}


def words_loss(model, batch, masks):
    src, said = batch
    logits = model(src, said[:-1], **masks(src, said[:-1]))
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), said[1:].flatten(), ignore_index=PAD
    )


@torch.no_grad()
def write(model, text, factor):
    "The likeliest word, one after another."
    src = torch.tensor(as_ids(text, ENGLISH))[:, None]
    memory = model.stacks.encoder(model.enter(model.source, src, factor))
    ids = torch.tensor([[START]])
    while ids[-1] != END and len(ids) <= LONGEST:
        x = model.stacks.decoder(
            model.enter(model.target, ids, factor), memory, **later(ids)
        )
        ids = torch.cat([ids, model.output(x[-1:]).argmax(-1)])
    return " ".join([*FRENCH][i] for i in ids[1:, 0] if i != END)


def train(masks, seed, steps):
    "The columns of one row."
    given = WAYS[masks]
    torch.manual_seed(seed)
    model = WordTranslator()
    adam = torch.optim.Adam(model.parameters(), 5e-4, fused=True)
    epochs = []
    for _ in range(steps):
        losses = []
        for batch in COLUMNS:
            losses.append(words_loss(model, batch, given))
            adam.zero_grad()
            losses[-1].backward()
            adam.step()
        epochs.append(sum(losses).item() / len(losses))
    model.eval()

    def hidden(src, ids):
        return given(src, ids) | later(ids)

    with torch.no_grad():
        losses = [words_loss(model, batch, hidden).item() for batch in COLUMNS]
    right = {
        f"right_{factor}": " ".join(
            str(int(write(model, source, factor) == target)) for source, target in PAIRS
        )
        for factor in (1, 16)
    }
    return {
        "losses": " ".join(f"{loss:.4f}" for loss in epochs),
        "future_hidden": round(sum(losses) / len(losses), 4),
    } | right


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(
        [{"masks": way} for way in WAYS],
        train,
        arguments(__doc__, EPOCHS, "words.csv", seeds=4),
    )
