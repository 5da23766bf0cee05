"""The experiment on averages at its smallest."""

import torch
from torch.testing import assert_close

from benchmarks.training import Averaged
from tests.benchmarks.support import run, trained


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
    places = zip(trained_weights(model), *recipe.seen[-3:], strict=True)
    for found, *last in places:
        assert_close(found, torch.stack(last).mean(0))
        # At a constant rate the last steps still move.
        assert not torch.equal(last[-1], last[-2])


def test_each_way_to_train_has_its_rows(grammar, tmp_path):
    command = "averages --quiet --second-decays --shares 0.6 0.4"
    finished = run(tmp_path / "results", command, **grammar)
    ways = ("decayed", "averaged over 0.6", "averaged over 0.4")
    ways = (*ways, "first stage averaged over 0.6")
    names = {row["name"] for row in finished.figures["methods"]}
    for way in ways:
        assert {f"In stages, MAP, {way}", f"In stages, {way}"} <= names
    # Two stages each, but a first stage that is trained already.
    trainings = list(grammar["cache"].glob("fine-tuned-*.pt"))
    assert len(trainings) == 2 * len(ways) - 1
