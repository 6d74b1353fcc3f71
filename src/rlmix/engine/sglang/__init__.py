"""Real SGLang servers: where they are installed, how they start, what they say of themselves."""
