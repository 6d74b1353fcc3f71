"""What a test runner's own report says, read in the host process: one file per runner family."""
