"""A report for people, as tables."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from hemiola.simulate.report import Report

_TIMES = {
    "queueing": "queueing",
    "first_token": "to the first token",
    "between_tokens": "between tokens",
    "end_to_end": "end to end",
}
_POOLS = {
    "blocks_held": "KV blocks, held",
    "blocks_published": "KV blocks, findable",
    "slots_held": "state slots",
    "snapshots": "snapshots",
    "host_snapshots": "snapshots on the host",
    "swapped_bytes": "bytes swapped out",
}


def render(report: Report, console: Console) -> None:
    """Write the report; what it assumes comes last."""
    model, outcomes = report.model, report.outcomes
    lines = (
        f"{model['name']}: {model['state_bytes']:,} state bytes per request, {model['kv_bytes_per_token']:,} KV bytes "
        f"per token",
        f"{len(report.requests):,} requests: {outcomes['finished']:,} finished, {outcomes['aborted']:,} aborted, "
        f"{outcomes['refused']:,} refused; {report.simulated_s:,.1f} s simulated, "
        f"{report.output_tokens_per_s:,.1f} output tokens/s",
    )
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for problem, count in report.refusals.items():
        console.print(f"refused: {count:,} x {problem}", highlight=False, markup=False, soft_wrap=True)
    for table in (_times(report), _prefix(report), _steps(report), _pools(report)):
        console.print(table)
    cost = ", ".join(f"{name} {value:g}" for name, value in report.cost.items())
    console.print(f"cost model: {cost}", highlight=False, markup=False, soft_wrap=True)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=index == 0)
    return table


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f}" if seconds < 1 else f"{1000 * seconds:,.0f}"


def _times(report: Report) -> Table:
    table = _table("Times in ms", "", "count", "mean", "p50", "p90", "p99", "max")
    for key, name in _TIMES.items():
        if (spread := report.times_s[key]) is not None:
            values = (spread.mean, spread.p50, spread.p90, spread.p99, spread.max)
            table.add_row(name, f"{spread.count:,}", *(_ms(value) for value in values))
    return table


def _prefix(report: Report) -> Table:
    prefix = report.prefix
    table = _table("Prefix reuse, of admitted prompts", "", "prompts", "prompt tokens", "share of tokens")

    def add(name: str, prompts: int, tokens: int) -> None:
        table.add_row(name, f"{prompts:,}", f"{tokens:,}", f"{tokens / max(1, prefix.tokens):.1%}")

    add("all", prefix.prompts, prefix.tokens)
    add("reused", prefix.prompts_hit, prefix.tokens_hit)
    for reason, prompts in prefix.misses.items():
        add(f"missed: {reason}", prompts, prefix.tokens_missed.get(reason, 0))
    return table


def _steps(report: Report) -> Table:
    steps, preemptions = report.steps, report.preemptions
    table = _table("Steps", "", "")
    table.add_row("steps", f"{steps.steps:,}")
    table.add_row("share of time in steps", f"{steps.busy_s / max(report.simulated_s, 1e-9):.1%}")
    for name, spread in (("rows", steps.rows), ("tokens", steps.tokens)):
        if spread is not None:
            figures = (spread.mean, spread.p50, spread.p90, spread.max)
            table.add_row(f"{name} per step: mean, p50, p90, max", ", ".join(f"{value:,.1f}" for value in figures))
    table.add_row("tokens computed: prefill, decode", f"{steps.prefill_tokens:,}, {steps.decode_tokens:,}")
    table.add_row("token budget used", f"{steps.budget_used:.1%}")
    table.add_row("preempted, to compute again", f"{preemptions['recomputed']:,}")
    table.add_row("  tokens of them", f"{preemptions['recomputed_tokens']:,}")
    table.add_row("preempted, swapped to the host", f"{preemptions['swapped']:,}")
    table.add_row("  bytes of them", f"{preemptions['swapped_bytes']:,}")
    for event in ("taken", "rolled", "hits", "host_hits", "evicted", "to_host", "refused"):
        table.add_row(f"snapshots: {event.replace('_', ' ')}", f"{report.snapshot_counts[event]:,}")
    table.add_row("KV blocks evicted", f"{report.blocks_evicted:,}")
    table.add_row("integrity checks, all clean", f"{report.integrity_checks:,}")
    return table


def _pools(report: Report) -> Table:
    table = _table("Pools over simulated time", "", "size", "mean", "peak")
    for key, name in _POOLS.items():
        use = report.pools[key]
        table.add_row(name, f"{use.size:,}", f"{use.mean:,.1f}", f"{use.peak:,}")
    return table
