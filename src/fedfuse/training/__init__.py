"""One round of local training, as every client does it and a server with rows of its own."""
