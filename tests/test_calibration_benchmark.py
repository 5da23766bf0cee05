"""The calibration benchmark at its smallest: an embedded task, and every task of the paper."""

import json
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import tokenizers
import torch
import transformers

import benchmarks.calibration.fine_tuned as fine_tuned_module
from benchmarks.__main__ import build_parser
from benchmarks.calibration.docstring_tasks import (
    Named,
    Sizes,
    asked_for_choice,
    asked_for_match,
    is_held_out,
    read_docstring_task,
    spoken,
)
from benchmarks.calibration.fine_tuned import fine_tune
from benchmarks.calibration.language_model import (
    next_tokens,
    random_examples,
    train_tokenizer,
    verdicts_and_answers,
)
from benchmarks.calibration.methods import (
    DESCENT,
    GRID_SEARCH,
    SCALED,
    Evaluation,
    deep_ensemble,
)
from benchmarks.calibration.paper_prompts import LETTERS, four_choices
from benchmarks.calibration.paper_tasks import PAPER_SHIFTS, PAPER_TASKS
from benchmarks.calibration.posteriors import (
    EVIDENCES,
    LINEARIZED,
    LINKS,
    Beliefs,
    Posterior,
    posteriors,
)
from benchmarks.calibration.preparation import prepare
from benchmarks.calibration.report import spread, summarize
from benchmarks.calibration.trial import Trial
from benchmarks.metrics import calibrated_ece, selective_accuracy
from benchmarks.temperature import fit_temperature
from tests.support.dense import jacobian, logits_of, unpadded
from tests.support.models import lora_model, ragged_batches
from tests.support.posteriors import fitted
from tests.test_paper_tasks import MMLU_ROW, TASKS, write_rows, write_task

STOCK = {"Stock diag", "Stock Kron"}


def run(*options, **environment):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", "calibration", *map(str, options)],
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | environment,
    )


def test_the_benchmark_measures_every_method_and_draws_its_figures(tmp_path):
    options = {
        "--task": "choices",
        "--train-examples": 10,
        "--test-examples": 12,
        "--shifted-examples": 8,
        "--files-per-library": 30,
        "--steps": 3,
        "--checkpoints": 2,
        "--language-model-steps": 3,
        "--samples": 20,
        "--output": tmp_path / "results",
        "--cache": tmp_path / "cache",
    }
    finished = run("--curves", *(part for option in options.items() for part in option))
    assert finished.returncode == 0, finished.stderr
    folder = tmp_path / "results"
    figures = json.loads((folder / "calibration.json").read_text())
    laplace = {posterior.name for posterior in posteriors(3, is_prompt=True)}
    rows = figures["methods"]
    with_split = [row for row in rows if row["protocol"] == "80/20 split"]
    without = {row["method"] for row in rows if row["protocol"] == "whole training set"}
    with_validation = {row["method"] for row in with_split}
    ensembles = {"MC dropout", "Checkpoint ensemble", "Deep ensemble"}
    assert without == {"MAP", *ensembles, *laplace}
    assert with_validation == {"MAP", "Temperature scaling", *laplace}
    by_evidence = [row for row in rows if row["chosen_by"].startswith("evidence")]
    assert len(by_evidence) == len(laplace) * len(LINKS) * len(EVIDENCES)
    linearized = [row for row in rows if row["chosen_by"] in LINEARIZED]
    two_means = ["lowrank_kron", "lowrank_kron, prior mean at start"]
    kinds = len(LINKS) * len(LINEARIZED)
    assert [row["method"] for row in linearized[::kinds]] == two_means
    for name in laplace:  # validation data prefer one link of each structure
        by_validation = [row for row in with_split if row["method"] == name]
        scalar, layerwise, scaled = (
            {
                row["link"]: row["is_choice"]
                for row in by_validation
                if row["chosen_by"] == chosen_by
            }
            for chosen_by in (GRID_SEARCH, DESCENT, SCALED)
        )
        assert len(scalar) == len(LINKS)
        assert sum(scalar.values()) == 1
        assert set(layerwise) == (set() if name in STOCK else {"mc", "probit", "mean field"})
        assert sum(layerwise.values()) == bool(layerwise)
        assert len(scaled) == (len(LINKS) if name in two_means else 0)
        assert sum(scaled.values()) == bool(scaled)
    for row in (*rows, *figures["along_training"]):
        assert 0 < row["nll"] < 50
        assert 0 <= row["shifted"]["matplotlib"]["shift_auroc"] <= 1
        assert 0 <= row["shifted"]["matplotlib"]["accuracy"] <= 1
    assert {row["step"] for row in figures["along_training"]} == {1, 3}
    assert sum(figures["variance_by_layer"].values()) == pytest.approx(1)
    groups = figures["jacobians_by_margin"]
    margins = [group["margin"] for group in groups]
    assert margins == sorted(margins)
    assert margins[0] >= 0
    assert all(group["squared_norm"] > 0 for group in groups)
    assert (folder / "calibration.md").read_text() in finished.stdout
    for figure in ("calibration_reliability", "selective_accuracy", "along_training", "layers"):
        assert (folder / f"{figure}.png").read_bytes().startswith(b"\x89PNG")
    assert "Training" in finished.stderr  # a progress bar


@pytest.fixture(scope="module")
def tiny_models(tmp_path_factory):
    """Folders of a causal language model and of an encoder, by `is_prompt`."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<s>", "<pad>", "<unk>"], show_progress=False
    )
    tokenizer.train_from_iterator(["Answer: A B C D True False grows"] * 9, trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<pad>", unk_token="<unk>"
    )
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
    folders = {}
    for is_prompt, model in (
        (True, transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))),
        (
            False,
            transformers.RobertaForSequenceClassification(transformers.RobertaConfig(**shape)),
        ),
    ):
        folders[is_prompt] = tmp_path_factory.mktemp("models") / str(is_prompt)
        model.save_pretrained(folders[is_prompt])
        fast.save_pretrained(folders[is_prompt])
    return folders


def parse(folder, *options):
    options = ("--data", folder, "--cache", folder / "cache", "--quiet", *options)
    return build_parser().parse_args(["calibration", *map(str, options)])


def prepared(task, tmp_path, tiny_models, *options):
    """A tiny model, with two steps of training, and made-up rows of a task of the paper."""
    write_task(task, tmp_path)
    folder = tiny_models[PAPER_TASKS[task].is_prompt]
    model = ("--task", task, "--model", folder, "--steps", 2, "--batch-size", 2)
    return prepare(parse(tmp_path, *model, *options), 0, "cpu")


@pytest.mark.parametrize("name", TASKS)
def test_every_task_of_the_paper_runs_on_a_tiny_model(name, tmp_path, tiny_models):
    pretrained = prepared(name, tmp_path, tiny_models)
    paper = PAPER_TASKS[name].hyperparameters
    settings = pretrained.hyperparameters
    assert (settings.rank, settings.learning_rate) == (paper.rank, paper.learning_rate)
    assert settings.target_modules == paper.target_modules
    assert (settings.steps, settings.batch_size) == (2, 2)
    train = pretrained.records(pretrained.task.train)
    fine_tuned = fine_tune(pretrained, train, seed=0)
    evaluation = Evaluation(pretrained, fine_tuned, train, {"test": train}, samples=10)
    predictions = [evaluation.map(), *evaluation.by_evidence(Posterior("lowrank_kron"))]
    for prediction in predictions:
        probabilities = prediction.probabilities["test"]
        assert probabilities.shape == (len(train), len(PAPER_TASKS[name].classes))
        assert torch.allclose(probabilities.sum(-1), torch.ones(len(train)), atol=1e-4)


def test_shifted_texts_of_the_paper_are_measured(tmp_path, tiny_models):
    for source in PAPER_SHIFTS["law"].sources:
        write_rows(source, tmp_path, [MMLU_ROW] * 2)
    options = ("--shifted", "law", "--shifted-examples", 5)
    pretrained = prepared("obqa", tmp_path, tiny_models, *options)
    assert len(pretrained.task.shifted["law"]) == 5


def test_missing_data_and_models_are_named_in_one_line(tmp_path):
    empty = run("--task", "rte", "--data", tmp_path)
    assert empty.returncode == 1
    assert empty.stderr.splitlines()[-1].count("rte")
    assert "Traceback" not in empty.stderr
    write_task("rte", tmp_path)
    absent = run("--task", "rte", "--data", tmp_path, "--model", "no-one/no-model")
    assert "https://huggingface.co/no-one/no-model" in absent.stderr.splitlines()[-1]
    assert "Traceback" not in absent.stderr


def test_names_are_words():
    assert spoken("minimumEdge_cut") == "minimum edge cut"
    assert spoken("numpy_scalar") == "library scalar"


def pool(count=40):
    return [
        Named(f"name {number}", f"Summary {number}.", f"file{number % 3}")
        for number in range(count)
    ]


def test_half_of_the_names_match_and_wrong_ones_are_of_the_same_file():
    of = {one.name: one for one in pool()}
    examples = list(asked_for_match(pool(), random.Random(0)))
    assert sum(label for _, label in examples) == len(examples) / 2
    for one, ((name, summary), label) in zip(pool(), examples, strict=True):
        assert summary == one.summary
        assert (name == one.name) == bool(label)
        assert of[name].file == one.file


def test_four_different_names_are_offered_and_the_right_one_is_the_label():
    for one, (prompt, label) in zip(
        pool(), asked_for_choice(pool(), pool(), random.Random(0)), strict=True
    ):
        offered = re.findall(r"([A-D])\. (name \d+)\.", prompt)
        assert [letter for letter, _ in offered] == list(LETTERS)
        assert len({name for _, name in offered}) == 4
        assert offered[label][1] == one.name


def test_the_language_models_texts_leave_the_tasks_functions_out():
    sizes = Sizes(train=10, test=10, shifted=5, files_per_library=30)
    task = read_docstring_task("choices", sizes, 0, show_progress=False)
    questions = [example.text.split("describe? ")[1] for example in (*task.train, *task.test)]
    summaries = {question.split(" Choices:")[0] for question in questions}
    assert all(is_held_out(Named("", summary, "")) for summary in summaries)
    assert len(summaries) == 20


def test_the_language_model_reads_repeated_summaries_and_questions_by_turns():
    twice, of_name, of_summary = (
        random_examples(step, [pool()], 5, random.Random(0)) for step in range(3)
    )
    for text, label in twice:
        assert text[: len(text) // 2] == text[len(text) // 2 + 1 :]
        assert label is None
    for kind, examples in (("name", of_name), ("summary", of_summary)):
        for text, label in examples:
            number = re.search(rf"describe\? {kind} (\d+)", text).group(1)
            offered = dict(re.findall(r"([A-D])\. (name \d+)\.", text))
            assert offered[LETTERS[label]] == f"name {number}"


def test_a_language_model_learns_verdicts_and_answers_at_their_places():
    tokenizer = train_tokenizer([pool()], 300)
    prompts = [four_choices("which?", ["one", "two words", "three", "four"], n) for n in (2, 0)]
    encoded = tokenizer([text for text, _ in prompts], padding=True, return_tensors="pt")
    verdicts, answers = verdicts_and_answers(encoded["input_ids"], [2, 0], tokenizer)
    no, yes = (tokenizer(word)["input_ids"][0] for word in ("no", "yes"))
    assert no != yes
    assert verdicts.tokens.tolist() == [no, no, yes, no, yes, no, no, no]
    assert tokenizer.convert_ids_to_tokens(answers.tokens) == ["C", "A"]
    following = encoded["input_ids"].roll(-1, dims=1)[verdicts.where]
    assert tokenizer.convert_ids_to_tokens(following) == ["B", "C", "D", "Answer:"] * 2
    at = encoded["input_ids"][answers.where]
    assert tokenizer.convert_ids_to_tokens(at) == ["Answer:"] * 2


def test_a_repeated_summary_is_predicted_token_by_token():
    ids, mask = torch.tensor([[5, 6, 7], [8, 9, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    where, tokens = next_tokens(ids, mask)
    assert where.tolist() == [[True, True, False], [True, False, False]]
    assert tokens.tolist() == [6, 7, 9]


def test_moments_of_the_hosts_structures_are_those_of_predictions(tiny_models, tmp_path):
    pretrained = prepared("mrpc", tmp_path, tiny_models)
    train = pretrained.records(pretrained.task.train)
    fine_tuned = fine_tune(pretrained, train, seed=0)
    loader = pretrained.loader(train, 2)
    for structure in ("diag", "kron", "lowrank_kron"):
        la = Posterior(structure, structure).fit(pretrained, fine_tuned, train)
        values = [torch.tensor([0.5]), torch.tensor([20.0])]
        moments = Beliefs(la, loader).moments(values)
        for value, (f_mu, f_var) in zip(values, moments, strict=True):
            la.prior_precision = value
            for place, batch in enumerate(loader):
                rows = slice(2 * place, 2 * place + 2)
                direct = la(batch, link_approx="probit")
                scaled = f_mu / (1 + torch.pi / 8 * f_var.diagonal(dim1=1, dim2=2)).sqrt()
                assert torch.allclose(scaled.softmax(-1)[rows], direct, atol=1e-5)
    assert not torch.allclose(moments[0].f_var, moments[1].f_var)


def test_ensembles_average_probabilities(tiny_models, tmp_path):
    pretrained = prepared("mrpc", tmp_path, tiny_models, "--steps", 4, "--checkpoints", 4)
    train = pretrained.records(pretrained.task.train)
    members = []
    for seed in range(2):
        fine_tuned = fine_tune(pretrained, train, seed)
        members.append(Evaluation(pretrained, fine_tuned, train, {"test": train}, 10))
    each = torch.stack([member.map().probabilities["test"] for member in members])
    assert not torch.equal(each[0], each[1])
    assert torch.allclose(deep_ensemble(members).probabilities["test"], each.mean(0))
    first = members[0]
    steps = list(first.fine_tuned.checkpoints)
    assert steps == [1, 2, 3, 4]
    ensemble = first.checkpoint_ensemble(steps).probabilities["test"]
    at_steps = []
    for step in steps[-3:]:
        first.fine_tuned.restore(step)
        at_steps.append(first.map().probabilities["test"])
    assert torch.allclose(ensemble, torch.stack(at_steps).mean(0))
    dropout = first.monte_carlo_dropout().probabilities["test"]
    assert not torch.allclose(dropout, at_steps[-1], atol=1e-6)
    assert not first.fine_tuned.model.training


def test_a_training_is_read_from_the_cache(tiny_models, tmp_path, monkeypatch):
    pretrained = prepared("mrpc", tmp_path, tiny_models)
    train = pretrained.records(pretrained.task.train)
    loader = pretrained.loader(train, 2)
    trained = fine_tune(pretrained, train, seed=0).logits(loader)
    trainings = []
    original = fine_tuned_module.train

    def counted(*args, **kwargs):
        trainings.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(fine_tuned_module, "train", counted)
    again = fine_tune(pretrained, train, seed=0)
    assert torch.equal(again.logits(loader), trained)
    assert list(again.checkpoints) == [1, 2]
    assert not trainings
    settings = replace(pretrained.hyperparameters, learning_rate=1e-3)
    other = replace(pretrained, hyperparameters=settings)
    for anew in ((pretrained, train, 1), (pretrained, train[1:], 0), (other, train, 0)):
        before = len(trainings)
        fine_tune(*anew)
        assert len(trainings) == before + 1


def test_a_prior_mean_at_the_start_is_that_of_the_weights_before_training(tiny_models, tmp_path):
    pretrained = prepared("mrpc", tmp_path, tiny_models)
    train = pretrained.records(pretrained.task.train)
    fine_tuned = fine_tune(pretrained, train, seed=0)
    la = Posterior("start", mean_at_start=True).fit(pretrained, fine_tuned, train)
    moved = (la.mean - la.prior_mean).split([block.weight.numel() for block in la.blocks])
    for block, distance, start in zip(
        la.blocks, moved, la.prior_mean.split([len(part) for part in moved]), strict=True
    ):
        assert 0 < distance.abs().max() < 1e-3  # two steps of 5e-5
        assert bool(start.any()) == ("lora_A" in block.name)


def test_methods_can_be_chosen(tiny_models, tmp_path):
    pretrained = prepared("mrpc", tmp_path, tiny_models)
    for chosen in (["Stock diag"], ["MC dropout", "Temperature scaling"]):
        rows = Trial(pretrained, 10, 0, chosen).measure()
        assert {row["method"] for row in rows} == {"MAP", *chosen}
    unknown = run("--task", "names", "--methods", "Stock dig")
    assert unknown.returncode == 1
    assert unknown.stderr.startswith("No method is called 'Stock dig'; known are: MAP, ")


def test_a_temperature_is_recovered():
    torch.manual_seed(0)
    logits = 3 * torch.randn(20000, 4)
    labels = torch.distributions.Categorical(logits=logits / 2.5).sample()
    assert fit_temperature(logits, labels) == pytest.approx(2.5, rel=0.05)


def test_selective_accuracy_keeps_the_most_certain():
    probabilities = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.99, 0.01], [0.5, 0.5]])
    accuracies = selective_accuracy(probabilities, torch.tensor([0, 1, 0, -1]))
    assert accuracies[0] == accuracies[9] == 1
    assert accuracies[14] == pytest.approx(2 / 3)
    assert accuracies[-1] == 0.5


def test_calibrated_probabilities_have_the_error_of_chance():
    sure = torch.tensor([[1.0, 0.0]]).repeat(50, 1)
    assert calibrated_ece(sure) == pytest.approx(0, abs=1e-6)
    errors = []
    for n in (100, 400, 1600):
        even = torch.tensor([[0.7, 0.3]]).repeat(n, 1)
        errors.append(calibrated_ece(even))
        # The mean distance of a share of n draws from its expectation, in a single bin.
        expected = (2 * 0.7 * 0.3 / torch.pi / n) ** 0.5
        assert errors[-1] == pytest.approx(expected, rel=0.4)
    assert errors == sorted(errors, reverse=True)


def test_summaries_are_means_and_deviations_over_seeds():
    figures = dict.fromkeys(("accuracy", "ece", "calibrated_ece", "brier", "away_from_map"), 0.5)
    rows = [
        {
            **{"protocol": "80/20 split", "method": "m", "chosen_by": "validation", "link": link},
            **{"nll": nll, "is_choice": chosen, "seed": seed, "shifted": {}, **figures},
        }
        for seed, link, nll, chosen in (
            (0, "mc", 1.0, True),
            (1, "mc", 3.0, False),
            (1, "p", 2.0, True),
        )
    ]
    summary = {row["link"]: row["nll"] for row in summarize(rows)}
    assert summary["mc"] == pytest.approx((2.0, 2**0.5))
    assert summary["p"] == (2.0, 0.0)
    assert summary["preferred"] == pytest.approx((1.5, 0.5**0.5))
    assert spread([2.0]) == (2.0, 0.0)


def test_jacobians_of_margins_are_those_of_autograd():
    la, batch = fitted(), ragged_batches(seed=5)[0]
    model, labels = lora_model("bert").eval(), batch["labels"]
    texts = [unpadded(batch, row) for row in range(len(labels))]
    Js = torch.stack([jacobian(model, text) for text in texts])
    f_mu = torch.stack([logits_of(model, text).detach() for text in texts])
    trial = SimpleNamespace(
        _posterior_and_statistics=(la, la.predictive_statistics([batch])),
        _labels={"test": labels},
    )
    groups = Trial.jacobians_by_margin(trial)
    top = f_mu.topk(2)
    rows = torch.arange(len(f_mu))
    norms = (Js[rows, top.indices[:, 0]] - Js[rows, top.indices[:, 1]]).square().sum(1)
    margins = top.values[:, 0] - top.values[:, 1]
    order = margins.argsort()
    assert [group["margin"] for group in groups] == pytest.approx(margins[order].tolist())
    assert [group["squared_norm"] for group in groups] == pytest.approx(norms[order].tolist())
    right = (f_mu.argmax(1) == labels)[order].double().tolist()
    assert [group["accuracy"] for group in groups] == right
