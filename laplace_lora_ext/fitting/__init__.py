"""The pass over training data: sums of batches, of other ranks, and of a run that was ended."""
