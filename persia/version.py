"""The version, in one place; setup.py and the metadata read it from here."""

__version__ = "1.0.0.dev0"
