"""Repository tasks: where they come from and how a submitted diff is judged."""
