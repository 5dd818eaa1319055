"""The door: all that clients send is judged here, once. Read `admit` first; it says what to read next."""
