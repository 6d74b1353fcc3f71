"""Sampler engines: the HTTP they speak, the client, the embedded server, and two kinds of fakes."""
