"""The report page of a run: reads a run folder, writes one self-contained `report.html` into it."""
