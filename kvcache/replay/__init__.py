"""Replay of request traces and named workloads through the manager's batched calls."""
