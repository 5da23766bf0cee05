"""Calibration of the paper's methods, on its tasks or on tasks made of installed sources."""
