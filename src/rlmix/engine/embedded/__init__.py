"""The embedded engine: a small torch server that computes in an accelerator's number formats."""
