"""Results of a run: ``results.json``, ``report.html``, tables on the terminal."""
