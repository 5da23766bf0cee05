"""The one list of methods, ours and rivals: a function and a line each."""

from functools import partial

from laplace.curvature.asdl import AsdlGGN

from benchmarks.methods import functional, posteriors, sampled, trained_again
from benchmarks.methods import method as points
from benchmarks.methods.method import Method, PointMethod, Posterior

# Stock curvatures in this library's class.
LORA_DIAG = partial(posteriors.over_lora, structure="diag")
LORA_KRON = partial(posteriors.over_lora, structure="kron")
STOCK_ROWS = [("marglik_layerwise", "probit")]
# The stock classes themselves, for comparisons of costs.
STOCK_DIAG = partial(posteriors.stock, structure="diag")
STOCK_KRON = partial(posteriors.stock, structure="kron")
STOCK_KRON_ASDL = partial(posteriors.stock, structure="kron", backend=AsdlGGN)
# Rivals that train again, each by its own recipe.
BY_BLOB = partial(trained_again.retrained, trained_again.BLoB())
BY_IVON = partial(trained_again.retrained, trained_again.IVONLoRA())
BY_SWAG = partial(trained_again.of_iterates, trained_again.SWAG())
BY_MONTECLORA = partial(trained_again.alone, trained_again.MonteCLoRA())

# Of encoders, and of no figure of calibration but `cross`.
HEAD_ALONE = Posterior("head", "Head alone", posteriors.of_head, calibrated=False)
# Without an evidence: of `stages` alone, where held-out texts choose the prior.
by_held_out = partial(Posterior, calibrated=False)
of_costs = partial(Posterior, calibrated=False, costs=True)

ALL: tuple[Method, ...] = (
    PointMethod("map", "MAP", points.as_it_is),
    PointMethod("mc_dropout", "MC dropout", points.with_dropout),
    PointMethod("checkpoint_ensemble", "Checkpoint ensemble", points.last_checkpoints),
    PointMethod("deep_ensemble", "Deep ensemble", points.other_seeds),
    PointMethod("tfb", "TFB", sampled.training_free),
    PointMethod("blob", "BLoB", BY_BLOB),
    PointMethod("ivon", "IVON-LoRA", BY_IVON),
    PointMethod("swag", "SWAG", BY_SWAG),
    PointMethod("monteclora", "MonteCLoRA", BY_MONTECLORA),
    PointMethod("distilled", "Student of a deep ensemble", trained_again.distilled),
    Posterior(
        "last_layer", "Last layer (LLLA)", posteriors.of_last_layer, on_training=True
    ),
    Posterior("diag", "Stock diag", LORA_DIAG, shown=STOCK_ROWS),
    Posterior("kron", "Stock Kron", LORA_KRON, shown=STOCK_ROWS),
    Posterior(
        "lowrank_kron_paper", "lowrank_kron (paper)", posteriors.of_paper, costs=True
    ),
    Posterior(
        "lowrank_kron",
        "lowrank_kron",
        posteriors.lowrank_kron,
        on_training=True,
        costs=True,
        shown=[
            ("marglik_scalar", "mean_field"),
            ("tfb_rule", "mean_field"),
            ("agreement", "mean_field"),
            ("validation_elsewhere", "mean_field"),
        ],
    ),
    by_held_out("subset", "Subset-of-data GP", functional.SubsetLaplace.of),
    by_held_out("ella", "ELLA", functional.ELLALaplace.of),
    by_held_out("valla", "VaLLA", functional.VaLLALaplace.of),
    HEAD_ALONE,
    of_costs("bare", "Bare loops", posteriors.BareLoops),
    of_costs("stock_kron", "Stock Kron", STOCK_KRON),
    of_costs("stock_kron_asdl", "Stock Kron (ASDL)", STOCK_KRON_ASDL),
    of_costs("stock_diag", "Stock diag", STOCK_DIAG),
)
METHODS = {method.key: method for method in ALL}
POSTERIORS = [method for method in ALL if isinstance(method, Posterior)]
# What each experiment measures, in the order of tables.
COSTS = [method for method in POSTERIORS if method.costs]
CURVATURES = [method for method in POSTERIORS if method.calibrated]
CALIBRATED = [method for method in ALL if method not in POSTERIORS]
CALIBRATED += CURVATURES


def posterior(key: str) -> Posterior:
    """Return a method that is fitted on training batches, by its key."""
    method = METHODS[key]
    assert isinstance(method, Posterior)
    return method
