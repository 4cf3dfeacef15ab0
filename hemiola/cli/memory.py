"""The memory budget of an engine as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from hemiola.cache.memory import MemoryBudget


def memory_table(budget: MemoryBudget) -> Table:
    """One row per use; limits are marked, and the sum stands beside what the machine had available."""
    table = Table("memory", "bytes", "", "how", box=None, pad_edge=False)
    table.columns[1].justify = "right"
    for row in budget.rows:
        table.add_row(row.name, f"{row.num_bytes:,}", "at most" if row.is_limit else "", row.detail)
    table.add_row("together", f"{budget.total_bytes:,}", "at most", f"{budget.available_bytes:,} bytes were available")
    return table


def show_memory(budget: MemoryBudget) -> None:
    """Write the table to stderr."""
    Console(stderr=True).print(memory_table(budget))
