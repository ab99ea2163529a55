"""Policies: which windows an insert keeps (checkpoints.py), and what is given up first (retention.py)."""
