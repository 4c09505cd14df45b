"""Cores, memory, threads, time, and being asked to stop."""
