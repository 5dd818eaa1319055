"""A federation of sites that exchange files: what they agree on, and what each site and whoever fuses does with it."""
