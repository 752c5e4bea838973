"""Life of a request: admission, attempts, resumable record, recovery, quota. No HTTP here."""
