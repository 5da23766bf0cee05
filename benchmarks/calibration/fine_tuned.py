"""A model with its tokenizer, and its LoRA fine-tuning with checkpoints."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, TaskType, get_peft_model, prepare_model_for_kbit_training
from torch.utils.data import DataLoader

from benchmarks.calibration.hyperparameters import Hyperparameters
from benchmarks.calibration.text_task import Example, TextTask
from benchmarks.calibration.training_cache import cached, training_digest
from benchmarks.minilm import padding_collator
from benchmarks.training import Weights, train
from laplace_lora_ext.models.logits_model import LogitsModel

Records = list[dict[str, Any]]


@dataclass(frozen=True)
class Pretrained:
    """A pretrained model to be fine-tuned on a task.

    Attributes
    ----------
    task : TextTask
        The task.
    hyperparameters : Hyperparameters
        How it is fine-tuned.
    tokenizer : transformers.PreTrainedTokenizerBase
        Its tokenizer, which has a padding token.
    load : callable
        Loads the model, with a new head if it is an encoder.
    device : str
        Device to compute on.
    cache : Path
        Folder of fine-tuned weights.
    show_progress : bool
        Whether to show progress bars.
    """

    task: TextTask
    hyperparameters: Hyperparameters
    tokenizer: Any
    load: Callable[[], torch.nn.Module]
    device: str
    cache: Path
    show_progress: bool

    @property
    def class_token_ids(self) -> list[int] | None:
        """Tokens of a causal language model's answers, as they follow a prompt."""
        if not self.task.is_prompt:
            return None
        prompt = "Answer:"
        start = len(self.tokenizer(prompt, add_special_tokens=False)["input_ids"])
        tokens = []
        for answer in self.task.classes:
            identifiers = self.tokenizer(f"{prompt} {answer}", add_special_tokens=False)
            (*_, token) = identifiers["input_ids"]
            if len(identifiers["input_ids"]) != start + 1:
                raise ValueError(f"The answer {answer!r} is not one token of this model.")
            tokens.append(token)
        return tokens

    def records(self, examples: Sequence[Example]) -> Records:
        """Tokenize examples.

        Parameters
        ----------
        examples : sequence of Example
            Texts or pairs of texts.

        Returns
        -------
        records : list of dict
            ``input_ids`` and ``attention_mask``, and ``labels`` where there are any.
        """
        texts = [one.text if isinstance(one.text, tuple) else (one.text,) for one in examples]
        encoded = self.tokenizer(
            *(list(part) for part in zip(*texts, strict=True)),
            truncation=True,
            max_length=self.hyperparameters.maximum_length,
            return_token_type_ids=False,
        )
        return [
            {"input_ids": identifiers, "attention_mask": mask}
            | ({} if example.label is None else {"labels": example.label})
            for example, identifiers, mask in zip(
                examples, encoded["input_ids"], encoded["attention_mask"], strict=True
            )
        ]

    def loader(
        self, records: Records, batch_size: int, generator: torch.Generator | None = None
    ) -> DataLoader:
        """Batches of records: in their order, or shuffled where a generator is given."""
        return DataLoader(
            records,  # pyright: ignore[reportArgumentType]
            batch_size=batch_size,
            shuffle=generator is not None,
            generator=generator,
            collate_fn=padding_collator(self.tokenizer, self.device),
        )


@dataclass(frozen=True)
class FineTuned:
    """A fine-tuned model.

    Attributes
    ----------
    model : PeftModel
        In evaluation mode.
    logits_model : LogitsModel
        The same, from a batch to logits of the classes.
    checkpoints : dict
        Trained weights by the number of steps, the last ones among them.
    initial : dict
        What was trained, as it was before.
    """

    model: PeftModel
    logits_model: LogitsModel
    checkpoints: dict[int, Weights]
    initial: Weights

    def restore(self, step: int) -> None:
        """Set the model back to a checkpoint."""
        self.model.load_state_dict(self.checkpoints[step], strict=False)

    @torch.no_grad()
    def logits(self, batches: DataLoader) -> torch.Tensor:
        """Logits (texts, classes) on the CPU, in the model's current mode."""
        return torch.cat([self.logits_model(batch).cpu() for batch in batches])


def fine_tune(pretrained: Pretrained, records: Records, seed: int) -> FineTuned:
    """Fine-tune LoRA weights, and the head of an encoder, on the likelihood of the classes.

    Parameters
    ----------
    pretrained : Pretrained
        The model and how to train it.
    records : list of dict
        Training set.
    seed : int
        Seed of new weights, dropout and the order of the batches.

    Returns
    -------
    fine_tuned : FineTuned
        After the last step.
    """
    settings = pretrained.hyperparameters
    transformers.set_seed(seed)
    base: Any = pretrained.load()
    if getattr(base, "is_loaded_in_8bit", False):
        base = prepare_model_for_kbit_training(base)
    model = get_peft_model(
        base,
        LoraConfig(
            task_type=TaskType.CAUSAL_LM if pretrained.task.is_prompt else TaskType.SEQ_CLS,
            r=settings.rank,
            lora_alpha=settings.alpha,
            lora_dropout=settings.dropout,
            target_modules=list(settings.target_modules),
        ),
    )
    logits_model = LogitsModel(model, pretrained.class_token_ids)
    loader = pretrained.loader(records, settings.batch_size, torch.Generator().manual_seed(seed))
    initial = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    digest = training_digest(model, settings, records, seed)
    checkpoints = cached(
        pretrained.cache / f"fine-tuned-{digest}.pt",
        lambda: train(
            model,
            loader,
            lambda batch: torch.nn.functional.cross_entropy(logits_model(batch), batch["labels"]),
            settings.steps,
            settings.learning_rate,
            warmup_steps=settings.warmup_steps,
            checkpoint_steps=settings.checkpoint_steps,
            show_progress=pretrained.show_progress,
        ),
        pretrained.device,
    )
    fine_tuned = FineTuned(model.eval(), logits_model, checkpoints, initial)
    fine_tuned.restore(settings.steps)
    transformers.set_seed(seed)  # what follows does not depend on where the weights come from
    return fine_tuned
