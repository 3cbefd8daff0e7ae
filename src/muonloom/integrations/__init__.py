"""Muon inside other training systems; each is imported by its own name only."""
