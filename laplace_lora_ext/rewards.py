"""Rewards for reinforcement learning: low where the reward model knows little."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from laplace_lora_ext.lora_laplace import LoRALaplace


def reward_function(
    la: LoRALaplace, tokenizer: Any, k: float = 1.0, **tokenizer_options: Any
) -> Callable[..., list[float]]:
    """A lower bound of the reward, to pass to TRL's trainers among their `reward_funcs`.

    Parameters
    ----------
    la : LoRALaplace
        with the likelihood "reward_modeling"
    tokenizer : PreTrainedTokenizerBase
        the reward model's
    k : float, default=1.0
        how many standard deviations below the mean
    **tokenizer_options
        such as `truncation` and `max_length`

    Returns
    -------
    callable
        takes `(prompts, completions, **columns)`, both lists of texts or of chat messages, and
        returns a list of numbers
    """

    def lower_bound_of_reward(prompts: list, completions: list, **_: Any) -> list[float]:
        texts = [
            prompt + completion
            if isinstance(prompt, str)
            else tokenizer.apply_chat_template(prompt + completion, tokenize=False)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        batch = tokenizer(texts, padding=True, return_tensors="pt", **tokenizer_options)
        with torch.no_grad():
            return la.lower_bound(batch, k)[:, 0].tolist()

    return lower_bound_of_reward
