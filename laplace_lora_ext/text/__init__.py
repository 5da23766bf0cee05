"""Free text: scores under drawn weights, a choice of the prior, batches of choices."""
