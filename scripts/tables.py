"""Tables in the documents that are made from the code: options, metrics, reasons.

python -m scripts.tables            prints them
python -m scripts.tables --write    puts them into their pages
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from impress_sglang.config import OPTIONS, ImpressConfig, Option
from impress_sglang.serving.metrics import COUNTERS, GAUGES, PREFIX
from impress_sglang.serving.why import Reason

DOCS = Path(__file__).parents[1] / "docs"
BEGIN, END = "<!-- {0}: made by `python -m scripts.tables --write` -->", "<!-- /{0} -->"
GROUPS = {
    "Store": "ssd_dir ssd_gb min_free_gb namespace_gb write_after write_gb_per_day ttl "
    "store store_gb min_prefix_tokens approximation_depth chunk_tokens",
    "Precision and retention": "bits basis keep retention min_retention load",
    "Text that is no prefix": "blend blend_min_tokens blend_seconds truncate",
    "Memory": "device_gb host_gb buffer_gb half_life",
    "Queue": "lookahead schedule",
    "Disk": "readahead io_engine io_depth io_timeout show_prompts",
    "Comparison": "policy probe_heads alpha reorder_interval reorder_key",
}


def options() -> str:
    """One table per group."""
    left = {option.field: option for option in OPTIONS}
    parts = []
    for name, fields in GROUPS.items():
        rows = [_option(left.pop(field)) for field in fields.split()]
        table = _table(("flag", "default (values)", "meaning"), rows)
        parts.append(f"### {name}\n\n{table}")
    assert not left, f"give these options a group: {', '.join(left)}"
    return "\n\n".join(parts)


def metrics() -> str:
    """Counters, gauges and their labels."""
    rows = [
        (f"`{PREFIX}{metric.name}{{{','.join(metric.labels)}}}`".replace("{}", ""), metric.help)
        for metric in (*COUNTERS, *GAUGES)
    ]
    return _table(("metric", "meaning"), rows)


def reasons() -> str:
    """What `why` of a report may say."""
    rows = [(f"`{reason}`", reason.meaning) for reason in Reason]
    return _table(("reason", "meaning"), rows)


def _option(option: Option) -> Sequence[str]:
    default = getattr(ImpressConfig(), option.field)
    shown = f"{default:g}" if isinstance(default, float) else str(default)
    cell = f"`{shown}`" if shown else "none"
    values = option.rule.expected.removeprefix("one of ").removesuffix(" and finite")
    return f"`{option.flag}`", f"{cell} ({values})", option.help


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In Markdown."""
    cells = (" | ".join(text.replace("*", r"\*") for text in row) for row in rows)
    lines = [" | ".join(heads), "---|" * (len(heads) - 1) + "---", *cells]
    return "\n".join(f"|{line}|" if line.startswith("---") else f"| {line} |" for line in lines)


TABLES = {
    "options": (DOCS / "options.md", options),
    "metrics": (DOCS / "operation.md", metrics),
    "reasons": (DOCS / "api.md", reasons),
}


def page_with_table(name: str, page: str) -> str:
    """The page with the table between its two marks."""
    begin, end = BEGIN.format(name), END.format(name)
    before, rest = page.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n\n{TABLES[name][1]()}\n\n{end}{after}"


if __name__ == "__main__":
    for name, (path, make) in TABLES.items():
        if "--write" in sys.argv[1:]:
            page = path.read_text(encoding="utf-8")
            path.write_text(page_with_table(name, page), encoding="utf-8")
        else:
            print(make())
