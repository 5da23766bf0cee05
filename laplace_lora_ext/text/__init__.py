"""Free text: scores under drawn weights, batches of choices."""
