"""What works with which model, adapter, precision and wrapper: the cases and their
outcomes.
"""
