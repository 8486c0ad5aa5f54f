"""The compiled core: one extension module per concept, with no slow fallback beside it."""
