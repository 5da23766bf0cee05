"""The Bayesian Adaptation Gym's protocol, with a posterior of this library.

In a clone of https://github.com/SRI-CSL/BayesAdapt, in place of a training:

    python .../bayesadapt.py bayesadapt.datasets.obqa.OBQA --model Qwen/Qwen3-8B

Around an adapter that the gym has trained, by the validation split that its
temperature has: add --checkpoint logs/.../mle/.../state_dict.pt
"""

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path
from pydoc import locate

import laplace_lora_ext
import torch
import transformers
from laplace_lora_ext.metrics import quality
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

COLLATE = "bayesadapt.datasets.collate.instruct_collate_fn"
BATCH_SIZE = 4  # this and all below as in the gym's "conf"
LAYERS = ["lm_head", "q_proj", "v_proj"]


def with_answers(base, answers):
    """Keep the rows of the head that are answers, and add LoRA layers."""
    weight = base.get_output_embeddings().weight.detach()[answers].clone()
    head = torch.nn.Linear(weight.shape[1], len(answers), bias=False)
    head.weight = torch.nn.Parameter(weight)
    base.set_output_embeddings(head)
    base.config.vocab_size = len(answers)
    base.config.tie_word_embeddings = False
    lora = LoraConfig(
        task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules=LAYERS
    )
    return get_peft_model(base, lora)


def with_labels(batch):
    """Turn the gym's batch into one of transformers and of this library."""
    inputs, labels, *_ = batch
    return {**inputs, "labels": labels}


class AnswerTrainer(transformers.Trainer):
    """Trains on the logits of the last token; all padding is on the left."""

    def compute_loss(self, model, inputs, *_, **__):
        """Compute the mean loss of a batch."""
        labels = inputs.pop("labels")
        return cross_entropy(model(**inputs).logits[:, -1].float(), labels)


def in_stages(model, train, _, asked):
    """Train in stages, in place of the gym's training and its fit."""
    arguments = transformers.TrainingArguments(
        str(asked.output),
        max_steps=asked.steps,
        warmup_steps=round(0.06 * asked.steps),
        per_device_train_batch_size=BATCH_SIZE,
        learning_rate=1e-4,
        adam_epsilon=1e-6,
        max_grad_norm=0.0,  # no clipping
        seed=asked.seed,
        remove_unused_columns=False,
        save_strategy="no",
        report_to=[],
    )

    def collate(items):
        return with_labels(train.collate_fn(items))

    trainer = AnswerTrainer(model, arguments, collate, train.dataset)
    answers = range(len(train.dataset.labels))
    return laplace_lora_ext.train_in_stages(trainer, class_token_ids=answers)


def of_checkpoint(model, train, validation, asked):
    """Fit a posterior around an adapter that the gym has trained."""
    weights = torch.load(asked.checkpoint, map_location="cpu")
    if unknown := model.load_state_dict(weights, strict=False).unexpected_keys:
        raise SystemExit(f"The checkpoint is of another model: {unknown[0]}.")
    answers = range(len(train.dataset.labels))
    la = laplace_lora_ext.Laplace(model, class_token_ids=answers)
    la.fit(map(with_labels, train))
    held_out = map(with_labels, validation)
    la.optimize_prior_precision(method="gridsearch", val_loader=held_out)
    return la


def evaluate(la, loader, asked):
    """Write the gym's files: logits by question, and metrics."""
    probs, labels, questions = [], [], []
    for inputs, of_batch, ids in loader:
        probs.append(torch.as_tensor(la.predict_proba(inputs)).double())
        labels.append(of_batch)
        questions += ids
    probs = torch.cat(probs)
    found = quality(probs, torch.cat(labels))
    names = {"ACC": "accuracy", "ECE": "ece", "NLL": "nll", "Brier": "brier"}
    result = {"seed": asked.seed}
    result |= {new: found[old] for new, old in names.items()}
    folder = asked.output
    folder.mkdir(parents=True, exist_ok=True)
    # One draw, whose softmax is the prediction: (1, classes) of a question.
    logits = dict(zip(questions, probs.log()[:, None], strict=True))
    torch.save(logits, folder / f"test_logits_seed{asked.seed}.pt")
    (folder / "metrics.json").write_text(json.dumps([result]))
    return result


def main(arguments=None):
    """Train in stages or load a checkpoint, and evaluate the posterior."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", help="class of a data set")
    parser.add_argument("--options", type=json.loads, default={}, help="of it")
    parser.add_argument("--collate", default=COLLATE)
    parser.add_argument("--model", required=True)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--output", type=Path, default=Path("posterior"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=5000)
    asked = parser.parse_args(arguments)
    transformers.set_seed(asked.seed)
    load = transformers.AutoTokenizer.from_pretrained
    tokenizer = load(asked.model, padding_side="left")
    join = partial(locate(asked.collate), tokenizer)
    loaders = {}
    for split in ("train", "validation", "test"):
        data = locate(asked.data)(split=split, **asked.options)
        loaders[split] = DataLoader(data, BATCH_SIZE, collate_fn=join)
    load = transformers.AutoModelForCausalLM.from_pretrained
    base = load(asked.model, dtype="auto", device_map="auto")
    labels = loaders["train"].dataset.labels
    model = with_answers(base, tokenizer.convert_tokens_to_ids(labels))
    fit = of_checkpoint if asked.checkpoint else in_stages
    la = fit(model, loaders["train"], loaders["validation"], asked)
    print(evaluate(la, loaders["test"], asked))


if __name__ == "__main__":
    sys.path[0] = os.getcwd()  # this file has the name of the gym's package
    main()
