"""Examples of every kind, by themselves and in batches."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from tests.support.models import N_CLASSES, VOCABULARY, generator, normal

Example = dict[str, Tensor]

IMAGE_TOKEN = 3
# As many positions as examples, in a first batch of four: whatever takes one axis for
# the other passes unseen by shapes, and must show in numbers.
_LENGTHS = (4, 2, 3, 4, 3, 1)
# Tokens below have a meaning.
_FIRST_WORD = 10
_END = 2


def _words(length: int, seed: int) -> Tensor:
    draws = generator(seed)
    words = torch.randint(_FIRST_WORD, VOCABULARY, (1, length), generator=draws)
    # BART reads its class there.
    words[:, -1] = _END
    return words


def of_texts(n: int) -> list[Example]:
    return [{"input_ids": _words(_LENGTHS[i], seed=i)} for i in range(n)]


def of_numbers(n: int, key: str, shape: Sequence[int]) -> list[Example]:
    """Make examples of random numbers, another seed for each."""
    return [{key: normal(1, *shape, seed=i)} for i in range(n)]


# Red, green and blue, of 8 x 8 pixels, unless another shape is given.
of_images = partial(of_numbers, key="pixel_values", shape=(3, 8, 8))
of_spectra = partial(of_numbers, key="input_features", shape=(4, 16))
of_waves = partial(of_numbers, key="input_values", shape=(200,))


def of_images_and_prompts(n: int) -> list[Example]:
    """Make images with the texts of the classes, which all examples share."""
    prompts = [_words(4, seed) for seed in range(N_CLASSES)]
    classes = {"input_ids": torch.cat(prompts)}
    return [image | classes for image in of_images(n)]


def of_images_in_texts(n: int) -> list[Example]:
    """Make texts with one image each at first, of four tokens; then two and none."""
    n_images_of = (1, 1, 1, 1, 2, 0)
    examples = []
    for i in range(n):
        n_images = n_images_of[i]
        parts = [_repeated(IMAGE_TOKEN, 4 * n_images), _words(_LENGTHS[i], seed=i)]
        example = {"input_ids": torch.cat(parts, dim=1)}
        if n_images:
            example["pixel_values"] = normal(n_images, 3, 8, 8, seed=i)
        examples.append(example)
    return examples


def of_patches_in_texts(n: int) -> list[Example]:
    """Make images of 4 x 4 or 4 x 8 patches, four of which make a token."""
    examples = []
    for i in range(n):
        width = 4 if i % 2 else 8
        image = [_repeated(5), _repeated(IMAGE_TOKEN, width), _repeated(6)]
        example = {
            "input_ids": torch.cat([*image, _words(_LENGTHS[i], seed=i)], dim=1),
            "pixel_values": normal(4 * width, 12, seed=i),
            # Times, rows and columns.
            "image_grid_thw": torch.tensor([[1, 4, width]]),
        }
        examples.append(example)
    return examples


def _repeated(token: int, length: int = 1) -> Tensor:
    return torch.full((1, length), token)


def together(examples: Sequence[Example], side: str) -> Example:
    """Make a batch of texts, padded on a side."""

    def padded(part: Tensor) -> Tensor:
        n_padded = length - part.shape[1]
        # Before each row, or behind it.
        return pad(part, (n_padded, 0) if side == "left" else (0, n_padded))

    batch = {}
    for key in {key: None for example in examples for key in example}:
        # Not all examples have images.
        parts = [example[key] for example in examples if key in example]
        if key != "input_ids":
            batch[key] = torch.cat(parts)
        elif len(parts[0]) > 1:
            # Texts that are classes, alike in all examples.
            batch[key] = parts[0]
        else:
            length = max(part.shape[1] for part in parts)
            batch[key] = torch.cat([padded(part) for part in parts])
            masks = [padded(torch.ones_like(part)) for part in parts]
            batch["attention_mask"] = torch.cat(masks)
    return batch
