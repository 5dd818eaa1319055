"""What can be known of a network: its units, its costs, how it reads inputs, and how several answer together."""
