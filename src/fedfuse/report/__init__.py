"""Tables, plots and pages from run directories: reads what a run left on disk, trains nothing, imports no torch."""

from fedfuse.report.page import write_page
from fedfuse.report.read import Run, find_runs, read_run
from fedfuse.report.scores import SummaryRow, summary
from fedfuse.report.tables import markdown, rich_table

__all__ = ["Run", "SummaryRow", "find_runs", "markdown", "read_run", "rich_table", "summary", "write_page"]
