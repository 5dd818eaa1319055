"""The server's side: the loop, the door, the judge, and how a cohort becomes a model."""
