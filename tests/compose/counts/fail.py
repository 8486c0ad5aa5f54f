"""A training script with a mistake."""

raise SystemExit(7)
