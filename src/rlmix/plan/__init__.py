"""What will run, before anything runs: configuration in, RunPlan out. Pure and light."""
