"""What tests of several parts of the lab share: runs, small models, and made-up rows of tasks."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from benchmarks.__main__ import build_parser, main
from benchmarks.options import Run
from benchmarks.random_models import Shape
from benchmarks.tasks.docstrings import Documented
from benchmarks.tasks.paper import PAPER_TASKS

SELECT = "Select one of the choices that answers the following question:"
FRUIT = ["a pear", "a stone", "a spoon", "a lamp"]


def flat(options: Mapping[str, object]) -> list[str]:
    """Options as the command line has them: "hidden_size" is "--hidden-size"."""
    arguments = []
    for name, value in options.items():
        values = value if isinstance(value, list | tuple) else [value]
        arguments += [f"--{name.replace('_', '-')}", *map(str, values)]
    return arguments


def parsed(command: str, **options: object) -> Run:
    """Options of an experiment."""
    arguments = vars(build_parser().parse_args([*command.split(), *flat(options)]))
    experiment = arguments.pop("experiment")
    return experiment(**{name: arguments[name] for name in experiment.__dataclass_fields__})


def run(
    capsys: pytest.CaptureFixture[str], folder: Path, command: str, *flags: str, **options: object
) -> tuple[dict[str, Any], str, str]:
    """Run an experiment into a folder; return its figures, and what it has printed."""
    main([*command.split(), *flags, *flat({"output": folder, "threads": 1, **options})])
    (file,) = folder.glob("*.json")
    printed = capsys.readouterr()
    (table,) = folder.glob("*.md")
    assert printed.out.endswith(table.read_text(encoding="utf-8"))
    return json.loads(file.read_text(encoding="utf-8")), printed.out, printed.err


def is_picture(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


def pool(count: int = 40) -> list[Documented]:
    """Names and summaries, of three files by turns."""
    return [
        Documented(f"name {number}", f"Summary {number}.", Path(f"file{number % 3}"))
        for number in range(count)
    ]


def small_shape(**changes: Any) -> Shape:
    sizes = {
        "hidden_size": 32,
        "layers": 1,
        "intermediate_size": 40,
        "heads": 1,
        "vocabulary": 50,
        "rank": 4,
        "target_modules": ("q_proj", "v_proj"),
        "classes": 3,
        "batch_size": 2,
        "length": 6,
        "dtype": "float32",
    }
    return Shape(**(sizes | changes))


def save_tiny_models(folder: Path) -> dict[bool, Path]:
    """Folders of a causal language model and of an encoder, by `is_prompt`."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<s>", "<pad>", "<unk>"], show_progress=False
    )
    tokenizer.train_from_iterator(["Answer: A B C D True False grows"] * 9, trainer)
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
    encoder = transformers.RobertaForSequenceClassification(transformers.RobertaConfig(**shape))
    folders = {True: folder / "decoder", False: folder / "encoder"}
    for is_prompt, model in ((True, decoder), (False, encoder)):
        model.save_pretrained(folders[is_prompt])
        special = {"eos_token": "<pad>", "unk_token": "<unk>"}
        special["padding_side"] = "left" if is_prompt else "right"  # left as Gemma's tokenizer
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
        fast.save_pretrained(folders[is_prompt])
    return folders


def labelled(texts: list[str], labels: str = "ABCD") -> dict[str, list[str]]:
    return {"text": texts, "label": list(labels[: len(texts)])}


WINOGRANDE_ROWS = [
    {"sentence": "As _ was low it fell.", "option1": "cup", "option2": "shelf", "answer": answer}
    for answer in "21"
]
WINOGRANDE_PROMPT = f"{SELECT} As _ was low it fell. Choices: A. cup. B shelf. Answer:"
ARC_ROWS = [
    {"id": "1", "question": "What grows?", "choices": labelled(FRUIT), "answerKey": "C"},
    {"id": "2", "question": "What grows?", "choices": labelled(FRUIT, "1234"), "answerKey": "2"},
    {"id": "3", "question": "Three?", "choices": labelled(FRUIT[:3]), "answerKey": "A"},
    {
        "id": "4",
        "question": "Five?",
        "choices": labelled([*FRUIT, "ice"], "ABCDE"),
        "answerKey": "E",
    },
]
FRUIT_PROMPT = (
    f"{SELECT} What grows? Choices: A. a pear. B. a stone. C. a spoon. D. a lamp. Answer:"
)
OPENBOOKQA_ROWS = [
    {
        "id": "5",
        "question_stem": "To sleep one",
        "choices": labelled(["runs.", "lies", "eats", "sits"]),
        "answerKey": "B",
    }
]
OPENBOOKQA_PROMPT = f"{SELECT} To sleep one Choices: A. runs. B. lies. C. eats. D. sits. Answer:"
BOOLQ_ROWS = [
    {"question": "is ice cold", "passage": "Ice is frozen water.", "label": 1, "idx": 0},
    {"question": "is ice cold", "passage": "Ice is frozen water", "answer": False},
]
BOOLQ_PROMPT = (
    "Answer the question with only True or False: is ice cold Context: Ice is frozen water."
)
PROMPTS = (WINOGRANDE_PROMPT, FRUIT_PROMPT, OPENBOOKQA_PROMPT, BOOLQ_PROMPT)
PAIR_ROWS = [
    {"sentence1": "It rains.", "sentence2": "It is wet.", "label": label, "idx": label}
    for label in (1, 0)
]
PAIRS = [(("It rains.", "It is wet."), 1), (("It rains.", "It is wet."), 0)]
WIC_FIELDS = {"word": "rain", "start1": 3, "start2": 0, "end1": 8, "end2": 2}

# For each of the paper's tasks its rows, and what the paper keeps of them.
ROWS = {
    "winogrande_s": (WINOGRANDE_ROWS, [(WINOGRANDE_PROMPT, 1), (WINOGRANDE_PROMPT, 0)]),
    "winogrande_m": (WINOGRANDE_ROWS, [(WINOGRANDE_PROMPT, 1), (WINOGRANDE_PROMPT, 0)]),
    "arc_easy": (ARC_ROWS, [(FRUIT_PROMPT, 2), (FRUIT_PROMPT, 1)]),
    "arc_challenge": (ARC_ROWS, [(FRUIT_PROMPT, 2), (FRUIT_PROMPT, 1)]),
    "obqa": (OPENBOOKQA_ROWS, [(OPENBOOKQA_PROMPT, 1)]),
    "boolq": (BOOLQ_ROWS, [(BOOLQ_PROMPT, 1), (BOOLQ_PROMPT, 0)]),
    "mrpc": (PAIR_ROWS, PAIRS),
    "rte": (PAIR_ROWS, PAIRS),
    "cola": ([{"sentence": "Him sleeps.", "label": 0, "idx": 3}], [("Him sleeps.", 0)]),
    "wic": ([row | WIC_FIELDS for row in PAIR_ROWS], PAIRS),
    "wnli": (PAIR_ROWS, PAIRS),
    "boolq_pairs": (
        BOOLQ_ROWS,
        [(("Ice is frozen water.", "is ice cold"), 1), (("Ice is frozen water", "is ice cold"), 0)],
    ),
}


def write_task(name: str, data: Path) -> None:
    """A task's rows to train on, and the first of them to test on."""
    rows, _ = ROWS[name]
    for source, part in zip(PAPER_TASKS[name].sources, (rows, rows[:1]), strict=True):
        file = source.file_in(data)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"{json.dumps(row)}\n" for row in part) + "\n", encoding="utf-8")
