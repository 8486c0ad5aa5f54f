"""The original's commands for Kubernetes, which are gone; see ``persia.compat``."""

from typing import TYPE_CHECKING

from persia._deprecated import names_of

if not TYPE_CHECKING:  # where any name would be taken for one
    __getattr__ = names_of(__name__)
