"""The policy's files: the bundled warm start, its tokenizer and the chat format."""
