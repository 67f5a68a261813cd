"""Pairs of responses for tests of reward models."""

import torch

from burnish.model.reward import RewardModel
from burnish.recipe.tasks import PreferencesTask
from burnish.tasks.pairs import check_preference, write_pair
from tests.engine import tiny as small

ROWS = [
    {"prompt": f"Say {n}", "chosen": "a" * (n + 1), "rejected": "b" * (1 + n % 3)}
    for n in range(12)
]


def groups(rows=ROWS, *, context=90, together=None):
    config, tokenizer = PreferencesTask(chat=False), small.tokenizer()
    checked = [check_preference(row, f"row {i}") for i, row in enumerate(rows)]
    return [write_pair(row, config, tokenizer, context, together) for row in checked]


def make_model(dtype=torch.float64, seed=1, pad=None):
    model = RewardModel(small.model(seed).cpu(), pad).to(dtype)
    model.weight.data.normal_(generator=torch.Generator().manual_seed(seed))
    return model


def one_by_one(model, rows):
    """The reward of each text, alone and unpacked, read at its last token."""
    found = []
    for group in rows:
        for completion in group.completions:
            ids = torch.tensor([*group.prompt.token_ids, *completion.token_ids], dtype=torch.long)
            places = torch.arange(len(ids))
            hidden = model.body(ids, places, small.causal([len(ids)], ids.device))
            is_text = ids != (-1 if model.pad is None else model.pad)
            found.append(hidden[is_text.nonzero().max()] @ model.weight[0])
    return torch.stack(found)
