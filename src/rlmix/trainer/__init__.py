"""The BF16 trainer: one optimizer step, checkpoints, and the source of published weights."""
