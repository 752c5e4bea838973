"""Load, drills and benches."""
