"""How many replicas each pool should have, and what they cost."""
