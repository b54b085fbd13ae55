"""How pumice's methods enter other training software."""
