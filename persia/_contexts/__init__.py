"""What is behind ``persia.ctx``, which has the names: a module for each context."""
