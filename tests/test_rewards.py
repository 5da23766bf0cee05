"""Rewards for TRL's trainers: texts or chats in, lower bounds out."""

from __future__ import annotations

import torch

from laplace_lora_ext.rewards import reward_function
from tests.support.models import VOCABULARY, lora_model, ragged_batches
from tests.support.posteriors import make


class Tokenizer:
    """A letter is a token; chats are joined by newlines."""

    def __call__(self, texts, padding, return_tensors, **options):
        assert (padding, return_tensors, options) == (True, "pt", {"truncation": True})
        length = max(map(len, texts))
        ids = [[1 + ord(letter) % (VOCABULARY - 1) for letter in text] for text in texts]
        return {
            "input_ids": torch.tensor([row + [0] * (length - len(row)) for row in ids]),
            "attention_mask": torch.tensor([[1] * len(r) + [0] * (length - len(r)) for r in ids]),
        }

    def apply_chat_template(self, messages, tokenize):
        assert not tokenize
        return "".join(message["content"] for message in messages)


def test_rewards_are_lower_bounds_of_texts_and_of_chats():
    la = make(lora_model("bert", n_labels=1), likelihood="reward_modeling")
    (batch,) = ragged_batches(batch_size=8)
    pairs = {k: batch[k].unflatten(0, (4, 2)) for k in ("input_ids", "attention_mask")}
    la.fit([pairs | {"labels": torch.tensor([0, 1, 1, 0])}])
    tokenizer = Tokenizer()
    rewards = reward_function(la, tokenizer, k=2.0, truncation=True)
    found = rewards(prompts=["why", "ab"], completions=["not", "c"], other_column=[1, 2])
    texts = tokenizer(["whynot", "abc"], padding=True, return_tensors="pt", truncation=True)
    mean, variance = la(texts)
    expected = (mean - 2 * variance[..., 0].sqrt())[:, 0]
    torch.testing.assert_close(torch.tensor(found).double(), expected)
    assert (expected < mean[:, 0]).all()
    chats = [
        [[{"role": "user", "content": text}] for text in part]
        for part in (("why", "ab"), ("not", "c"))
    ]
    assert rewards(*chats) == found
