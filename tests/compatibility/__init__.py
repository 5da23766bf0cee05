"""What works with which model, adapter, precision and wrapper."""
