"""The papers' tables as data with their sources, and what our networks count beside them."""

from nearsight.models.published import expatt, qna, sasa
from nearsight.models.published.compare import Cell, Comparison, compare
from nearsight.models.published.schema import PAPERS, Paper, Row, Table, paper_of

__all__ = ["PAPERS", "TABLES", "Cell", "Comparison", "Paper", "Row", "Table", "compare", "paper_of"]

TABLES: dict[str, tuple[Table, ...]] = {"sasa": sasa.TABLES, "qna": qna.TABLES, "expatt": expatt.TABLES}
