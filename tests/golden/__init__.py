"""What the code said, wrote and computed, as records that a change has to keep bit for bit.

A record is re-recorded on purpose only: ``python -m tests.golden --only wire``.
"""
