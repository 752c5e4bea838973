"""The life of a request: admission, attempts, its resumable record, recovery. No HTTP here."""
