"""The pass over training data: sums of batches, of all ranks, and of an interrupted run."""
