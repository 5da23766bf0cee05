"""Free text: scores under drawn weights, choices of the prior, generation."""
