"""Sums of Kronecker factors over the data, and what their eigenvalues say under any prior."""
