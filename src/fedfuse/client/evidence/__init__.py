"""What clients send beside their weights; each kind says what it reveals and how the door checks it."""
