"""What tests of the lab share: runs, small models, and rows of tasks."""

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.__main__ import main, parse
from benchmarks.fine_tuning import TRAIN, Pretrained, fine_tune
from benchmarks.methods.method import Members
from benchmarks.models import AdaptedModel
from benchmarks.tasks.paper import PAPER_TASKS
from benchmarks.training import MAXIMUM_LIKELIHOOD, Recipe, Weights

Row = dict[str, Any]

SELECT = "Select one of the choices that answers the following question:"
FRUIT = ["a pear", "a stone.", "a spoon", "a lamp"]


def flat(options: Mapping[str, object]) -> list[str]:
    """Spell options as the command line has them: "hidden_size" is "--hidden-size"."""
    arguments = []
    for name, value in options.items():
        spelled = name.replace("_", "-")
        arguments.append(f"--{spelled}")
        values = value if isinstance(value, list | tuple) else [value]
        arguments += map(str, values)
    return arguments


def parsed(command: str, **options: object) -> Any:
    """Read the options of an experiment."""
    return parse([*command.split(), *flat(options)])


@dataclass(frozen=True)
class Finished:
    """What a run has left."""

    figures: dict[str, Any]
    printed: str
    progress: str

    @property
    def rows(self) -> list[Row]:
        """Return the rows of an experiment that has one table of them."""
        return self.figures["rows"]


def run(folder: Path, command: str, **options: object) -> Finished:
    """Run an experiment into a folder."""
    # One thread is the quickest for models of this size.
    flags = flat({"output": folder, "threads": 1, **options})
    printed = StringIO()
    progress = StringIO()
    with redirect_stdout(printed), redirect_stderr(progress):
        main([*command.split(), *flags])
    (figures,) = folder.glob("*.json")
    (table,) = folder.glob("*.md")
    text = table.read_text(encoding="utf-8")
    assert printed.getvalue().endswith(text)
    return Finished(
        figures=json.loads(figures.read_text(encoding="utf-8")),
        printed=printed.getvalue(),
        progress=progress.getvalue(),
    )


def rows_with(rows: list[Row], **fields: object) -> list[Row]:
    """Find the rows whose fields have these values."""
    return [row for row in rows if fields.items() <= row.items()]


def values_of(rows: list[Row], field: str) -> list:
    """List what all rows have in one field."""
    return [row[field] for row in rows]


def rows_by(rows: list[Row], *fields: str) -> dict[tuple, Row]:
    """Index rows by their values of some fields, of which no two have the same."""
    found = {}
    for row in rows:
        key = tuple(row[name] for name in fields)
        found[key] = row
    assert len(found) == len(rows)
    return found


def trained(
    pretrained: Pretrained, seed: int = 0, recipe: Recipe = MAXIMUM_LIKELIHOOD
) -> AdaptedModel:
    """Fine-tune a tiny model on all training texts."""
    return fine_tune(pretrained, pretrained.data[TRAIN], seed, recipe)


def training_texts(pretrained: Pretrained) -> DataLoader:
    """Load all training texts in one batch."""
    return pretrained.loader(pretrained.data[TRAIN], batch_size=8)


def predicted(members: Members, texts: DataLoader) -> Tensor:
    """Predict the mean probabilities `(texts, classes)` of some members."""
    return members.predict({TRAIN: texts})[TRAIN]


def probabilities_of(model: AdaptedModel, texts: Iterable[Any]) -> Tensor:
    """Predict the probabilities `(texts, classes)` of the model itself."""
    logits = model.logits(texts)
    return logits.softmax(-1)


def assert_sum_to_1(probabilities: Tensor) -> None:
    """Demand that the probabilities of each text's classes sum to 1."""
    # In float32, of many draws.
    assert (probabilities.sum(-1) - 1).abs().max() < 2e-5


def drawn_logits(members: Members, batch: Any) -> Tensor:
    """Compute a batch's logits by each member, `(members, texts, classes)`."""
    return torch.stack([logits_of(batch).detach() for logits_of in members.logits()])


def copied(model: nn.Module) -> Weights:
    """Copy all weights, by name."""
    return copy.deepcopy(model.state_dict())


def assert_same(model: nn.Module, before: Weights) -> None:
    """Demand that a model has its weights of before."""
    after = model.state_dict()
    assert after.keys() == before.keys()
    for name, weight in before.items():
        assert torch.equal(after[name], weight), name


def save_tiny_models(folder: Path) -> dict[bool, Path]:
    """Save a causal language model and an encoder; return folders by `is_prompt`."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": 200,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 310,
        "pad_token_id": 1,
    }
    decoder = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    encoder = transformers.RobertaForSequenceClassification(
        transformers.RobertaConfig(**shape)
    )
    decoder.save_pretrained(folder / "decoder")
    encoder.save_pretrained(folder / "encoder")
    # As Gemma's tokenizer does.
    tiny_tokenizer(padding_side="left").save_pretrained(folder / "decoder")
    tiny_tokenizer(padding_side="right").save_pretrained(folder / "encoder")
    return {True: folder / "decoder", False: folder / "encoder"}


def tiny_tokenizer(padding_side: str) -> transformers.PreTrainedTokenizerFast:
    """Train a tokenizer to whom every answer is one token."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<s>", "<pad>", "<unk>"], show_progress=False
    )
    # Often enough for every word to become one token.
    tokenizer.train_from_iterator(["Answer: A B C D True False grows"] * 9, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<pad>",
        unk_token="<unk>",
        padding_side=padding_side,
    )


def arc_row(
    question: str, choices: list[str], answer: str, labels: str = "ABCD"
) -> dict[str, Any]:
    """Make a row of ARC, which labels its choices by letters or digits."""
    return {
        "question": question,
        "choices": {"text": choices, "label": list(labels)},
        "answerKey": answer,
    }


OF_WINOGRANDE = {
    "sentence": "As _ was low it fell.",
    "option1": "cup",
    "option2": "shelf",
}
OF_WINOGRANDE_PROMPT = (
    f"{SELECT} As _ was low it fell. Choices: A. cup. B shelf. Answer:"
)
FRUIT_PROMPT = (
    f"{SELECT} What grows? Choices: A. a pear. B. a stone. C. a spoon. D. a lamp. "
    "Answer:"
)
BOOLQ_ROWS = [
    # As SuperGLUE has it.
    {"question": "is ice cold", "passage": "Ice is frozen water.", "label": 1},
    # As the original data have it.
    {"question": "is ice cold", "passage": "Ice is frozen water", "answer": False},
]
BOOLQ_PROMPT = (
    "Answer the question with only True or False: is ice cold "
    "Context: Ice is frozen water."
)
# Rows of several tasks, and what the paper keeps of them.
WINOGRANDE = (
    [OF_WINOGRANDE | {"answer": answer} for answer in "21"],
    [(OF_WINOGRANDE_PROMPT, 1), (OF_WINOGRANDE_PROMPT, 0)],
)
ARC = (
    [
        arc_row("What grows?", FRUIT, "C"),
        arc_row("What grows?", FRUIT, "2", labels="1234"),
        # Questions with three and five choices are left out.
        arc_row("Three?", FRUIT[:3], "A", labels="ABC"),
        arc_row("Five?", [*FRUIT, "ice"], "E", labels="ABCDE"),
    ],
    [(FRUIT_PROMPT, 2), (FRUIT_PROMPT, 1)],
)
PAIRS = (
    [
        {"sentence1": "It rains.", "sentence2": "It is wet.", "label": label}
        for label in (1, 0)
    ],
    [(("It rains.", "It is wet."), 1), (("It rains.", "It is wet."), 0)],
)
ROWS = {
    "winogrande_s": WINOGRANDE,
    "winogrande_m": WINOGRANDE,
    "arc_easy": ARC,
    "arc_challenge": ARC,
    "obqa": (
        [arc_row("", FRUIT, "B") | {"question_stem": "What grows?"}],
        [(FRUIT_PROMPT, 1)],
    ),
    "boolq": (BOOLQ_ROWS, [(BOOLQ_PROMPT, 1), (BOOLQ_PROMPT, 0)]),
    "mrpc": PAIRS,
    "rte": PAIRS,
    "cola": ([{"sentence": "Him sleeps.", "label": 0}], [("Him sleeps.", 0)]),
    "wic": PAIRS,
    "wnli": PAIRS,
    "boolq_pairs": (
        BOOLQ_ROWS,
        [
            (("Ice is frozen water.", "is ice cold"), 1),
            (("Ice is frozen water", "is ice cold"), 0),
        ],
    ),
}


def write_task(name: str, data: Path) -> None:
    """Write a task's rows to train on, and the first of them to test on."""
    rows, _ = ROWS[name]
    training, test = PAPER_TASKS[name].sources
    write_rows(rows, training.file_in(data))
    write_rows(rows[:1], test.file_in(data))


def write_rows(rows: list[dict[str, Any]], file: Path) -> None:
    """Write JSON lines into a folder that is made."""
    lines = [json.dumps(row) for row in rows]
    file.parent.mkdir(parents=True, exist_ok=True)
    # An empty line at the end, as some editors leave it, is no row.
    file.write_text("\n".join([*lines, "", ""]), encoding="utf-8")


def write_grammar(data: Path) -> None:
    """Write sentences of two classes, some of them wrong."""
    rows = []
    for number in range(24):
        verb = "rains" if number % 2 else "rain"
        # Each sentence twice: with its own label, and with one that tells nothing.
        for label in (number % 2, (number // 5) % 2):
            rows.append({"sentence": f"It {verb} {number}.", "label": label})
    for source in PAPER_TASKS["cola"].sources:
        write_rows(rows, source.file_in(data))


def write_intents(
    intents: Mapping[str, Sequence[str]], n_texts: int, data: Path
) -> None:
    """Write CLINC's two splits: of each domain its intents, and of each some texts.

    A text is its split, its intent and a number.
    """
    for split in ("train", "test"):
        rows = []
        for domain, names in intents.items():
            for intent, number in product(names, range(n_texts)):
                row = {
                    "text": f"{split} {intent} {number}",
                    "intent": intent,
                    "domain": domain,
                }
                rows.append(row)
        folder = data / "clinc" / "clinc_oos" / "plus"
        write_rows(rows, folder / f"{split}.jsonl")
