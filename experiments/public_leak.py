"""A leak that a library shipped for four months, seen by `check.causal`.

    python experiments/public_leak.py             one row for each model
    python experiments/public_leak.py --out some.csv

From version 5.9.0 to 5.17.0, four decoders of `transformers` had no causal mask
(huggingface/transformers#48745, September 2026). This script builds small random models
of these four architectures, and of two that were right, and runs `check.causal` on
each with its default settings. It judges the version of `transformers` that Python
finds, so the record has been made by two runs, one of them with

    pip install --target older transformers==5.17.0
    PYTHONPATH=older python experiments/public_leak.py

The rows go to tformer/records/public_leak.csv, which travels with the package:
`found` says whether the check failed, and `module` is the first module that, as it
says, sees the future.
"""

import re

import torch
import transformers

import common
from tformer import check

VOCAB_SIZE = 99
SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "is_decoder": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# the class of each model, and what its configuration needs besides
LEAKED = {
    "RoFormerForCausalLM": {"embedding_size": 32},
    "MegatronBertForCausalLM": {},
    "RemBertForCausalLM": {"input_embedding_size": 32, "output_embedding_size": 32},
    "BigBirdForCausalLM": {"attention_type": "original_full"},
}
SOUND = {
    "BertLMHeadModel": {},
    "ElectraForCausalLM": {"embedding_size": 32},
}


def judge(name, options):
    "What `check.causal` says of a small random model of a class."
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**SMALL, **options)).eval()
    try:
        check.causal(model, vocab_size=VOCAB_SIZE)
    except check.CheckFailed as failed:
        where = re.search(r"where\s+(\S+) is the first module", str(failed))
        return {"found": True, "module": where[1] if where else ""}
    return {"found": False, "module": ""}


def main():
    args = common.parser(__doc__, "public_leak.csv", seeds=None).parse_args()
    version = transformers.__version__
    rows = common.kept(args.out)
    for name, options in (LEAKED | SOUND).items():
        key = {"transformers": version, "model": name}
        known = [row for row in rows if row.items() >= key.items()]
        if known and not args.again:
            continue
        rows = [row for row in rows if row not in known]
        rows.append({**key, **judge(name, options), **common.about()})
        print(*rows[-1].values(), flush=True)
        common.write(rows, args.out)


if __name__ == "__main__":
    main()
