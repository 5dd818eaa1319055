"""Bytes: safetensors with a JSON header, limits checked before anything is allocated."""
