"""Programs that kill servers and stores, and count what is there afterwards."""
