"""Sampler engines: the HTTP they speak, the client, the embedded server and a scripted fake."""
