"""Free text: the model with drawn weights, scores of texts, choices of the prior, generation."""
