"""Names of the protocols, which figures and tables share."""

WHOLE = "whole training set"
SPLIT = "80/20 split"
PREFERRED = "preferred"  # the link of a method that a seed's validation data prefer
