from typing import final

@final
class Batch:
    """One request: its arguments, and its signs in shard order."""
