"""Timings beside their peers: what is timed, how, and the check that comes first."""
