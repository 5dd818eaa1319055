"""Admission: everything that comes from outside is judged here, once."""
