"""Where the optimizers were in 2021; see ``persia.compat``."""
