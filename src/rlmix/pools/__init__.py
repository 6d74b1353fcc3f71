"""Replicas of sampler engines: boot, verify, keep up to date, watch, replace."""
