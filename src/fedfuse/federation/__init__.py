"""A federation of sites that exchange files: what they agree on, what each site does, and how its files are fused."""
