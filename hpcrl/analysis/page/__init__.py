"""The page of one or several runs: one HTML file that opens without network (``hpcrl report RUN -o report.html``)."""
