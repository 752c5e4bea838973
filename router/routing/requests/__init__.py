"""Life of a request: admission, attempts, resumable record, recovery, quota and usage. No HTTP here."""
