"""Life of a request: admission, attempts, resumable record, recovery. No HTTP here."""
