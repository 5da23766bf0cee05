"""Examples of every kind, by themselves and in batches."""

from collections.abc import Sequence

import torch

from tests.support.models import N_CLASSES, VOCABULARY

Example = dict[str, torch.Tensor]

IMAGE_TOKEN = 3
# As many positions as examples, in a first batch of four.
_LENGTHS = (4, 2, 3, 4, 3, 1)
# Tokens below have a meaning.
_FIRST_WORD = 10
_END = 2


def _random(
    *shape: int,
    seed: int,
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _words(
    length: int,
    seed: int,
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(
        _FIRST_WORD,
        VOCABULARY,
        (1, length),
        generator=generator,
    )
    # BART reads its class there.
    words[:, -1] = _END
    return words


def of_texts(n: int) -> list[Example]:
    examples = []
    for i in range(n):
        words = _words(_LENGTHS[i], seed=i)
        examples.append({"input_ids": words})
    return examples


def of_images(
    n: int,
    *shape: int,
) -> list[Example]:
    return _of_numbers("pixel_values", n, shape or (3, 8, 8))


def of_spectra(n: int) -> list[Example]:
    return _of_numbers("input_features", n, (4, 16))


def of_waves(n: int) -> list[Example]:
    return _of_numbers("input_values", n, (200,))


def _of_numbers(
    key: str,
    n: int,
    shape: Sequence[int],
) -> list[Example]:
    """Make examples of random numbers, another seed for each."""
    examples = []
    for i in range(n):
        numbers = _random(1, *shape, seed=i)
        examples.append({key: numbers})
    return examples


def of_images_and_prompts(n: int) -> list[Example]:
    """Make images with the texts of the classes, which all examples share."""
    prompts = torch.cat([_words(4, seed) for seed in range(N_CLASSES)])
    return [image | {"input_ids": prompts} for image in of_images(n)]


def of_images_in_texts(n: int) -> list[Example]:
    """Make texts with one image each at first, of four tokens; then two and none."""
    examples = []
    for i, n_images in enumerate((1, 1, 1, 1, 2, 0)[:n]):
        placeholders = torch.full((1, 4 * n_images), IMAGE_TOKEN)
        words = _words(_LENGTHS[i], i)
        example = {"input_ids": torch.cat([placeholders, words], dim=1)}
        if n_images:
            example["pixel_values"] = _random(n_images, 3, 8, 8, seed=i)
        examples.append(example)
    return examples


def of_patches_in_texts(n: int) -> list[Example]:
    """Make images of 4 x 4 or 4 x 8 patches, four of which make a token."""
    start = torch.full((1, 1), 5)
    end = torch.full((1, 1), 6)
    examples = []
    for i in range(n):
        width = 4 if i % 2 else 8
        image = torch.full((1, width), IMAGE_TOKEN)
        words = _words(_LENGTHS[i], i)
        text = torch.cat([start, image, end, words], dim=1)
        example = {
            "input_ids": text,
            "pixel_values": _random(4 * width, 12, seed=i),
            "image_grid_thw": torch.tensor([[1, 4, width]]),
        }
        examples.append(example)
    return examples


def together(
    examples: Sequence[Example],
    side: str,
    length: int | None = None,
) -> Example:
    """Make a batch of texts, padded on a side to a length."""
    # Not all examples have images.
    parts_of: dict[str, list[torch.Tensor]] = {}
    for example in examples:
        for key, part in example.items():
            parts_of.setdefault(key, []).append(part)

    batch = {}
    for key, parts in parts_of.items():
        if key != "input_ids":
            batch[key] = torch.cat(parts)
        elif len(parts[0]) > 1:
            # Texts that are classes, alike in all examples.
            batch[key] = parts[0]
        else:
            masks = [torch.ones_like(part) for part in parts]
            longest = length or max(part.shape[1] for part in parts)
            batch[key] = _padded(parts, side, longest)
            batch["attention_mask"] = _padded(masks, side, longest)
    return batch


def _padded(
    parts: Sequence[torch.Tensor],
    side: str,
    length: int,
) -> torch.Tensor:
    rows = []
    for part in parts:
        n_padded = length - part.shape[1]
        zeros = torch.zeros(1, n_padded).long()
        row = [zeros, part] if side == "left" else [part, zeros]
        rows.append(torch.cat(row, dim=1))
    return torch.cat(rows)
