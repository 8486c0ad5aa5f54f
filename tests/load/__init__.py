"""Many data-loaders and ranks at one embedding-worker and one server: clients, no model."""
