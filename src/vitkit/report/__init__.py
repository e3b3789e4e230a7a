"""HTML reports: shared page template, charts and one module per report."""
