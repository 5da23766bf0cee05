"""The experiment on averages at its smallest."""

import torch
from torch.testing import assert_close

from benchmarks.training import Averaged
from tests.benchmarks.support import run, trained, write_grammar


def trained_weights(model):
    """Copy what requires a gradient."""
    weights = [each for each in model.parameters() if each.requires_grad]
    return [each.detach().clone() for each in weights]


class Recording(Averaged):
    """Averages, and copies the trained weights before it does."""

    def __init__(self, share):
        super().__init__(share)
        self.seen = []

    def after_step(self, model, step, **places):
        self.seen.append(trained_weights(model))
        super().after_step(model, step, **places)


def test_a_recipe_leaves_the_mean_of_the_last_steps(prepared):
    recipe = Recording(0.3)
    model = trained(prepared("cola", steps=10), recipe=recipe).model
    *_, of_last_step = recipe.seen
    places = zip(trained_weights(model), *recipe.seen[-3:], strict=True)
    for found, *last in places:
        assert_close(found, torch.stack(last).mean(0))
    assert not torch.equal(trained_weights(model)[-1], of_last_step[-1])


def test_each_way_to_train_has_its_rows(tiny_models, tmp_path):
    write_grammar(tmp_path)
    finished = run(
        tmp_path / "results",
        "averages --quiet --second-decays",
        task="cola",
        data=tmp_path,
        model=tiny_models[False],
        steps=20,
        learning_rate=0.01,
        batch_size=8,
        shares=[0.6, 0.4],
        cache=tmp_path / "cache",
    )
    ways = ("decayed", "averaged over 0.6", "averaged over 0.4")
    ways = (*ways, "first stage averaged over 0.6")
    names = {row["name"] for row in finished.figures["methods"]}
    for way in ways:
        assert {f"In stages, MAP, {way}", f"In stages, {way}"} <= names
    trainings = list((tmp_path / "cache").glob("fine-tuned-*.pt"))
    # Two stages each, but a first stage that is trained already.
    assert len(trainings) == 2 * len(ways) - 1
