"""Servers and stores that are killed, and what is there afterwards."""
