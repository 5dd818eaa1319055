"""The client's side: how it trains and what it brings."""
