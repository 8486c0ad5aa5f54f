"""Native code of users: compiled where it runs, kept in a cache, or taken from a wheel.

Nothing here loads torch but the process that ``torch_child`` is; parameter servers compile the
kernels of their users with ``shared_library``.
"""
