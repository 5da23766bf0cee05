"""Free text: draws of the posterior, what they change, scores of texts, generation."""
