"""From mean and covariance of the logits to probabilities."""
