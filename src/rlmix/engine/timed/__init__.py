"""Replicas that only take time: SGLang's HTTP, the step times of an accelerator, no model.

For loads that a scripted engine is too slow for: one process serves a whole fleet for about 0.1 ms
of CPU a request. Tokens mean nothing here; times, prefix caches, queues, weight versions and faults
do. Every number that such a replica reports is marked as emulated.
"""
