"""What a run leaves: ``results.json``, ``report.html``, tables on the terminal."""
