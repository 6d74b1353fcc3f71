"""From finished sessions to what one optimizer step trains on. Pure functions, numpy only."""
