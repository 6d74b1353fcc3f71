"""Number formats as the accelerators' checkpoints define them. Pure functions on torch tensors."""
