"""What the server does to a fused model before the round ends."""
