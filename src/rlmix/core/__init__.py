"""The nouns every room shares. Imports nothing else of rlmix and nothing heavy."""
