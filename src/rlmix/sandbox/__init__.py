"""Private machines for commands of a model: created, used, killed as a whole."""
