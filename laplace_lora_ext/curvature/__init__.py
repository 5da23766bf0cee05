"""Sums of Kronecker factors over the data, and their eigenvalues under any prior."""
