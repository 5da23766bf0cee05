"""The paper's tasks, each read from a few made-up rows of its schema."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from benchmarks.calibration.paper_tasks import (
    CAUSAL_HYPERPARAMETERS,
    ENCODER_HYPERPARAMETERS,
    MMLU_SUBJECTS,
    PAPER_SHIFTS,
    PAPER_TASKS,
    read_paper_task,
)
from benchmarks.calibration.task_data import MissingDataError

SELECT = "Select one of the choices that answers the following question:"
FRUIT = ["a pear", "a stone", "a spoon", "a lamp"]


def labelled(texts, labels="ABCD"):
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

# For each task its rows, and what the paper keeps of them.
TASKS = {
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
MMLU_ROW = {"question": "What grows?", "subject": "made up", "choices": FRUIT, "answer": 3}


def write_rows(source, data, rows):
    file = source.file_in(data)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows) + "\n", encoding="utf-8")


def write_task(name, data):
    rows, _ = TASKS[name]
    write_rows(PAPER_TASKS[name].train_source, data, rows)
    write_rows(PAPER_TASKS[name].test_source, data, rows[:1])


def test_every_task_has_rows_here():
    assert list(TASKS) == list(PAPER_TASKS)


@pytest.mark.parametrize("name", TASKS)
def test_rows_become_the_papers_prompts_and_pairs(name, tmp_path):
    write_task(name, tmp_path)
    task = read_paper_task(name, tmp_path)
    _, expected = TASKS[name]
    assert task.train == expected
    assert task.test == expected[:1]
    assert task.name == name
    assert task.is_prompt == (expected[0][0] in PROMPTS)
    assert task.shifted == {}
    assert all(0 <= label < len(task.classes) for _, label in task.train)


@pytest.mark.parametrize("name", TASKS)
def test_the_hub_is_asked_by_its_own_names(name, monkeypatch):
    rows, expected = TASKS[name]
    asked = []

    def load_dataset(dataset, configuration, split):
        asked.append((dataset, configuration, split))
        return rows

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert read_paper_task(name).test == expected
    task = PAPER_TASKS[name]
    names = (task.dataset, task.configuration)
    assert asked == [(*names, "train"), (*names, "validation")]


def test_the_answer_is_the_class_of_its_label():
    yes = {"question": "is ice cold", "passage": "Ice is cold.", "answer": True}
    for name in ("boolq", "boolq_pairs"):
        task = PAPER_TASKS[name]
        assert task.classes[task.to_example(yes).label] == "True"
    assert PAPER_TASKS["winogrande_s"].classes == ("A", "B")
    assert PAPER_TASKS["obqa"].classes == ("A", "B", "C", "D")
    # The hub's names of the labels 0 and 1, which these two order differently.
    assert PAPER_TASKS["rte"].classes == ("entailment", "not_entailment")
    assert PAPER_TASKS["wnli"].classes == ("not_entailment", "entailment")


def test_what_is_cut_of_a_long_prompt_is_not_where_the_answer_comes_from():
    for name, task in PAPER_TASKS.items():
        ends_with_choices = name not in ("boolq", "boolq_pairs") and task.is_prompt
        assert task.truncation_side == ("left" if ends_with_choices else "right")


def test_shifted_texts_are_the_other_tasks_tests(tmp_path):
    write_task("obqa", tmp_path)
    write_rows(PAPER_TASKS["arc_easy"].test_source, tmp_path, ARC_ROWS)
    write_rows(PAPER_TASKS["arc_challenge"].test_source, tmp_path, ARC_ROWS[:1])
    for subject in MMLU_SUBJECTS:
        for place, source in enumerate(PAPER_SHIFTS[subject].sources):
            write_rows(source, tmp_path, [MMLU_ROW] * (place + 1))
    task = read_paper_task("obqa", tmp_path, shifted=tuple(PAPER_SHIFTS))
    counts = {name: len(examples) for name, examples in task.shifted.items()}
    sums = {subject: sum(range(len(tasks) + 1)) for subject, tasks in MMLU_SUBJECTS.items()}
    assert counts == {"arc_challenge": 1, "arc_easy": 2} | sums
    assert task.shifted["arc_easy"] == [(FRUIT_PROMPT, 2), (FRUIT_PROMPT, 1)]
    assert set(task.shifted["health"]) == {(FRUIT_PROMPT, 3)}


def test_the_papers_table_of_mmlu_subjects():
    counts = {subject: len(tasks) for subject, tasks in MMLU_SUBJECTS.items()}
    assert counts == {"computer_science": 4, "engineering": 1, "law": 3, "health": 7}
    assert PAPER_SHIFTS["engineering"].sources == (("cais/mmlu", "electrical_engineering", "test"),)


def test_hyperparameters_are_the_papers():
    for name, task in PAPER_TASKS.items():
        expected = CAUSAL_HYPERPARAMETERS if task.is_prompt else ENCODER_HYPERPARAMETERS
        assert task.hyperparameters is expected, name
    for shared in (CAUSAL_HYPERPARAMETERS, ENCODER_HYPERPARAMETERS):
        assert (shared.rank, shared.alpha, shared.dropout) == (8, 16, 0.1)
        assert shared.learning_rate == 5e-5
        assert (shared.steps, shared.checkpoints) == (10_000, 10)
    assert (CAUSAL_HYPERPARAMETERS.batch_size, CAUSAL_HYPERPARAMETERS.maximum_length) == (4, 300)
    assert (ENCODER_HYPERPARAMETERS.batch_size, ENCODER_HYPERPARAMETERS.maximum_length) == (32, 256)


def test_without_access_one_line_says_what_to_download(tmp_path):
    program = """
import os, socket
socket.getaddrinfo = socket.socket.connect = lambda *_, **__: os._exit(3)
from benchmarks.calibration.paper_tasks import read_paper_task
from benchmarks.calibration.task_data import MissingDataError
try:
    read_paper_task("winogrande_s")
except MissingDataError as error:
    print(error)
"""
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == (
        "The hub is out of reach: download from https://huggingface.co/datasets, and save as JSON "
        "lines, allenai/winogrande (winogrande_s), split train, as "
        "FOLDER/allenai/winogrande/winogrande_s/train.jsonl; allenai/winogrande (winogrande_s), "
        "split validation, as FOLDER/allenai/winogrande/winogrande_s/validation.jsonl, and give "
        "--data FOLDER.\n"
    )


def test_every_missing_file_is_named_at_once(tmp_path):
    write_task("obqa", tmp_path)
    (tmp_path / "allenai" / "openbookqa" / "main" / "train.jsonl").unlink()
    with pytest.raises(MissingDataError) as error:
        read_paper_task("obqa", tmp_path, shifted=("engineering",))
    assert str(error.value) == (
        f"The data in {tmp_path} are incomplete: download from https://huggingface.co/datasets, "
        "and save as JSON lines, allenai/openbookqa (main), split train, as "
        f"{tmp_path}/allenai/openbookqa/main/train.jsonl; cais/mmlu (electrical_engineering), "
        f"split test, as {tmp_path}/cais/mmlu/electrical_engineering/test.jsonl."
    )


def test_unknown_names_are_refused_with_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match=f"'imdb'.*{', '.join(PAPER_TASKS)}"):
        read_paper_task("imdb", tmp_path)
    with pytest.raises(ValueError, match=f"history.*{', '.join(PAPER_SHIFTS)}"):
        read_paper_task("obqa", tmp_path, shifted=("law", "history"))
    with pytest.raises(ValueError, match="obqa, not rte"):
        read_paper_task("rte", tmp_path, shifted=("law",))


def test_rows_of_another_schema_are_refused_by_name(tmp_path):
    write_task("rte", tmp_path)
    write_rows(PAPER_TASKS["rte"].test_source, tmp_path, [{"premise": "It rains.", "label": 0}])
    with pytest.raises(ValueError, match=r"nyu-mll/glue \(rte\), split validation.*'sentence1'"):
        read_paper_task("rte", tmp_path)
