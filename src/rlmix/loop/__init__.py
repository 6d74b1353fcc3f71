"""The wiring of a training run: one place where the rooms meet."""
