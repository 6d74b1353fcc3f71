"""Where trainer and pools compute different logprobs, and why."""
